"""Chunks get the encoding that their own bytes ask for."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.codecs.choose import SAMPLE_BYTES, Encoder, choose
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.encodings import decode_chunk
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD
from torpor.shared.errors import SnapshotDamaged

NOISE = random.Random(1).randbytes(1 << 20)
encode_chunk = Encoder(Effort()).encode
WORDS = " ".join(random.Random(2).choices([f"word{n}" for n in range(500)], k=50_000)).encode()


def test_noise_stays_raw_and_costs_no_copy() -> None:
    code, stored = encode_chunk(NOISE)
    assert code == RAW.code
    assert stored is NOISE


def test_text_becomes_zstd() -> None:
    code, stored = encode_chunk(WORDS)
    assert code == ZSTD.code
    assert len(stored) < len(WORDS) / 2


def test_what_lz4_does_as_well_becomes_lz4() -> None:
    mixed = b"".join(NOISE[n * 4096 : n * 4096 + 4096] * 2 for n in range(8))
    assert choose(mixed) is LZ4
    assert encode_chunk(mixed)[0] == LZ4.code


def test_the_sample_is_of_the_middle() -> None:
    margin = 5 * SAMPLE_BYTES
    assert choose(bytes(margin) + NOISE[:SAMPLE_BYTES] + bytes(margin)) is RAW
    assert choose(NOISE[:margin] + WORDS[:SAMPLE_BYTES] + NOISE[:margin]) is ZSTD


def test_a_sample_that_promised_too_much_is_stored_raw() -> None:
    lured = NOISE[: 1 << 19] + WORDS[:SAMPLE_BYTES] + NOISE[1 << 19 :]
    assert choose(lured) is ZSTD
    code, stored = encode_chunk(lured)
    assert len(stored) <= len(lured)
    assert decode_chunk(code, stored, len(lured)) == lured


@settings(max_examples=100)
@given(
    plain=st.one_of(
        st.binary(min_size=1, max_size=2000),
        st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=30), st.integers(1, 3000)),
    )
)
def test_any_chunk_comes_back_and_never_grows(plain: bytes) -> None:
    code, stored = encode_chunk(plain)
    assert len(stored) <= len(plain)
    assert decode_chunk(code, stored, len(plain)) == plain


@pytest.mark.parametrize("code", [99, 255, -1])
def test_an_unknown_encoding_is_named(code: int) -> None:
    with pytest.raises(SnapshotDamaged, match=f"unknown encoding {code}: use a newer torpor"):
        decode_chunk(code, b"x", 1)


def test_numbers_become_planes_and_come_back() -> None:
    weights = struct.pack(
        f"<{1 << 18}f", *(random.Random(3).gauss(0, 0.02) for _ in range(1 << 18))
    )
    bf16 = b"".join(weights[n + 2 : n + 4] for n in range(0, len(weights), 4))
    code, stored = encode_chunk(bf16, [Run(len(bf16), Element.BF16)])
    assert code == PLANES.code
    assert len(bf16) / len(stored) > 1.45
    assert decode_chunk(code, stored, len(bf16)) == bf16


def test_a_wrong_element_costs_ratio_only() -> None:
    code, stored = encode_chunk(WORDS, [Run(len(WORDS), Element.BF16)])
    assert len(stored) <= len(WORDS)
    assert decode_chunk(code, stored, len(WORDS)) == WORDS
