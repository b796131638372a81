"""Chunks of numbers coded on a GPU, into the bytes that the CPU would make of them.

On the GPU: the cut into planes, the rANS streams, and both in reverse. On the CPU: the samples that
decide, and the planes of zstd.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from gpu_kernels.worker import CHUNK_MAX
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS, Method, Places, StoredPlane, choose_ways, huffman
from torpor.shared.values import KIB

WORTH_BYTES: Final = 64 * KIB
"""Runs of elements below this size are coded on the CPU: the call of the GPU alone would take
longer."""


class GpuError(Exception):
    """The GPU cannot be used, or stopped working. The message says why, in one line for a log."""


class Gpu(Protocol):
    """Codes planes, at most CHUNK_MAX plain bytes at once. Thread-safe. Every method raises
    GpuError when anything fails; the GPU is not used again after that."""

    def encode(
        self, parts: Sequence[memoryview], element: Element, coded: Sequence[int]
    ) -> list[tuple[bool, bytes]]:
        """Cut ``parts``, one behind the other, into planes, and put those with the numbers
        ``coded`` through rANS. Returns whether each plane is a rANS stream, and its bytes."""

    def decode(
        self, planes: Sequence[tuple[bool, Buffer]], element: Element, parts: Sequence[memoryview]
    ) -> None:
        """The reverse, into the writable ``parts``. Raises RansStreamError for a stream that breaks
        the format."""

    def close(self) -> None:
        """Give the GPU back. Idempotent."""


def encode_chunk(gpu: Gpu, plain: Buffer, layout: Sequence[Run]) -> bytes | None:
    """As ``RANS.encode``, with the same result."""
    return RANS.encode(plain, layout, partial(_pack, gpu))


def decode_chunk(gpu: Gpu, stored: Buffer, plain_bytes: int) -> memoryview:
    """As ``RANS.decode``, with the same result."""
    return RANS.decode(stored, plain_bytes, unpack=partial(_unpack, gpu))


def _pack(
    gpu: Gpu, plain: memoryview, element: Element, places: Places, room: memoryview
) -> Sequence[tuple[Method, Buffer]]:
    ways = choose_ways(plain, element, places)
    if huffman not in ways or not WORTH_BYTES <= len(room) <= CHUNK_MAX:
        return RANS.pack_all(plain, element, places, room)
    parts = [plain[at : at + size] for at, size in places]
    made = gpu.encode(parts, element, [n for n, way in enumerate(ways) if way is huffman])
    return [
        (Method.RANS, stored) if coded else RANS.pack(memoryview(stored), way)
        for (coded, stored), way in zip(made, ways, strict=True)
    ]


def _unpack(
    gpu: Gpu,
    plain: memoryview,
    element: Element,
    places: Places,
    planes: Sequence[StoredPlane],
) -> None:
    size = sum(size for _, size in places)
    coded = any(plane.method is Method.RANS for plane in planes)
    if not coded or not WORTH_BYTES <= size <= CHUNK_MAX:
        RANS.unpack_all(plain, element, places, planes)
        return
    given = [
        (True, plane.stored) if plane.method is Method.RANS else (False, RANS.unpack(plane))
        for plane in planes
    ]
    gpu.decode(given, element, [plain[at : at + size] for at, size in places])
