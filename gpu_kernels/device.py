"""A GPU and the queues of work on it, through the CUDA driver.

The tests run the same code over a driver of their own, which runs the kernels on the CPU:
shim/driver.cpp.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from gpu_kernels.driver import LIBRARY, NON_BLOCKING, NOT_READY, Driver, GpuError
from gpu_kernels.native import BUILT, Buffer, address_of

ALIGN: Final = 256
"""Every address that a kernel gets is a multiple of this; kernels ask for 16."""
PATIENCE_S: Final = 10.0
"""A queue whose work takes longer has hung: its work takes milliseconds, also on a busy GPU."""
KERNELS: Final = {
    "planes": ("planes_split", "planes_join"),
    "rans": (
        "rans_tables", "rans_segments", "rans_measure", "rans_pack", "rans_check", "rans_decode",
    ),
}  # fmt: skip
"""Of each fat binary that gpu_kernels.build makes."""

_POLL_S: Final = 1e-4  # between two looks at a queue, at most


class Memory(NamedTuple):
    """A run of a queue's memory, for as long as the scope that it was taken in: of the device, or
    pinned on the host where that is said."""

    address: int
    bytes: int

    def part(self, offset: int, size: int) -> Memory:
        if not 0 <= offset <= offset + size <= self.bytes:
            raise ValueError(f"bytes {offset} to {offset + size} of {self.bytes}")
        return Memory(self.address + offset, size)


class Device:
    """One GPU, its primary context held, with the kernels loaded. Thread-safe.

    Raises GpuError, here and in all that follows, with the reason; after one in a queue the GPU is
    of no more use to this process.
    """

    def __init__(self, library: str = LIBRARY, built: Path = BUILT, index: int = 0) -> None:
        images = _images(built)
        self.driver = Driver(library)
        self.driver.call("cuInit", 0)
        count, self._number = ctypes.c_int(), ctypes.c_int()
        self.driver.call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= index < count.value:
            raise GpuError(f"GPU {index} was asked for, the CUDA driver lists {count.value}")
        self.driver.call("cuDeviceGet", ctypes.byref(self._number), index)
        self.name = self._name()
        self._context = ctypes.c_void_p()
        self._modules: list[ctypes.c_void_p] = []
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._queues: list[Queue] = []
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        try:
            self.enter()
            for room, image in images.items():
                self._load(room, image)
        except BaseException:
            self.close()
            raise

    def enter(self) -> None:
        """Make this GPU current for the calling thread: the driver keeps that for each thread."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> int:
        """The GPU's free memory."""
        self.enter()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def queue(self, device_bytes: int, pinned_bytes: int) -> Queue:
        """A new queue; its memory, on the GPU and pinned on the host, is taken at once."""
        self.enter()
        queue = Queue(self, device_bytes, pinned_bytes)
        with self._lock:
            self._queues.append(queue)
        return queue

    def drop(self, queue: Queue) -> None:
        """Give a queue's memory back before the device is closed; it must not be at work."""
        self.enter()
        with self._lock:
            self._queues.remove(queue)
        queue.free()

    def function(self, kernel: str) -> ctypes.c_void_p:
        return self._functions[kernel]

    def close(self) -> None:
        """Give everything back, the context last; no queue may be at work. Idempotent.

        What the driver refuses to take back, after a fault, goes with the context.
        """
        if not self._context:
            return
        self.driver.ask("cuCtxSetCurrent", self._context)
        with self._lock:
            queues, self._queues = self._queues, []
        for queue in queues:
            queue.free()
        while self._modules:
            self.driver.ask("cuModuleUnload", self._modules.pop())
        self.driver.ask("cuCtxSetCurrent", None)
        self.driver.ask("cuDevicePrimaryCtxRelease_v2", self._number)
        self._context = ctypes.c_void_p()

    def _name(self) -> str:
        name = ctypes.create_string_buffer(256)
        self.driver.call("cuDeviceGetName", name, len(name), self._number)
        return name.value.decode("utf-8", "replace")

    def _load(self, room: str, image: bytes) -> None:
        module = ctypes.c_void_p()
        self.driver.call("cuModuleLoadData", ctypes.byref(module), image)
        self._modules.append(module)
        for kernel in KERNELS[room]:
            function = ctypes.c_void_p()
            self.driver.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            self._functions[kernel] = function


class Queue:
    """A stream of work on a GPU, with memory of its own. For one thread at a time.

    Memory is taken from the front on, in a scope, and is free again behind the scope: nothing is
    allocated for a batch, and nothing of another queue can lie there.
    """

    def __init__(self, device: Device, device_bytes: int, pinned_bytes: int) -> None:
        self.device = device
        self._driver = device.driver
        self._stream = ctypes.c_void_p()
        self._arena = ctypes.c_uint64()
        self._host = ctypes.c_void_p()
        self._device_bytes = device_bytes
        self._taken = self._staged = 0
        self._busy = False
        try:
            self._driver.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)
            self._driver.call("cuMemAlloc_v2", ctypes.byref(self._arena), device_bytes)
            self._driver.call("cuMemHostAlloc", ctypes.byref(self._host), pinned_bytes, 0)
        except BaseException:
            self.free()
            raise
        pinned = (ctypes.c_ubyte * pinned_bytes).from_address(self._host.value or 0)
        self._pinned = memoryview(pinned).cast("B")

    @property
    def stream(self) -> int:
        """The CUDA stream's handle, for a library that puts work of its own behind ours."""
        return self._stream.value or 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Work of the calling thread. What is taken within is free again behind it."""
        self.device.enter()
        taken, staged = self._taken, self._staged
        try:
            yield
        finally:
            if self._busy:
                self.wait()
            self._taken, self._staged = taken, staged

    def room(self, size: int) -> Memory:
        """Uninitialised memory of the device; raises MemoryError where the queue has too little."""
        end = self._taken + -(-size // ALIGN) * ALIGN
        if end > self._device_bytes:
            raise MemoryError(f"a queue of {self._device_bytes} bytes has no {size} bytes left")
        memory = Memory((self._arena.value or 0) + self._taken, size)
        self._taken = end
        return memory

    def put(self, *buffers: Buffer) -> Memory:
        """Copy to the device, one buffer behind the other; the buffers may go away at once."""
        memory = self.room(sum(map(len, buffers)))
        host = self.staging(memory.bytes)
        at = host.address
        for buffer in buffers:
            with address_of(buffer) as source:
                ctypes.memmove(at, source, len(buffer))  # lets go of the interpreter's lock
            at += len(buffer)
        self._copy("cuMemcpyHtoDAsync_v2", host, memory)
        return memory

    def staging(self, size: int) -> Memory:
        """Pinned memory of the host, uninitialised, that nothing else uses within the scope."""
        start = self._staged
        end = start + -(-size // ALIGN) * ALIGN
        if end > len(self._pinned):
            raise MemoryError(f"a queue stages {len(self._pinned)} bytes, no {size} are left")
        self._staged = end
        return Memory((self._host.value or 0) + start, size)

    def send(self, host: Memory, memory: Memory) -> None:
        """Copy pinned memory to the device, behind everything put before."""
        self._copy("cuMemcpyHtoDAsync_v2", host, memory)

    def bring(self, memory: Memory, host: Memory) -> None:
        """Copy from the device to pinned memory, behind everything put before."""
        self._copy("cuMemcpyDtoHAsync_v2", memory, host)

    def copy(self, source: Memory, target: Memory) -> None:
        """Copy on the device, behind everything put before."""
        self._copy("cuMemcpyDtoDAsync_v2", source, target)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, jobs: Memory) -> None:
        """Start a kernel, which takes the address of ``jobs``, behind everything put before."""
        argument = ctypes.c_uint64(jobs.address)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._busy = True
        self._driver.call(
            "cuLaunchKernel", self.device.function(kernel), *grid, 1, threads, 1, 1, 0,
            self._stream, arguments, None,
        )  # fmt: skip

    def fetch(self, memories: Sequence[Memory]) -> list[memoryview]:
        """Copy from the device, once all work has ended; the views are valid within the scope."""
        views = []
        for memory in memories:
            host = self.staging(memory.bytes)
            self.bring(memory, host)
            at = host.address - (self._host.value or 0)
            views.append(self._pinned[at : at + memory.bytes])
        self.wait()
        return views

    def get(self, memory: Memory) -> bytes:
        """As ``fetch``, of one run, as bytes of the caller's own."""
        return bytes(self.fetch([memory])[0])

    def wait(self) -> None:
        """Wait until all work has ended; raises GpuError where it failed or takes too long."""
        self._busy = False
        end, pause_s = time.monotonic() + PATIENCE_S, 0.0
        while (result := self._driver.ask("cuStreamQuery", self._stream)) == NOT_READY:
            if time.monotonic() >= end:
                raise GpuHangs(f"{self.device.name} has not answered for {PATIENCE_S:g} s")
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 2 * pause_s + 1e-5)
        self._driver.check("the work on a queue", result)

    def free(self) -> None:
        """Give stream and memory back to the driver; the context must be current."""
        if self._host:
            self._driver.ask("cuMemFreeHost", self._host)
        if self._arena:
            self._driver.ask("cuMemFree_v2", self._arena)
        if self._stream:
            self._driver.ask("cuStreamDestroy_v2", self._stream)

    def _copy(self, function: str, source: Memory, target: Memory) -> None:
        if source.bytes != target.bytes:
            raise ValueError(f"{source.bytes} bytes are not to be copied to {target.bytes}")
        self._busy = True
        self._driver.call(function, target.address, source.address, source.bytes, self._stream)


class GpuHangs(GpuError):
    """Work was given to the GPU and never ended: its memory must not be given back."""


def _images(built: Path) -> dict[str, bytes]:
    """The fat binary of each room. They are padded to a multiple of 8 and say their own length."""
    images = {}
    for room in KERNELS:
        try:
            images[room] = (built / f"{room}.fatbin").read_bytes()
        except OSError as error:
            raise GpuError(f"no CUDA kernels for {room} are here ({error.strerror})") from error
    return images
