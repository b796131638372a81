"""Splits, joins, encodes and decodes batches of planes on a GPU. Bytes as the C twins make.

Every function works in the open scope of a queue and takes its memory there. Every buffer's size is
computed here from the format's bounds (rans.cuh, planes.cuh); a kernel gets no address that this
file has not measured.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpu_kernels.device import ALIGN, Memory, Queue
from gpu_kernels.native import RANS_SEGMENT_LOG2, REFUSALS
from gpu_kernels.rans.portable import (
    BLOCK_LOG2,
    HEADER,
    LANES,
    SEGMENT_LOG2,
    SYMBOLS_MAX,
    RansStreamError,
)

_THREADS: Final = 256
JOBS_MAX: Final = 65_535
"""Jobs of one launch: CUDA's limit for the grid's second dimension."""


class Planes(NamedTuple):
    """``width`` planes in one run of memory; plane p begins at ``p * stride``."""

    memory: Memory
    elements: int
    stride: int

    def plane(self, number: int) -> Memory:
        return self.memory.part(number * self.stride, self.elements)


def split(queue: Queue, plains: Sequence[Memory], width: int, rotate: bool) -> list[Planes]:
    """Cut each of a batch of plain buffers (whole elements) into planes."""
    planes = []
    for plain in plains:
        elements, rest = divmod(plain.bytes, width)
        if rest or width not in (2, 4, 8):
            raise ValueError(f"{plain.bytes} bytes are not elements of {width}")
        stride = _aligned(elements)
        planes.append(Planes(queue.room(stride * width), elements, stride))
    _launch_planes(queue, "planes_split", plains, planes, width, rotate)
    return planes


def join(queue: Queue, planes: Sequence[Planes], width: int, rotate: bool) -> list[Memory]:
    """Put each of a batch of cut buffers back together."""
    for one in planes:
        if one.stride % ALIGN or one.stride < one.elements or one.memory.bytes < one.stride * width:
            raise ValueError(f"{one.memory.bytes} bytes do not hold {width} planes")
    plains = [queue.room(one.elements * width) for one in planes]
    _launch_planes(queue, "planes_join", plains, planes, width, rotate)
    return plains


def rans_encode(
    queue: Queue, planes: Sequence[Memory], segment_log2: int = RANS_SEGMENT_LOG2
) -> list[Memory | None]:
    """The stream of each plane, on the device; None where it would not be smaller than the plane.

    Waits for the streams' sizes.
    """
    jobs: list[tuple[int, ...]] = []
    streams: list[Memory] = []
    results = queue.room(4 * len(planes))
    for number, plane in enumerate(planes):
        blocks, segments = _counts(plane.bytes, segment_log2)
        capacity = HEADER.size + 32 * blocks + 130 * segments + 512 * blocks + plane.bytes
        stream, room = queue.room(capacity), queue.room(segments * 2 << segment_log2)
        freqs, places = queue.room(512 * blocks), queue.room(4 * blocks)
        words = queue.room(4 * segments)
        streams.append(stream)
        jobs.append((
            plane.address, plane.bytes, segment_log2, stream.address, capacity, room.address,
            freqs.address, places.address, words.address, results.address + 4 * number,
        ))  # fmt: skip
    held = _put_jobs(queue, jobs, planes, segment_log2)
    grid = (max(_counts(plane.bytes, segment_log2)[0] for plane in planes), len(planes))
    threads = LANES << (BLOCK_LOG2 - segment_log2)
    queue.launch("rans_tables", grid, 256, held)
    queue.launch("rans_segments", grid, threads, held)
    queue.launch("rans_measure", (1, len(planes)), LANES, held)
    queue.launch("rans_pack", grid, threads, held)
    sizes = struct.unpack(f"<{len(planes)}I", queue.fetch([results])[0])
    return [
        stream.part(0, size) if 0 < size < plane.bytes else None
        for stream, size, plane in zip(streams, sizes, planes, strict=True)
    ]


def rans_decode(
    queue: Queue, streams: Sequence[bytes | memoryview], symbols: Sequence[int]
) -> list[Memory]:
    """Each plane, on the device; raises RansStreamError where any stream is not one.

    Check the streams' hash first all the same: the kernels are bounded, but refuse late.
    """
    jobs: list[tuple[int, ...]] = []
    results = queue.room(4 * len(streams))
    plains: list[Memory] = []
    logs = set()
    for number, (stream, size) in enumerate(zip(streams, symbols, strict=True)):
        segment_log2 = stream[3] if len(stream) >= HEADER.size else 0
        if segment_log2 not in SEGMENT_LOG2:
            raise RansStreamError("header or sizes")
        blocks, segments = _counts(size, segment_log2)
        logs.add(segment_log2)
        source, plain = queue.put(stream), queue.room(size)
        places, words = queue.room(4 * blocks), queue.room(4 * segments)
        plains.append(plain)
        jobs.append((
            source.address, len(stream), plain.address, size, segment_log2, places.address,
            words.address, results.address + 4 * number,
        ))  # fmt: skip
    if len(logs) != 1:
        raise ValueError("streams of one batch must share their segment size")
    segment_log2 = logs.pop()
    held = _put_jobs(queue, jobs, plains, segment_log2)
    grid = (max(_counts(size, segment_log2)[0] for size in symbols), len(streams))
    queue.launch("rans_check", (1, len(streams)), LANES, held)
    queue.launch("rans_decode", grid, LANES << (BLOCK_LOG2 - segment_log2), held)
    for refusal in struct.unpack(f"<{len(streams)}I", queue.fetch([results])[0]):
        if refusal:
            raise RansStreamError(REFUSALS.get(refusal, "content"))
    return plains


def _launch_planes(
    queue: Queue,
    kernel: str,
    plains: Sequence[Memory],
    planes: Sequence[Planes],
    width: int,
    rotate: bool,
) -> None:
    jobs = [
        (plain.address, one.memory.address, one.elements, one.stride, width, int(rotate))
        for plain, one in zip(plains, planes, strict=True)
    ]
    held = _put_jobs(queue, jobs, plains, None)
    most = max(one.elements for one in planes)
    queue.launch(kernel, (max(1, -(-most // (8 * _THREADS))), len(jobs)), _THREADS, held)


def _put_jobs(
    queue: Queue,
    jobs: Sequence[tuple[int, ...]],
    plains: Sequence[Memory],
    segment_log2: int | None,
) -> Memory:
    if not 0 < len(jobs) <= JOBS_MAX:
        raise ValueError(f"a batch of {len(jobs)}: the limits are 1 and {JOBS_MAX}")
    if segment_log2 is not None and any(not 0 < p.bytes <= SYMBOLS_MAX for p in plains):
        raise ValueError(f"a plane must hold 1 to {SYMBOLS_MAX} bytes")
    return queue.put(b"".join(struct.pack(f"<{len(job)}Q", *job) for job in jobs))


def _counts(symbols: int, segment_log2: int) -> tuple[int, int]:
    """Blocks and segments of a plane."""
    return -(-symbols >> BLOCK_LOG2), -(-symbols >> segment_log2)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
