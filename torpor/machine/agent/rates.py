"""Ratio and speed of encodings: on one core, in seconds of CPU time, and on a GPU."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from torpor.machine.agent.content import json_lines, sources, weights
from torpor.shared.codecs import gpu as on_gpu
from torpor.shared.codecs.codec import Buffer, Codec
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.gpu import Gpu, GpuError
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.values import MIB, Coded

CHUNK_BYTES: Final = 4 * MIB
"""Bytes of a chunk, as a file of a workspace is cut."""
GPU_THREADS: Final = 8
"""Chunks that are sent to a GPU at once, as many as an agent has workers."""


@dataclass(frozen=True)
class Coder:
    """A codec as a benchmark drives it: whole chunks in, whole chunks out. ``encode`` returns None
    where nothing is gained; the chunk is then stored raw."""

    name: str
    encode: Callable[[memoryview], Buffer | None]
    decode: Callable[[Buffer, int], Buffer]


def samples(limit: int, seed: int) -> Iterator[tuple[str, bytes, Element]]:
    """The built-in kinds of content, ``limit`` bytes of each, and what each is made of. No sources
    where this Python has none of its library."""
    dice = random.Random(seed)  # noqa: S311 - content, not a secret
    yield "BF16 weights", weights(limit // 2, dice), Element.BF16
    held = bytearray()
    for _, content in sources(seed):
        held += content
        if len(held) >= limit:
            break
    if held:
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
    """The encodings that a CPU writes."""
    for encoding in ENCODINGS.values():
        gains = element is not Element.BYTES or not encoding.needs_layout
        if encoding.written_by == "CPU" and gains:
            yield coder_of(encoding.codec, element)


def run_coder(
    data: str, plain: bytes, coder: Coder, rounds: int, chunk_bytes: int = CHUNK_BYTES
) -> Coded:
    """Encode and decode all chunks ``rounds`` times after one that warms up; checks that they come
    back. Where a codec gains nothing, the chunk counts as stored raw."""
    chunks = _chunks(plain, chunk_bytes)
    encode_s: list[float] = []
    decode_s: list[float] = []
    stored_bytes = decoded = 0
    for number in range(rounds + 1):
        started = time.thread_time()
        stored = [coder.encode(chunk) for chunk in chunks]
        between = time.thread_time()
        pairs = [(s, c) for s, c in zip(stored, chunks, strict=True) if s is not None]
        back = [coder.decode(encoded, len(chunk)) for encoded, chunk in pairs]
        ended = time.thread_time()
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


def run_gpu(data: str, plain: bytes, element: Element, gpu: Gpu, rounds: int) -> Coded:
    """As ``run_coder``, on a GPU and by the clock, several chunks at once. GpuError where the GPU
    fails, or gains nothing, or a chunk does not come back."""
    chunks = _chunks(plain, CHUNK_BYTES)

    def encode(chunk: memoryview) -> bytes:
        stored = on_gpu.encode_chunk(gpu, chunk, [Run(len(chunk), element)])
        if stored is None:
            raise GpuError(f"it gains nothing on {data}")
        if RANS.decode(stored, len(chunk)) != chunk:
            raise GpuError(f"what it encoded of {data} did not come back")
        return stored

    def decode(stored: bytes, chunk: memoryview) -> None:
        if on_gpu.decode_chunk(gpu, stored, len(chunk)) != chunk:
            raise GpuError(f"what it decoded of {data} was wrong")

    encode_s: list[float] = []
    decode_s: list[float] = []
    with ThreadPoolExecutor(GPU_THREADS) as threads:
        for _ in range(rounds + 1):
            started = time.perf_counter()
            stored = list(threads.map(encode, chunks))
            between = time.perf_counter()
            list(threads.map(decode, stored, chunks))
            encode_s.append(between - started)
            decode_s.append(time.perf_counter() - between)
    return Coded(
        data, RANS.name, len(plain), sum(map(len, stored)),
        tuple(encode_s[1:]), tuple(decode_s[1:]), by="GPU",
    )  # fmt: skip


def digest_s(plain: bytes) -> float:
    """CPU seconds of one core for the MD5 of a pack, for each of its bytes."""
    started = time.thread_time()
    hashlib.md5(plain, usedforsecurity=False)
    return (time.thread_time() - started) / len(plain)


def _chunks(plain: bytes, chunk_bytes: int) -> Sequence[memoryview]:
    return [memoryview(plain)[at : at + chunk_bytes] for at in range(0, len(plain), chunk_bytes)]
