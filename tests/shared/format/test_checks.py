"""Every refusal of docs/format.md, one lie each."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.manifests import LIES, PLAIN, Lie, entry, honest, with_chunk
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.errors import ManifestInvalid
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.manifest import DIRECTORY, FILE, Extent, decode_manifest, encode_manifest


def test_an_honest_manifest_is_taken() -> None:
    check_manifest(honest(), "it")


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_refused(lie: Lie) -> None:
    blob, _ = encode_manifest(lie.make(), PLAIN)
    manifest, _ = decode_manifest(blob, PLAIN, "it")  # the lie is in the claims, not in the types
    with pytest.raises(ManifestInvalid) as refused:
        check_manifest(manifest, "snapshot 17")
    assert lie.says in str(refused.value)
    assert str(refused.value).startswith("snapshot 17 is refused: ")
    assert str(refused.value).endswith("; nothing was written")


def test_the_limits_themselves_are_taken() -> None:
    longest = b"n" * 255
    entries = [
        *honest().entries,
        entry(DIRECTORY, longest, mode=0o7777, uid=(1 << 32) - 2, gid=(1 << 32) - 2),
        entry(FILE, longest + b"/" + longest, xattrs=((b"u" * 255, bytes(65536)),)),
        entry(FILE, b"vast", size=1 << 50, extents=(Extent(-1, 0, 1 << 50),)),
        entry(FILE, b"past", mtime_ns=-(1 << 62)),
    ]
    check_manifest(honest(entries=entries), "it")


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
