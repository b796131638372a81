"""The manifest object: what goes in comes out, and nothing else does."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.manifests import HEADER, PLAIN, honest, object_of
from torpor.shared.errors import ManifestInvalid, WrongKey
from torpor.shared.format.keys import SEAL_BYTES, Seal
from torpor.shared.format.manifest import (
    HEADER_BYTES,
    Manifest,
    decode_manifest,
    encode_manifest,
    manifest_root,
)
from torpor.shared.values import GIB, MIB

SEALED = Seal(bytes(range(32)))
BODY = msgspec.msgpack.encode(honest())
seals = pytest.mark.parametrize("seal", [PLAIN, SEALED], ids=["plain", "sealed"])


@seals
def test_a_manifest_comes_back(seal: Seal) -> None:
    blob, root = encode_manifest(honest(), seal)
    assert decode_manifest(blob, seal, "it") == (honest(), root)
    assert manifest_root(blob, "it") == root == seal.name(BODY)


@seals
def test_the_object_is_as_the_format_says(seal: Seal) -> None:
    blob, root = encode_manifest(honest(), seal)
    flags = 1 if seal.sealed else 0
    assert HEADER.unpack(blob[:60]) == (b"TORPOR\r\n", 1, flags, len(BODY), root, seal.key_id)
    assert HEADER.size == HEADER_BYTES == 60
    frame = bytes(seal.open(blob[60:], blob[:60]))
    assert zstandard.ZstdDecompressor().decompress(frame) == BODY
    assert len(blob) - 60 == len(frame) + (SEAL_BYTES if seal.sealed else 0)
    assert object_of(BODY)[:60] == encode_manifest(honest(), PLAIN)[0][:60]


def test_a_sealed_manifest_shows_nothing() -> None:
    blob, _ = encode_manifest(honest(), SEALED)
    again, _ = encode_manifest(honest(), SEALED)
    assert blob[60:] != again[60:]  # a nonce is used once
    assert b"whole" not in blob


def test_a_header_cannot_be_moved_to_another_body() -> None:
    blob, _ = encode_manifest(honest(), SEALED)
    other, _ = encode_manifest(honest(run="another"), SEALED)
    with pytest.raises(ManifestInvalid, match="damaged"):
        decode_manifest(blob[:60] + other[60:], SEALED, "it")


# -- keys


def test_an_attacker_without_the_key_cannot_forge_a_sealed_manifest() -> None:
    forged = object_of(BODY, Seal(b"k" * 32), key_id=SEALED.key_id)
    with pytest.raises(ManifestInvalid, match="damaged"):
        decode_manifest(forged, SEALED, "it")
    downgraded = object_of(BODY, PLAIN)
    with pytest.raises(WrongKey):
        decode_manifest(downgraded, SEALED, "it")
    plain_with_the_flag = object_of(BODY, PLAIN, flags=1, key_id=SEALED.key_id)
    with pytest.raises(ManifestInvalid, match="damaged"):
        decode_manifest(plain_with_the_flag, SEALED, "it")


# -- damage


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


@settings(max_examples=150)
@given(blob=st.binary(max_size=300))
def test_noise_is_refused(blob: bytes) -> None:
    for noise in (blob, b"TORPOR\r\n\1\0\0\0" + blob):
        with pytest.raises((ManifestInvalid, WrongKey)):
            decode_manifest(noise, PLAIN, "it")


# -- bombs


def test_a_frame_that_hides_gigabytes_is_refused_before_it_is_unpacked() -> None:
    size = 600 * MIB
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    zeros = bytes(MIB)
    frame = b"".join(compressor.compress(zeros) for _ in range(600)) + compressor.flush()
    blob = object_of(b"", frame=frame, body_bytes=size)
    assert len(blob) < 100_000
    with pytest.raises(ManifestInvalid, match="as a bomb"):
        decode_manifest(blob, PLAIN, "it")


def test_a_frame_that_claims_less_than_it_hides_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    frame = compressor.compress(bytes(64 * MIB)) + compressor.flush()
    for body_bytes in (100, 1000, 64 * MIB):
        with pytest.raises(ManifestInvalid, match="not as long as it says"):
            decode_manifest(object_of(b"", frame=frame, body_bytes=body_bytes), PLAIN, "it")


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
    body = b"\x9d"
    for name in Manifest.__struct_fields__:
        if name == field:
            return body
        body += msgspec.msgpack.encode(getattr(honest(), name))
    raise AssertionError(field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x90",
        msgspec.msgpack.encode({"workspace": "demo"}),
        msgspec.msgpack.encode(["too", "few"]),
        _prefix_until("entries") + b"\xdd\xff\xff\xff\xff",  # four thousand million entries
        _prefix_until("chunks") + b"\xdd\xff\xff\xff\xff",
        _prefix_until("roots") + b"\xdd\xff\xff\xff\xff\xa1a",
        _prefix_until("environment") + b"\xdf\xff\xff\xff\xff",
        _prefix_until("environment") + b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0\x80",
        _prefix_until("roots") + b"\x91\xa2\xff\xfe",  # text that is not UTF-8
    ],
    ids=range(11),
)
def test_a_body_that_is_no_manifest_is_refused(body: bytes) -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(body)
    with pytest.raises(ManifestInvalid):
        decode_manifest(object_of(body, frame=frame), PLAIN, "it")


_WRONG: list[Any] = [None, True, "text", 1.5, -1.5, b"bytes", {}, {"a": 1}, [[]], [{}], [1], [None]]


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_a_field_of_another_type_is_refused(field: str) -> None:
    refused = 0
    right = msgspec.to_builtins(honest(), builtin_types=(bytes,))
    position = Manifest.__struct_fields__.index(field)
    for wrong in _WRONG:
        body = msgspec.msgpack.encode([*right[:position], wrong, *right[position + 1 :]])
        try:
            manifest, _ = decode_manifest(object_of(body), PLAIN, "it")
        except ManifestInvalid:
            refused += 1
        else:
            # then the type fits after all: {} is a dict, a text is a text
            assert type(getattr(manifest, field)) is type(wrong)
    assert refused >= len(_WRONG) - 3


@pytest.mark.parametrize("position", range(13))
def test_an_entry_s_field_of_another_type_is_refused(position: int) -> None:
    right = msgspec.to_builtins(honest(), builtin_types=(bytes,))
    entries = right[7]
    for wrong in (None, "text", 1.5, {}, [[None]], 1 << 63 if position not in (6, 7) else None):
        if wrong == 1 << 63 and position in (0, 1, 3, 4, 5):
            continue  # an unsigned 64-bit number is a number: check_manifest's business
        bad = [*entries[2][:position], wrong, *entries[2][position + 1 :]]
        body = msgspec.msgpack.encode([*right[:7], [entries[0], bad], *right[8:]])
        with pytest.raises(ManifestInvalid):
            decode_manifest(object_of(body), PLAIN, "it")
