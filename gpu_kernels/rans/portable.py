"""Decodes rANS streams in plain Python, at about 1 MB/s, so that every snapshot can be read without
a library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LANES = 32
PROB_BITS = 11
PROB_SUM = 1 << PROB_BITS
LOW = 1 << 15
BLOCK_LOG2 = 17
SEGMENT_LOG2 = range(12, 16)
SYMBOLS_MAX = 1 << 30
HEADER = struct.Struct("<2sBBIII")


class RansStreamError(Exception):
    """A stream that breaks the format. Every decoder here raises it; ``part`` says where."""

    def __init__(self, part: str) -> None:
        super().__init__(f"the {part} of a rANS stream is wrong")


@dataclass(frozen=True)
class Layout:
    """Where a stream's sections begin, from its checked header."""

    symbols: int
    segment_log2: int
    present: int
    words: int

    @property
    def blocks(self) -> int:
        return -(-self.symbols >> BLOCK_LOG2)

    @property
    def segments(self) -> int:
        return -(-self.symbols >> self.segment_log2)

    @property
    def states_at(self) -> int:
        return HEADER.size + 32 * self.blocks

    @property
    def counts_at(self) -> int:
        return self.states_at + 4 * LANES * self.segments

    @property
    def freqs_at(self) -> int:
        return self.counts_at + 2 * self.segments

    @property
    def words_at(self) -> int:
        return self.freqs_at + 2 * self.present

    @property
    def bytes(self) -> int:
        return self.words_at + 2 * self.words

    def segment_symbols(self, segment: int) -> int:
        full = 1 << self.segment_log2
        return min(full, self.symbols - segment * full)


def read_layout(stream: memoryview, symbols: int) -> Layout:
    """Check a header against the stream's length and the symbols wanted; raises RansStreamError."""
    if len(stream) < HEADER.size:
        raise RansStreamError("header or sizes")
    magic, version, segment_log2, held, present, words = HEADER.unpack_from(stream)
    layout = Layout(held, segment_log2, present, words)
    if (
        (magic, version, held) != (b"tR", 1, symbols)
        or segment_log2 not in SEGMENT_LOG2
        or not 0 < symbols <= SYMBOLS_MAX
        or layout.bytes != len(stream)
    ):
        raise RansStreamError("header or sizes")
    return layout


def decode(stream: memoryview, symbols: int) -> bytearray:
    """Decode exactly ``symbols`` bytes; raises RansStreamError."""
    layout = read_layout(stream, symbols)
    bitmaps = [
        int.from_bytes(stream[at : at + 32], "little")
        for at in range(HEADER.size, layout.states_at, 32)
    ]
    counts = struct.unpack_from(f"<{layout.segments}H", stream, layout.counts_at)
    if sum(bin(bitmap).count("1") for bitmap in bitmaps) != layout.present:
        raise RansStreamError("header or sizes")
    if sum(counts) != layout.words or any(
        count > layout.segment_symbols(segment) for segment, count in enumerate(counts)
    ):
        raise RansStreamError("header or sizes")
    freqs = struct.unpack_from(f"<{layout.present}H", stream, layout.freqs_at)
    words = struct.unpack_from(f"<{layout.words}H", stream, layout.words_at)
    plain = bytearray()
    table: list[tuple[int, int, int]] = []
    used = taken = 0
    for segment, count in enumerate(counts):
        first = segment << layout.segment_log2
        if first & ((1 << BLOCK_LOG2) - 1) == 0:
            bitmap = bitmaps[first >> BLOCK_LOG2]
            present = [symbol for symbol in range(256) if bitmap >> symbol & 1]
            table = _table(present, freqs[used : used + len(present)])
            used += len(present)
        states = struct.unpack_from(f"<{LANES}I", stream, layout.states_at + 4 * LANES * segment)
        size = layout.segment_symbols(segment)
        plain += _segment(states, words[taken : taken + count], size, table)
        taken += count
    return plain


def _table(present: list[int], freqs: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """For each of 2^11 slots: symbol, frequency, the slot's offset in the symbol's range."""
    if 0 in freqs or sum(freqs) != PROB_SUM:
        raise RansStreamError("frequency table")
    return [
        (symbol, freq, offset)
        for symbol, freq in zip(present, freqs, strict=True)
        for offset in range(freq)
    ]


def _segment(
    first: tuple[int, ...],
    words: tuple[int, ...],
    size: int,
    table: list[tuple[int, int, int]],
) -> bytearray:
    if not all(LOW <= state < LOW << 16 for state in first):
        raise RansStreamError("first state")
    states, plain, taken = list(first), bytearray(size), 0
    for index in range(size):
        lane = index % LANES
        state = states[lane]
        plain[index], freq, offset = table[state & (PROB_SUM - 1)]
        state = freq * (state >> PROB_BITS) + offset
        if state < LOW:
            if taken == len(words):
                raise RansStreamError("number of words")
            state = state << 16 | words[taken]
            taken += 1
        states[lane] = state
    if taken != len(words):
        raise RansStreamError("number of words")
    if any(state != LOW for state in states):
        raise RansStreamError("last state")
    return plain
