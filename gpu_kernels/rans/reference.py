"""rANS in numpy: all lanes of all segments step together, as on a GPU. Tests compare the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_kernels.rans.portable import (
    BLOCK_LOG2,
    HEADER,
    LANES,
    LOW,
    PROB_BITS,
    PROB_SUM,
    Layout,
    RansStreamError,
    read_layout,
)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
_BLOCK = 1 << BLOCK_LOG2


def normalise(counts: Words) -> Words:
    """Frequencies that sum to 2^11; every symbol that occurs keeps at least 1."""
    n = int(counts.sum())
    freqs = (counts.astype(np.uint64) * PROB_SUM + n // 2) // n
    freqs = np.where((counts > 0) & (freqs == 0), np.uint64(1), freqs).astype(np.int64)
    while (left := PROB_SUM - int(freqs.sum())) != 0:
        freqs[np.argmax(freqs)] += left if left > 0 else -1
    normalised: Words = freqs.astype(np.uint32)
    return normalised


def encode(plain: Bytes, segment_log2: int) -> bytes:
    """The stream of ``plain`` (1 to 2^30 bytes)."""
    blocks = [plain[at : at + _BLOCK] for at in range(0, len(plain), _BLOCK)]
    freqs = np.stack([normalise(np.bincount(b, minlength=256).astype(np.uint32)) for b in blocks])
    first = np.cumsum(freqs, axis=1, dtype=np.uint32) - freqs
    symbols, active, block = _steps(plain, segment_log2)
    states = np.full(symbols.shape[1:], LOW, np.uint32)
    emitted: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint16]]] = []
    for step in range(len(symbols) - 1, -1, -1):
        freq = np.maximum(freqs[block, symbols[step]], np.uint32(1))
        full = active[step] & (states >> 20 >= freq)
        emitted.append((full, states.astype(np.uint16)))
        x = np.where(full, states >> 16, states)
        stepped = (x // freq << PROB_BITS) + x % freq + first[block, symbols[step]]
        states = np.where(active[step], stepped, x).astype(np.uint32)
    emitted.reverse()
    flags = np.stack([full for full, _ in emitted], axis=1)
    values = np.stack([words for _, words in emitted], axis=1)
    counts = flags.sum(axis=(1, 2))
    body = [
        np.packbits(freqs > 0, axis=1, bitorder="little").tobytes(),
        states.astype("<u4").tobytes(),
        counts.astype("<u2").tobytes(),
        freqs[freqs > 0].astype("<u2").tobytes(),
        values[flags].astype("<u2").tobytes(),
    ]
    present = int((freqs > 0).sum())
    header = HEADER.pack(b"tR", 1, segment_log2, len(plain), present, int(counts.sum()))
    return header + b"".join(body)


def decode(stream: bytes, symbols: int) -> Bytes:
    """Exactly ``symbols`` bytes; raises RansStreamError."""
    layout = read_layout(memoryview(stream), symbols)
    freqs = _read_freqs(stream, layout)
    counts = np.frombuffer(stream, "<u2", layout.segments, layout.counts_at).astype(np.int64)
    sizes = [layout.segment_symbols(segment) for segment in range(layout.segments)]
    if int(counts.sum()) != layout.words or (counts > sizes).any():
        raise RansStreamError("header or sizes")
    words = np.frombuffer(stream, "<u2", layout.words, layout.words_at).astype(np.uint32)
    words = np.append(words, np.uint32(0))  # for lanes that have no words left
    states = np.frombuffer(stream, "<u4", layout.segments * LANES, layout.states_at)
    states = states.reshape(-1, LANES).copy()
    if ((states < LOW) | (states >= LOW << 16)).any():
        raise RansStreamError("first state")
    index = np.arange(256, dtype=np.uint8)
    symbol_of = np.stack([np.repeat(index, row) for row in freqs])
    first = np.cumsum(freqs, axis=1, dtype=np.uint32) - freqs
    out, active, block = _steps(np.zeros(symbols, np.uint8), layout.segment_log2)
    ends = np.cumsum(counts)
    at = ends - counts
    for step in range(len(out)):
        slot = states & (PROB_SUM - 1)
        symbol = symbol_of[block, slot]
        x = freqs[block, symbol] * (states >> PROB_BITS) + slot - first[block, symbol]
        low = active[step] & (x < LOW)
        place = at[:, None] + np.cumsum(low, axis=1) - low
        at += low.sum(axis=1)
        if (at > ends).any():
            raise RansStreamError("number of words")
        x = np.where(low, x << 16 | words[np.minimum(place, np.int64(layout.words))], x)
        states = np.where(active[step], x, states).astype(np.uint32)
        out[step] = symbol
    if (at != ends).any():
        raise RansStreamError("number of words")
    if (states != LOW).any():
        raise RansStreamError("last state")
    return np.ascontiguousarray(out.transpose(1, 0, 2)[active.transpose(1, 0, 2)])


def _steps(
    plain: Bytes, segment_log2: int
) -> tuple[Bytes, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Symbols and whether they are there, each (steps, segments, lanes); blocks (segments, 1)."""
    segments = -(-len(plain) >> segment_log2)
    padded = np.zeros(segments << segment_log2, np.uint8)
    padded[: len(plain)] = plain
    there = np.arange(len(padded)) < len(plain)
    shape = (segments, -1, LANES)
    block = np.arange(segments, dtype=np.int64)[:, None] >> (BLOCK_LOG2 - segment_log2)
    return (
        np.ascontiguousarray(padded.reshape(shape).transpose(1, 0, 2)),
        np.ascontiguousarray(there.reshape(shape).transpose(1, 0, 2)),
        block,
    )


def _read_freqs(stream: bytes, layout: Layout) -> Words:
    bitmaps = np.frombuffer(stream, np.uint8, 32 * layout.blocks, HEADER.size).reshape(-1, 32)
    present = np.unpackbits(bitmaps, axis=1, bitorder="little").astype(bool)
    if int(present.sum()) != layout.present:
        raise RansStreamError("header or sizes")
    freqs = np.zeros(present.shape, np.uint32)
    freqs[present] = np.frombuffer(stream, "<u2", layout.present, layout.freqs_at)
    if (freqs[present] == 0).any() or (freqs.sum(axis=1) != PROB_SUM).any():
        raise RansStreamError("frequency table")
    return freqs
