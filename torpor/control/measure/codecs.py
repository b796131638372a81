"""Ratio and speed of encodings on this host, on one core each, in seconds of CPU time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from torpor.control.measure.content import json_lines, sources, weights
from torpor.control.measure.figures import MB, Figure
from torpor.shared.codecs.codec import Buffer, Codec
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.stock import RAW
from torpor.shared.values import MIB

CHUNK_BYTES: Final = 4 * MIB
"""Bytes of a chunk, as a file of a workspace is cut."""


@dataclass(frozen=True)
class Coder:
    """A codec as a benchmark drives it: whole chunks in, whole chunks out. ``encode`` returns None
    where nothing is gained; the chunk is then stored raw."""

    name: str
    encode: Callable[[memoryview], Buffer | None]
    decode: Callable[[Buffer, int], Buffer]


@dataclass(frozen=True)
class Coded:
    """One codec on one kind of data: seconds of CPU time of each round over all chunks.

    ``decode_s`` is empty where nothing was gained, so that nothing is decoded.
    """

    data: str
    codec: str
    plain_bytes: int
    stored_bytes: int
    encode_s: tuple[float, ...]
    decode_s: tuple[float, ...]


def samples(limit: int, seed: int) -> Iterator[tuple[str, bytes, Element]]:
    """The built-in kinds of content, ``limit`` bytes of each, and what each is made of."""
    dice = random.Random(seed)  # noqa: S311 - content, not a secret
    yield "BF16 weights", weights(limit // 2, dice), Element.BF16
    held = bytearray()
    for _, content in sources(seed):
        held += content
        if len(held) >= limit:
            break
    yield "sources", bytes(held[:limit]), Element.BYTES
    lines = json_lines(1 + limit // 120, dice)
    yield "JSON lines", lines[:limit], Element.BYTES
    yield "random bytes", dice.randbytes(limit), Element.BYTES


def coder_of(codec: Codec, element: Element) -> Coder:
    """A codec on chunks that are of ``element`` from end to end."""
    return Coder(
        codec.name,
        lambda plain: codec.encode(plain, [Run(len(plain), element)]),
        codec.decode,
    )


def coders(element: Element) -> Iterator[Coder]:
    """The encodings that a CPU writes, which are the only ones that can be advised. A snapshot may
    also hold encodings that only a GPU writes; these figures say nothing about them."""
    for encoding in ENCODINGS.values():
        gains = element is not Element.BYTES or not encoding.needs_layout
        if encoding.written_by == "CPU" and gains:
            yield coder_of(encoding.codec, element)


def run_coder(
    data: str, plain: bytes, coder: Coder, rounds: int, chunk_bytes: int = CHUNK_BYTES
) -> Coded:
    """Encode and decode all chunks ``rounds`` times after one that warms up; checks that they come
    back. Where a codec gains nothing, the chunk counts as stored raw."""
    chunks = [memoryview(plain)[at : at + chunk_bytes] for at in range(0, len(plain), chunk_bytes)]
    encode_s: list[float] = []
    decode_s: list[float] = []
    stored_bytes = decoded = 0
    for number in range(rounds + 1):
        started = time.process_time()
        stored = [coder.encode(chunk) for chunk in chunks]
        between = time.process_time()
        pairs = [(s, c) for s, c in zip(stored, chunks, strict=True) if s is not None]
        back = [coder.decode(encoded, len(chunk)) for encoded, chunk in pairs]
        ended = time.process_time()
        decoded = len(back)
        if number:
            encode_s.append(between - started)
            decode_s.append(ended - between)
            continue
        if any(memoryview(got) != chunk for got, (_, chunk) in zip(back, pairs, strict=True)):
            raise RuntimeError(f"{coder.name} does not give {data} back")
        stored_bytes = sum(
            len(chunk) if encoded is None else min(len(encoded), len(chunk))
            for encoded, chunk in zip(stored, chunks, strict=True)
        )
    return Coded(
        data, coder.name, len(plain), stored_bytes,
        tuple(encode_s), tuple(decode_s) if decoded else (),
    )  # fmt: skip


def measure_codecs(limit: int, rounds: int, seed: int) -> list[Figure]:
    """Stored bytes, and rates of encoding ("up") and decoding ("down"), for each kind of data."""
    figures: list[Figure] = []
    for data, plain, element in samples(limit, seed):
        for coder in coders(element):
            figures += figures_of(run_coder(data, plain, coder, rounds))
    return figures


def figures_of(coded: Coded) -> Iterator[Figure]:
    """One measurement as figures: the share that is stored, and both rates."""
    share = coded.stored_bytes / coded.plain_bytes
    whole = Figure("codec", coded.codec, "ratio", (share,), phase="stored", data=coded.data,
                   measured_from="this host, one core")  # fmt: skip
    yield whole
    if coded.codec == RAW.name:
        return  # the encoding copies nothing, so its rate would mean nothing
    up, down = _rates(coded, coded.encode_s), _rates(coded, coded.decode_s)
    yield replace(whole, phase="", unit="MB/s", values=up, direction="up")
    if down:
        yield replace(whole, phase="", unit="MB/s", values=down, direction="down")


def _rates(coded: Coded, seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(coded.plain_bytes / max(s, 1e-9) / MB for s in seconds)
