from __future__ import annotations

import random
import struct
from contextlib import suppress

import numpy as np
import pytest

from gpu_kernels import native
from gpu_kernels.rans import portable, reference
from gpu_kernels.rans.portable import HEADER, RansStreamError
from tests.gpu_kernels import cases

NAMED = list(cases.planes_to_encode())
PLANES = [pytest.param(plain, id=name) for name, plain in NAMED]
SHORT = [pytest.param(plain, id=name) for name, plain in NAMED if len(plain) <= 40_000]


def stream_of(plain: bytes, segment_log2: int = 15) -> bytes:
    return reference.encode(np.frombuffer(plain, np.uint8), segment_log2)


def c_encode(lib: native.Library, plain: bytes, segment_log2: int) -> bytes:
    room = native.rans_bound(lib, len(plain), segment_log2)
    return bytes(native.rans_encode(lib, plain, room, segment_log2) or b"")


@pytest.mark.parametrize("segment_log2", [12, 15])
@pytest.mark.parametrize("plain", PLANES)
def test_c_is_the_reference(lib: native.Library, plain: bytes, segment_log2: int) -> None:
    stream = stream_of(plain, segment_log2)
    assert c_encode(lib, plain, segment_log2) == stream
    assert native.rans_decode(lib, stream, len(plain)) == plain


@pytest.mark.parametrize("plain", PLANES)
def test_reference_decodes_what_it_encoded(plain: bytes) -> None:
    assert reference.decode(stream_of(plain), len(plain)).tobytes() == plain


@pytest.mark.parametrize("plain", SHORT)
def test_plain_python_decodes(plain: bytes) -> None:
    assert portable.decode(memoryview(stream_of(plain, 12)), len(plain)) == plain


def test_exponents_cost_what_their_entropy_says(lib: native.Library) -> None:
    plain = cases.exponents(random.Random(5), 1 << 20)
    counts = np.bincount(np.frombuffer(plain, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(plain)
    entropy_bytes = float(-(shares * np.log2(shares)).sum()) * len(plain) / 8
    assert len(c_encode(lib, plain, 15)) < 1.02 * entropy_bytes


def test_encoding_into_too_little_room_says_so(lib: native.Library) -> None:
    plain = cases.exponents(random.Random(6), 50_000)
    size = len(c_encode(lib, plain, 15))
    assert bytes(native.rans_encode(lib, plain, size) or b"") == c_encode(lib, plain, 15)
    for room in (0, 15, 100, 300, size // 2, size - 1):
        assert native.rans_encode(lib, plain, room) is None
    assert native.rans_encode(lib, b"", 1000) is None


def decoders(lib: native.Library, stream: bytes, symbols: int) -> list[bytes | None]:
    """What each decoder makes of it; None where it refuses."""
    made: list[bytes | None] = []
    for decode in (
        lambda: native.rans_decode(lib, stream, symbols),
        lambda: portable.decode(memoryview(stream), symbols),
        lambda: reference.decode(stream, symbols).tobytes(),
    ):
        made.append(None)
        with suppress(RansStreamError):
            made[-1] = bytes(decode())
    return made


def test_damaged_streams_are_refused_alike(lib: native.Library) -> None:
    dice = random.Random(7)
    refused = 0
    for _ in range(100):  # thousands: tests/gpu_kernels/fuzz.py
        plain = cases.exponents(dice, dice.randrange(1, 6000))
        stream = bytearray(stream_of(plain, dice.choice([12, 15])))
        for _ in range(dice.randrange(1, 3)):
            stream[dice.randrange(len(stream))] ^= 1 << dice.randrange(8)
        if not dice.randrange(5):
            del stream[dice.randrange(len(stream)) :]
        first, *others = decoders(lib, bytes(stream), len(plain))
        assert all(other == first for other in others)
        refused += first is None
    assert refused > 75


def patched(stream: bytes, at: int, form: str, *values: int) -> bytes:
    changed = bytearray(stream)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


PLAIN = cases.exponents(random.Random(8), 9000)
STREAM = stream_of(PLAIN, 12)
LAYOUT = portable.read_layout(memoryview(STREAM), len(PLAIN))


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(STREAM[: HEADER.size - 1], id="less than a header"),
        pytest.param(STREAM[:-1], id="a byte short"),
        pytest.param(STREAM + b"\0", id="a byte long"),
        pytest.param(patched(STREAM, 2, "<B", 2), id="another version"),
        pytest.param(patched(STREAM, 3, "<B", 16), id="segments too long"),
        pytest.param(patched(STREAM, 3, "<B", 0), id="segments of one"),
        pytest.param(patched(STREAM, 4, "<I", len(PLAIN) + 1), id="another size"),
        pytest.param(patched(STREAM, 4, "<I", 0), id="no symbols"),
        pytest.param(patched(STREAM, 8, "<I", 0xFFFFFFFF), id="more tables than 32 bits"),
        pytest.param(patched(STREAM, 12, "<I", 0xFFFFFFFF), id="more words than 32 bits"),
        pytest.param(patched(STREAM, LAYOUT.states_at, "<I", 0x7FFF), id="a state too low"),
        pytest.param(patched(STREAM, LAYOUT.states_at, "<I", 1 << 31), id="a state too high"),
        pytest.param(patched(STREAM, LAYOUT.freqs_at, "<H", 0), id="a frequency of zero"),
        pytest.param(patched(STREAM, LAYOUT.freqs_at, "<H", 2049), id="a frequency too high"),
        pytest.param(patched(STREAM, LAYOUT.counts_at, "<2H", 0, 0xFFFF), id="counts that lie"),
        pytest.param(patched(STREAM, HEADER.size + 8, "<Q", 0), id="a bitmap of fewer symbols"),
    ],
)
def test_every_rule_is_enforced_by_every_decoder(lib: native.Library, stream: bytes) -> None:
    assert decoders(lib, stream, len(PLAIN)) == [None, None, None]


def test_counts_cannot_wrap_around_32_bits(lib: native.Library) -> None:
    # 2^18 segments of count 65535 would sum past 2^32: the bound on each count forbids it.
    symbols, counts = 1 << 18, 64
    plain = bytes(symbols)
    stream = stream_of(plain, 12)
    at = portable.read_layout(memoryview(stream), symbols).counts_at
    lying = patched(stream, at, f"<{counts}H", *([0xFFFF] * counts))
    assert decoders(lib, lying, symbols) == [None, None, None]


def test_normalised_frequencies_always_sum_to_2048() -> None:
    dice = np.random.default_rng(9)
    for _ in range(300):
        counts = (dice.pareto(0.4, 256) * dice.integers(0, 2, 256)).clip(0, 9000).astype(np.uint32)
        counts[int(dice.integers(256))] += 1
        freqs = reference.normalise(counts)
        assert freqs.sum() == 2048
        assert ((freqs > 0) == (counts > 0)).all()
