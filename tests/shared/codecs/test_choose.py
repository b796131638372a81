"""Chunks get the encoding that their own bytes ask for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.codecs.choose import SAMPLE_BYTES, Encoder, choose
from torpor.shared.codecs.codec import Codec
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.encodings import decode_chunk
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD
from torpor.shared.errors import SnapshotDamaged

NOISE = random.Random(1).randbytes(1 << 20)
WORDS = " ".join(random.Random(2).choices([f"word{n}" for n in range(500)], k=50_000)).encode()
MARGIN = 5 * SAMPLE_BYTES
encode_chunk = Encoder(Effort()).encode


def test_noise_costs_no_copy() -> None:
    assert encode_chunk(NOISE)[1] is NOISE


@pytest.mark.parametrize(
    ("plain", "codec", "most"),
    [
        (NOISE, RAW, 1.0),
        (WORDS, ZSTD, 0.5),
        (b"".join(NOISE[n * 4096 : n * 4096 + 4096] * 2 for n in range(8)), LZ4, 0.52),
        # the sample is of the middle
        (NOISE[:MARGIN] + WORDS[:SAMPLE_BYTES] + NOISE[:MARGIN], ZSTD, 1.0),
        (bytes(MARGIN) + NOISE[:SAMPLE_BYTES] + bytes(MARGIN), RAW, 1.0),
    ],
    ids=["noise", "text", "repetitions", "text in the middle", "noise in the middle"],
)
def test_a_chunk_gets_the_encoding_that_gains(plain: bytes, codec: Codec, most: float) -> None:
    assert choose(plain) is codec
    code, stored = encode_chunk(plain)
    assert code == codec.code
    assert len(stored) <= most * len(plain)
    assert decode_chunk(code, stored, len(plain)) == plain


@settings(max_examples=100)
@given(
    plain=st.one_of(
        st.binary(min_size=1, max_size=2000),
        st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=30), st.integers(1, 3000)),
    ),
    element=st.sampled_from([None, *Element]),
)
def test_any_chunk_comes_back_and_never_grows(plain: bytes, element: Element | None) -> None:
    """Also where its numbers were taken for others: that costs ratio only."""
    code, stored = encode_chunk(plain, [] if element is None else [Run(len(plain), element)])
    assert len(stored) <= len(plain)
    assert decode_chunk(code, stored, len(plain)) == plain


@pytest.mark.parametrize("code", [99, 255, -1])
def test_an_unknown_encoding_is_named(code: int) -> None:
    with pytest.raises(SnapshotDamaged, match=f"unknown encoding {code}: use a newer torpor"):
        decode_chunk(code, b"x", 1)


def test_numbers_become_planes() -> None:
    weights = np.random.default_rng(3).normal(0, 0.02, 1 << 18).astype(np.float32)
    bf16 = (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    code, stored = encode_chunk(bf16, [Run(len(bf16), Element.BF16)])
    assert code == PLANES.code
    assert len(bf16) / len(stored) > 1.45
