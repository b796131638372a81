"""Chunks of numbers encoded on a GPU, into the bytes that the CPU would make of them.

On the GPU: the cut into planes, and the rANS streams. On the CPU: the samples that decide, and the
planes that zstd takes. Planes of noise come back as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from gpu_kernels import batch
from gpu_kernels.device import Device, GpuHangs, Memory, Queue
from gpu_kernels.driver import GpuError
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.driver_thread import DriverThread
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS, Method, Places, choose_ways, huffman
from torpor.shared.values import GIB, KIB, MIB

CHUNK_MAX: Final = 4 * MIB
"""Larger chunks are left to the CPU; no file is cut into any."""
QUEUES: Final = 8
"""Chunks that are encoded at once; others wait."""
QUEUE_BYTES: Final = 5 * CHUNK_MAX + 4 * MIB
"""Device memory of a queue: a chunk, its planes, their streams, and words on their way, which take
twice a chunk; 64 KiB and some for each plane that is shorter than a segment, of at most 31."""
PINNED_BYTES: Final = 2 * CHUNK_MAX + MIB
"""Host memory of a queue: a chunk on its way there, its planes on their way back, and jobs."""
DEVICE_BYTES_MAX: Final = QUEUES * QUEUE_BYTES
"""192 MiB, besides what the driver takes for itself."""
FREE_LEAST: Final = 2 * GIB
"""A GPU with less memory free is left to the work that it is rented for."""
ENCODE_S: Final = 30.0
"""A chunk that takes longer hangs in the driver. Its work on a queue is waited for shorter."""
GIVE_BACK_S: Final = 10.0
"""A driver that takes longer to take the GPU back is left behind with it."""

WORTH_BYTES: Final = 64 * KIB  # what is less is encoded before the GPU has been asked


class GpuEncoder:
    """Encodes chunks on one GPU. Thread-safe. No call waits for the driver without an end.

    GpuError is raised when the GPU has less than FREE_LEAST free, and by ``encode`` when anything
    fails: it is then of no more use. ``release`` is called once, after ``close``, when no thread is
    at work on the device any more, from any thread; never, where the GPU hangs.
    """

    def __init__(self, device: Device, release: Callable[[], None]) -> None:
        free_bytes = device.free_bytes()
        if free_bytes < FREE_LEAST:
            raise GpuError(
                f"only {free_bytes // MIB} MiB of {device.name} are free, under "
                f"{FREE_LEAST // MIB} it is left to the work there"
            )
        self._device = device
        self._release = release
        self._turns = threading.BoundedSemaphore(QUEUES)
        self._lock = threading.Lock()
        self._idle: list[DriverThread] = []
        self._working = 0
        self._closed = self._hangs = False

    def takes(self, plain_bytes: int) -> bool:
        """Whether a chunk of that size fits."""
        return 0 < plain_bytes <= CHUNK_MAX

    def encode(self, plain: Buffer, layout: Sequence[Run]) -> bytes | None:
        """As ``RANS.encode``, with the same result."""
        if not self.takes(len(plain)):
            raise ValueError(f"a chunk of {len(plain)} bytes: the GPU takes up to {CHUNK_MAX}")
        with self._turns, self._working_here(), self._thread() as thread:
            return thread.run(partial(self._encode, thread, memoryview(plain), layout), ENCODE_S)

    def close(self) -> None:
        """Give the GPU back, at once or with the last chunk that is on it. Idempotent."""
        with self._lock:
            last = not self._closed and not self._working
            self._closed = True
        if last:
            self._give_back()

    def _encode(
        self, thread: DriverThread, plain: memoryview, layout: Sequence[Run]
    ) -> bytes | None:
        if thread.queue is None:
            thread.queue = self._device.queue(QUEUE_BYTES, PINNED_BYTES)
        with thread.queue.scope():
            return RANS.encode(plain, layout, partial(_pack, thread.queue))

    @contextmanager
    def _working_here(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise GpuError("it was given back")
            self._working += 1
        try:
            yield
        except GpuHangs:
            self._hangs = True
            raise
        finally:
            with self._lock:
                self._working -= 1
                last = self._closed and not self._working
            if last:
                self._give_back()

    @contextmanager
    def _thread(self) -> Iterator[DriverThread]:
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        thread = thread or DriverThread("gpu-encode")
        try:
            yield thread
        except BaseException:  # its queue may still be working, so no other chunk gets it
            thread.end()
            raise
        with self._lock:
            self._idle.append(thread)

    def _give_back(self) -> None:
        threads, self._idle = self._idle, []
        for thread in threads:
            thread.end()
        if self._hangs:  # the driver may still write into the memory that it has
            return
        try:
            thread = DriverThread("gpu-end")
        except RuntimeError:  # the system gives no more threads
            self._end()
            return
        with suppress(GpuHangs):
            thread.run(self._end, GIVE_BACK_S)
        thread.end()

    def _end(self) -> None:
        self._device.close()
        self._release()


def _pack(
    queue: Queue, plain: memoryview, element: Element, places: Places, room: memoryview
) -> Sequence[tuple[Method, Buffer]]:
    """A ``Packer``; what it returns is valid within the queue's scope."""
    ways = choose_ways(plain, element, places)
    if huffman not in ways or len(room) < WORTH_BYTES:
        return RANS.pack_all(plain, element, places, room)
    held = queue.put(*(plain[at : at + size] for at, size in places))
    planes = [held]
    if element.width > 1:
        (cut,) = batch.split(queue, [held], element.width, element.turned)
        planes = [cut.plane(number) for number in range(element.width)]
    coded: list[Memory | None] = [None] * len(planes)
    numbers = [number for number, way in enumerate(ways) if way is huffman]
    streams = batch.rans_encode(queue, [planes[number] for number in numbers])
    for number, stream in zip(numbers, streams, strict=True):
        coded[number] = stream
    wanted = [stream or plane for stream, plane in zip(coded, planes, strict=True)]
    return [
        RANS.pack(view, way) if stream is None else (Method.RANS, view)
        for view, way, stream in zip(queue.fetch(wanted), ways, coded, strict=True)
    ]
