"""Frames of ours, read by the stock zstd library."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_kernels import cases, native


def frame_of(plain: bytes) -> bytes | None:
    lib = native.library()
    assert lib is not None
    frame = native.huffman_frame(lib, plain)
    return None if frame is None else bytes(frame)


def check(plain: bytes) -> bytes | None:
    frame = frame_of(plain)
    if frame is not None:
        assert zstandard.get_frame_parameters(frame).content_size == len(plain)
        decoder = zstandard.ZstdDecompressor()
        assert decoder.decompress(frame, allow_extra_data=False) == plain
        assert b"".join(decoder.read_to_iter(frame)) == plain
        assert len(frame) <= 9 + len(plain) + 3 * (len(plain) // 131_072 + 1)
    return frame


@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize(
    "plain", [pytest.param(plain, id=name) for name, plain in cases.planes_to_encode()]
)
def test_stock_zstd_reads_every_case(plain: bytes) -> None:
    check(plain)


@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("top", [1, 2, 3, 64, 127, 128, 129, 130, 255])
@pytest.mark.parametrize("shape", ["even", "steep", "lone"])
def test_tables_of_every_height(top: int, shape: str) -> None:
    dice = np.random.default_rng(top)
    if shape == "even":
        symbols = dice.integers(0, top + 1, 50_000) // 2 * 2
    elif shape == "steep":  # Fibonacci weights: codes longer than 11 bits before they are limited
        symbols = np.minimum(top, dice.geometric(0.618, 131_072))
    else:
        symbols = np.where(dice.integers(0, 5000, 131_072) == 0, top, 0)
    plain = symbols.clip(0, top).astype(np.uint8).tobytes()
    frame = check(plain)
    if max(plain) <= 128:
        assert frame is not None
    if shape == "lone" and top > 128:
        assert frame is None


@pytest.mark.usefixtures("built_library")
@given(
    seed=st.integers(0, 2**32),
    size=st.one_of(st.integers(1, 400), st.integers(1, 300_000)),
    steepness=st.floats(0.01, 3),
    top=st.integers(1, 140),
)
@settings(max_examples=200, deadline=None)
def test_any_distribution_comes_back(seed: int, size: int, steepness: float, top: int) -> None:
    dice = np.random.default_rng(seed)
    check((top - dice.exponential(1 / steepness, size)).clip(0, 255).astype(np.uint8).tobytes())


@pytest.mark.usefixtures("built_library")
def test_no_worse_than_libzstd_on_exponents() -> None:
    plain = cases.exponents(random.Random(4), 1 << 20)
    frame = check(plain)
    assert frame is not None
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=18, target_length=0
    )
    stock = zstandard.ZstdCompressor(compression_params=parameters).compress(plain)
    assert len(frame) <= len(stock) * 1.005


@pytest.mark.usefixtures("built_library")
def test_nothing_makes_no_frame() -> None:
    assert frame_of(b"") is None
