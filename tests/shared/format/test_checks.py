"""What a reader takes: the limits of docs/format.md themselves. Its refusals: test_refusals.py."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.manifests import entry, honest, with_chunk
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.manifest import DIRECTORY, FILE, SYMLINK, Extent, Skipped


def test_an_honest_manifest_is_taken() -> None:
    check_manifest(honest(), "it")


def test_the_limits_themselves_are_taken() -> None:
    longest = b"n" * 255
    entries = [
        *honest().entries,
        entry(DIRECTORY, longest, mode=0o7777, uid=(1 << 32) - 2, gid=(1 << 32) - 2),
        entry(FILE, longest + b"/" + longest, xattrs=((b"u" * 255, bytes(65536)),)),
        entry(FILE, b"vast", size=1 << 50, extents=(Extent(-1, 0, 1 << 50),)),
        entry(FILE, b"past", mtime_ns=-(1 << 63)),
        entry(FILE, b"future", mtime_ns=(1 << 64) - 1),
        entry(SYMLINK, b"far", target=b"t" * 4095),
    ]
    skipped = [Skipped(0, b"gone/" + longest, "fifo"), Skipped(0, b"d", "anything")]
    check_manifest(honest(entries=entries, skipped=skipped, created_unix=253_402_300_799), "it")
    one, two = honest().chunks
    sealed = [one, msgspec.structs.replace(two, stored=two.plain + 28)]
    packs = [msgspec.structs.replace(honest().packs[0], size=328)]
    check_manifest(honest(chunks=sealed, packs=packs), "it")


@pytest.mark.parametrize("code", ENCODINGS)
def test_every_encoding_of_the_format_is_known(code: int) -> None:
    check_manifest(with_chunk(encoding=code), "it")


def test_chunks_may_stand_in_any_order_and_leave_gaps() -> None:
    one, two = honest().chunks
    moved = honest(
        packs=[msgspec.structs.replace(honest().packs[0], size=1000)],
        chunks=[
            msgspec.structs.replace(one, offset=700),
            msgspec.structs.replace(two, offset=3),
        ],
    )
    check_manifest(moved, "it")
