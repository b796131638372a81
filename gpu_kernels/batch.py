"""Splits, joins, encodes and decodes batches of planes on a GPU; the bytes equal the C twins'.

Every buffer's size is computed here from the format's bounds (rans.cuh, planes.cuh); a kernel gets
no address that this file has not measured. Each function prepares work, which may be launched any
number of times. Memory is a CuPy array of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_kernels.native import RANS_SEGMENT_LOG2, REFUSALS, Buffer
from gpu_kernels.rans.portable import (
    BLOCK_LOG2,
    HEADER,
    LANES,
    SEGMENT_LOG2,
    SYMBOLS_MAX,
    RansStreamError,
)

if TYPE_CHECKING:
    from gpu_kernels.cuda import Gpu

KERNELS: Final = {
    "planes": ("planes_split", "planes_join"),
    "rans": (
        "rans_tables", "rans_segments", "rans_measure", "rans_pack", "rans_check", "rans_decode",
    ),
}  # fmt: skip
"""The kernels of each fat binary that gpu_kernels.build makes."""
JOBS_MAX: Final = 65_535
"""Jobs that one launch takes at most: CUDA's limit for the grid's second dimension."""
_THREADS: Final = 256
_ALIGN: Final = 256


class Planes(NamedTuple):
    """``width`` planes in one array; plane p begins at ``p * stride``."""

    memory: Any
    elements: int
    stride: int

    def plane(self, number: int) -> Any:
        return self.memory[number * self.stride : number * self.stride + self.elements]


class KernelLaunches(NamedTuple):
    """Kernels, each with its grid and threads, over jobs on the GPU; ``held`` is what they use."""

    gpu: Gpu
    jobs: Any
    kernels: Sequence[tuple[str, tuple[int, int], int]]
    held: Sequence[Any]

    def launch(self) -> None:
        """Put the kernels on the calling thread's stream, and return at once."""
        for kernel, grid, threads in self.kernels:
            self.gpu.launch(kernel, grid, threads, self.jobs)


class RansEncoding(NamedTuple):
    """Planes on their way into streams."""

    work: KernelLaunches
    planes: Sequence[Any]
    rooms: Sequence[Any]
    sizes: Any

    def streams(self) -> list[Any | None]:
        """The stream of each plane, on the GPU; None where it would not be smaller than the
        plane. Waits for the work, which must have been launched."""
        sizes = struct.unpack(f"<{len(self.planes)}I", self.work.gpu.get(self.sizes))
        return [
            room[:size] if 0 < size < plane.nbytes else None
            for room, size, plane in zip(self.rooms, sizes, self.planes, strict=True)
        ]


class RansDecoding(NamedTuple):
    """Streams on their way back into planes."""

    work: KernelLaunches
    verdicts: Any

    def check(self) -> None:
        """Raises RansStreamError if any stream breaks the format. Waits for the work, which must
        have been launched."""
        verdicts = self.work.gpu.get(self.verdicts)
        for refusal in struct.unpack(f"<{len(verdicts) // 4}I", verdicts):
            if refusal:
                raise RansStreamError(REFUSALS.get(refusal, "content"))


def empty_planes(gpu: Gpu, elements: int, width: int) -> Planes:
    """Room for ``width`` planes."""
    stride = -(-elements // _ALIGN) * _ALIGN
    return Planes(gpu.room(stride * width), elements, stride)


def split(
    gpu: Gpu, plains: Sequence[Any], width: int, rotate: bool
) -> tuple[KernelLaunches, list[Planes]]:
    """Cut each of a batch of plain arrays (whole elements) into planes."""
    if width not in (2, 4, 8) or any(plain.nbytes % width for plain in plains):
        raise ValueError(f"{[p.nbytes for p in plains]} bytes are not elements of {width}")
    planes = [empty_planes(gpu, plain.nbytes // width, width) for plain in plains]
    return _planes_work(gpu, "planes_split", plains, planes, width, rotate), planes


def join(
    gpu: Gpu, planes: Sequence[Planes], plains: Sequence[Any], width: int, rotate: bool
) -> KernelLaunches:
    """Put each of a batch of cut arrays back together, into ``plains``."""
    for cut, plain in zip(planes, plains, strict=True):
        if cut.memory.nbytes < cut.stride * width:
            raise ValueError(f"{cut.memory.nbytes} bytes do not hold {width} planes")
        if plain.nbytes != cut.elements * width:
            raise ValueError(f"{cut.elements} elements of {width} do not make {plain.nbytes} bytes")
    return _planes_work(gpu, "planes_join", plains, planes, width, rotate)


def rans_encode(
    gpu: Gpu, planes: Sequence[Any], segment_log2: int = RANS_SEGMENT_LOG2
) -> RansEncoding:
    """Make the stream of each plane."""
    jobs: list[tuple[int, ...]] = []
    rooms: list[Any] = []
    held: list[Any] = [*planes]
    sizes = gpu.room(4 * len(planes))
    for number, plane in enumerate(planes):
        blocks, segments = _counts(plane.nbytes, segment_log2)
        capacity = HEADER.size + 32 * blocks + 130 * segments + 512 * blocks + plane.nbytes
        stream, room = gpu.room(capacity), gpu.room(segments * 2 << segment_log2)
        freqs, places = gpu.room(512 * blocks), gpu.room(4 * blocks)
        words = gpu.room(4 * segments)
        rooms.append(stream)
        held += (room, freqs, places, words)
        jobs.append((
            plane.data.ptr, plane.nbytes, segment_log2, stream.data.ptr, capacity, room.data.ptr,
            freqs.data.ptr, places.data.ptr, words.data.ptr, sizes.data.ptr + 4 * number,
        ))  # fmt: skip
    grid = _rans_grid(planes, segment_log2)
    threads = LANES << (BLOCK_LOG2 - segment_log2)
    kernels = (
        ("rans_tables", grid, 256),
        ("rans_segments", grid, threads),
        ("rans_measure", (1, len(planes)), LANES),
        ("rans_pack", grid, threads),
    )
    return RansEncoding(
        KernelLaunches(gpu, _put_jobs(gpu, jobs), kernels, held), planes, rooms, sizes
    )


def rans_decode(
    gpu: Gpu,
    streams: Sequence[Any],
    plains: Sequence[Any],
    segment_log2: int = RANS_SEGMENT_LOG2,
) -> RansDecoding:
    """Decode streams of one segment size into ``plains``. The kernels refuse any other stream."""
    jobs: list[tuple[int, ...]] = []
    held: list[Any] = [*streams, *plains]
    verdicts = gpu.room(4 * len(streams))
    for number, (stream, plain) in enumerate(zip(streams, plains, strict=True)):
        blocks, segments = _counts(plain.nbytes, segment_log2)
        places, words = gpu.room(4 * blocks), gpu.room(4 * segments)
        held += (places, words)
        jobs.append((
            stream.data.ptr, stream.nbytes, plain.data.ptr, plain.nbytes, segment_log2,
            places.data.ptr, words.data.ptr, verdicts.data.ptr + 4 * number,
        ))  # fmt: skip
    grid = _rans_grid(plains, segment_log2)
    kernels = (
        ("rans_check", (1, len(streams)), LANES),
        ("rans_decode", grid, LANES << (BLOCK_LOG2 - segment_log2)),
    )
    return RansDecoding(KernelLaunches(gpu, _put_jobs(gpu, jobs), kernels, held), verdicts)


def segment_log2_of(stream: Buffer) -> int:
    """The segment size in a stream's header; RansStreamError if it is not one of the format's."""
    if len(stream) < HEADER.size or stream[3] not in SEGMENT_LOG2:
        raise RansStreamError("header or sizes")
    return stream[3]


def _planes_work(
    gpu: Gpu,
    kernel: str,
    plains: Sequence[Any],
    planes: Sequence[Planes],
    width: int,
    rotate: bool,
) -> KernelLaunches:
    jobs = [
        (plain.data.ptr, cut.memory.data.ptr, cut.elements, cut.stride, width, int(rotate))
        for plain, cut in zip(plains, planes, strict=True)
    ]
    most = max(cut.elements for cut in planes)
    grid = (max(1, -(-most // (8 * _THREADS))), len(jobs))
    held = [*plains, *(cut.memory for cut in planes)]
    return KernelLaunches(gpu, _put_jobs(gpu, jobs), ((kernel, grid, _THREADS),), held)


def _put_jobs(gpu: Gpu, jobs: Sequence[tuple[int, ...]]) -> Any:
    if not 0 < len(jobs) <= JOBS_MAX:
        raise ValueError(f"a batch of {len(jobs)}: the limits are 1 and {JOBS_MAX}")
    return gpu.put(b"".join(struct.pack(f"<{len(job)}Q", *job) for job in jobs))


def _rans_grid(plains: Sequence[Any], segment_log2: int) -> tuple[int, int]:
    if any(not 0 < plain.nbytes <= SYMBOLS_MAX for plain in plains):
        raise ValueError(f"a plane must hold 1 to {SYMBOLS_MAX} bytes")
    return max(_counts(plain.nbytes, segment_log2)[0] for plain in plains), len(plains)


def _counts(symbols: int, segment_log2: int) -> tuple[int, int]:
    """Blocks and segments of a plane."""
    return -(-symbols >> BLOCK_LOG2), -(-symbols >> segment_log2)
