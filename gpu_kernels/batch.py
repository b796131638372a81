"""Splits, joins, encodes and decodes batches of planes on a GPU. Bytes as the C twins make.

Every function works in the open scope of a queue and takes its memory there. Every buffer's size is
computed here from the format's bounds (rans.cuh, planes.cuh); a kernel gets no address that this
file has not measured. What is prepared may be launched as often as one likes, within the scope.
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


class Work(NamedTuple):
    """Kernels, each with its grid and threads, over jobs that lie on the device."""

    queue: Queue
    jobs: Memory
    kernels: Sequence[tuple[str, tuple[int, int], int]]

    def launch(self) -> None:
        """Put it on the queue, and return at once."""
        for kernel, grid, threads in self.kernels:
            self.queue.launch(kernel, grid, threads, self.jobs)


class RansEncoding(NamedTuple):
    """Planes on their way into streams."""

    work: Work
    planes: Sequence[Memory]
    rooms: Sequence[Memory]
    sizes: Memory

    def streams(self) -> list[Memory | None]:
        """The stream of each plane, on the device; None where it would not be smaller than the
        plane. Waits for the work, which must have been launched."""
        sizes = struct.unpack(f"<{len(self.planes)}I", self.work.queue.fetch([self.sizes])[0])
        return [
            room.part(0, size) if 0 < size < plane.bytes else None
            for room, size, plane in zip(self.rooms, sizes, self.planes, strict=True)
        ]


class RansDecoding(NamedTuple):
    """Streams on their way back into planes."""

    work: Work
    verdicts: Memory

    def check(self) -> None:
        """Raises RansStreamError where any stream is not one. Waits for the work, which must have
        been launched."""
        verdicts = self.work.queue.fetch([self.verdicts])[0]
        for refusal in struct.unpack(f"<{len(verdicts) // 4}I", verdicts):
            if refusal:
                raise RansStreamError(REFUSALS.get(refusal, "content"))


def split(queue: Queue, plains: Sequence[Memory], width: int, rotate: bool) -> list[Planes]:
    """Cut each of a batch of plain buffers (whole elements) into planes."""
    work, planes = prepare_split(queue, plains, width, rotate)
    work.launch()
    return planes


def prepare_split(
    queue: Queue, plains: Sequence[Memory], width: int, rotate: bool
) -> tuple[Work, list[Planes]]:
    """As ``split``, with nothing launched yet."""
    planes = []
    for plain in plains:
        elements, rest = divmod(plain.bytes, width)
        if rest or width not in (2, 4, 8):
            raise ValueError(f"{plain.bytes} bytes are not elements of {width}")
        stride = _aligned(elements)
        planes.append(Planes(queue.room(stride * width), elements, stride))
    return _prepare_planes(queue, "planes_split", plains, planes, width, rotate), planes


def join(queue: Queue, planes: Sequence[Planes], width: int, rotate: bool) -> list[Memory]:
    """Put each of a batch of cut buffers back together."""
    plains = [queue.room(one.elements * width) for one in planes]
    prepare_join(queue, planes, plains, width, rotate).launch()
    return plains


def prepare_join(
    queue: Queue, planes: Sequence[Planes], plains: Sequence[Memory], width: int, rotate: bool
) -> Work:
    """As ``join``, into memory at hand, with nothing launched yet."""
    for one, plain in zip(planes, plains, strict=True):
        if one.stride % ALIGN or one.stride < one.elements or one.memory.bytes < one.stride * width:
            raise ValueError(f"{one.memory.bytes} bytes do not hold {width} planes")
        if plain.bytes != one.elements * width:
            raise ValueError(f"{one.elements} elements of {width} do not make {plain.bytes} bytes")
    return _prepare_planes(queue, "planes_join", plains, planes, width, rotate)


def rans_encode(
    queue: Queue, planes: Sequence[Memory], segment_log2: int = RANS_SEGMENT_LOG2
) -> list[Memory | None]:
    """The stream of each plane, as ``RansEncoding.streams``."""
    encoding = prepare_rans_encode(queue, planes, segment_log2)
    encoding.work.launch()
    return encoding.streams()


def prepare_rans_encode(
    queue: Queue, planes: Sequence[Memory], segment_log2: int = RANS_SEGMENT_LOG2
) -> RansEncoding:
    """As ``rans_encode``, with nothing launched yet."""
    jobs: list[tuple[int, ...]] = []
    rooms: list[Memory] = []
    sizes = queue.room(4 * len(planes))
    for number, plane in enumerate(planes):
        blocks, segments = _counts(plane.bytes, segment_log2)
        capacity = HEADER.size + 32 * blocks + 130 * segments + 512 * blocks + plane.bytes
        stream, room = queue.room(capacity), queue.room(segments * 2 << segment_log2)
        freqs, places = queue.room(512 * blocks), queue.room(4 * blocks)
        words = queue.room(4 * segments)
        rooms.append(stream)
        jobs.append((
            plane.address, plane.bytes, segment_log2, stream.address, capacity, room.address,
            freqs.address, places.address, words.address, sizes.address + 4 * number,
        ))  # fmt: skip
    held = _put_jobs(queue, jobs, planes, segment_log2)
    grid = (max(_counts(plane.bytes, segment_log2)[0] for plane in planes), len(planes))
    threads = LANES << (BLOCK_LOG2 - segment_log2)
    kernels = (
        ("rans_tables", grid, 256),
        ("rans_segments", grid, threads),
        ("rans_measure", (1, len(planes)), LANES),
        ("rans_pack", grid, threads),
    )
    return RansEncoding(Work(queue, held, kernels), planes, rooms, sizes)


def rans_decode(
    queue: Queue, streams: Sequence[bytes | memoryview], symbols: Sequence[int]
) -> list[Memory]:
    """Each plane, on the device; raises RansStreamError where any stream is not one.

    Check the streams' hash first all the same: the kernels are bounded, but refuse late.
    """
    logs = {stream[3] if len(stream) >= HEADER.size else 0 for stream in streams}
    if not logs <= set(SEGMENT_LOG2):
        raise RansStreamError("header or sizes")
    if len(logs) != 1:
        raise ValueError("streams of one batch must share their segment size")
    held = [queue.put(stream) for stream in streams]
    plains = [queue.room(size) for size in symbols]
    decoding = prepare_rans_decode(queue, held, plains, logs.pop())
    decoding.work.launch()
    decoding.check()
    return plains


def prepare_rans_decode(
    queue: Queue,
    streams: Sequence[Memory],
    plains: Sequence[Memory],
    segment_log2: int = RANS_SEGMENT_LOG2,
) -> RansDecoding:
    """As ``rans_decode``, of streams on the device into planes at hand, nothing launched yet."""
    jobs: list[tuple[int, ...]] = []
    verdicts = queue.room(4 * len(streams))
    for number, (stream, plain) in enumerate(zip(streams, plains, strict=True)):
        blocks, segments = _counts(plain.bytes, segment_log2)
        places, words = queue.room(4 * blocks), queue.room(4 * segments)
        jobs.append((
            stream.address, stream.bytes, plain.address, plain.bytes, segment_log2, places.address,
            words.address, verdicts.address + 4 * number,
        ))  # fmt: skip
    held = _put_jobs(queue, jobs, plains, segment_log2)
    grid = (max(_counts(plain.bytes, segment_log2)[0] for plain in plains), len(streams))
    kernels = (
        ("rans_check", (1, len(streams)), LANES),
        ("rans_decode", grid, LANES << (BLOCK_LOG2 - segment_log2)),
    )
    return RansDecoding(Work(queue, held, kernels), verdicts)


def _prepare_planes(
    queue: Queue,
    kernel: str,
    plains: Sequence[Memory],
    planes: Sequence[Planes],
    width: int,
    rotate: bool,
) -> Work:
    jobs = [
        (plain.address, one.memory.address, one.elements, one.stride, width, int(rotate))
        for plain, one in zip(plains, planes, strict=True)
    ]
    held = _put_jobs(queue, jobs, plains, None)
    most = max(one.elements for one in planes)
    grid = (max(1, -(-most // (8 * _THREADS))), len(jobs))
    return Work(queue, held, ((kernel, grid, _THREADS),))


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
