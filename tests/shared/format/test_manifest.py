"""The manifest object: what goes in comes out, and nothing else does. What a reader refuses, by
rule: test_refusals.py."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.manifests import HEADER, PLAIN, honest, object_of
from torpor.shared.errors import ManifestInvalid, WrongKey
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import (
    HEADER_BYTES,
    Manifest,
    decode_manifest,
    encode_manifest,
    manifest_root,
)
from torpor.shared.values import GIB, MIB

BODY = msgspec.msgpack.encode(honest())
seals = pytest.mark.parametrize("seal", [PLAIN, Seal(bytes(range(32)))], ids=["plain", "sealed"])


@seals
def test_a_manifest_comes_back_from_the_object_that_the_format_describes(seal: Seal) -> None:
    blob, root = encode_manifest(honest(), seal)
    assert decode_manifest(blob, seal, "it") == (honest(), root)
    assert manifest_root(blob, "it") == root == seal.name(BODY)
    header = (b"TORPOR\r\n", 1, int(seal.sealed), len(BODY), root, seal.key_id)
    assert HEADER.unpack(blob[:60]) == header
    assert HEADER.size == HEADER_BYTES == 60
    assert zstandard.ZstdDecompressor().decompress(bytes(seal.open(blob[60:], blob[:60]))) == BODY


@seals
def test_a_manifest_cut_short_anywhere_is_refused(seal: Seal) -> None:
    blob, _ = encode_manifest(honest(), seal)
    for length in range(len(blob)):
        with pytest.raises((ManifestInvalid, WrongKey)):
            decode_manifest(blob[:length], seal, "it")


@seals
@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_never_gives_another_manifest(seal: Seal, data: st.DataObject) -> None:
    blob = bytearray(encode_manifest(honest(), seal)[0])
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    try:
        manifest, root = decode_manifest(bytes(blob), seal, "it")
    except (ManifestInvalid, WrongKey):
        return
    # a bit of the frame that means nothing: what was said still stands
    assert not seal.sealed
    assert (manifest, root) == (honest(), PLAIN.name(BODY))


def test_a_frame_that_claims_gigabytes_and_holds_nothing_costs_nothing() -> None:
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(2 * MIB)))
    honest_size = (2 * MIB).to_bytes(4, "little")
    at = frame.index(honest_size)
    frame[at : at + 4] = (2 * GIB).to_bytes(4, "little")
    tracemalloc.start()
    try:
        with pytest.raises(ManifestInvalid):
            blob = object_of(b"", frame=bytes(frame), body_bytes=2 * GIB)
            decode_manifest(blob, PLAIN, "it")
        assert tracemalloc.get_traced_memory()[1] < 50 * MIB
    finally:
        tracemalloc.stop()


# -- types


def _prefix_until(field: str) -> bytes:
    """The body's msgpack up to ``field``."""
    names = Manifest.__struct_fields__
    before = names[: names.index(field)]
    return b"\x9d" + b"".join(msgspec.msgpack.encode(getattr(honest(), name)) for name in before)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgspec.msgpack.encode({"workspace": "demo"}),
        _prefix_until("entries") + b"\xdd\xff\xff\xff\xff",  # four thousand million entries
        _prefix_until("environment") + b"\xdf\xff\xff\xff\xff",
        _prefix_until("environment") + b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0\x80",
        _prefix_until("roots") + b"\x91\xa2\xff\xfe",  # text that is not UTF-8
    ],
    ids=range(6),
)
def test_a_body_that_is_no_manifest_is_refused(body: bytes) -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(body)
    with pytest.raises(ManifestInvalid):
        decode_manifest(object_of(body, frame=frame), PLAIN, "it")


@pytest.mark.parametrize("position", range(13))
def test_an_entry_s_field_of_another_type_is_refused(position: int) -> None:
    right = msgspec.to_builtins(honest(), builtin_types=(bytes,))
    entries = right[7]
    for wrong in (None, "text", 1.5, {}, [[None]]):
        bad = [*entries[2][:position], wrong, *entries[2][position + 1 :]]
        body = msgspec.msgpack.encode([*right[:7], [entries[0], bad], *right[8:]])
        with pytest.raises(ManifestInvalid):
            decode_manifest(object_of(body), PLAIN, "it")
