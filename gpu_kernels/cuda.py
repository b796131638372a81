"""The kernels on an NVIDIA GPU, launched by CuPy: the extra ``gpu``.

Importing this needs CuPy. Nothing here asks CuPy to compile: the kernels come from the fat
binaries, and arrays are only copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cupy

from gpu_kernels.batch import KERNELS
from gpu_kernels.native import BUILT, Buffer, address_of

FAULTS: Final = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.memory.OutOfMemoryError,
)
"""What CuPy raises when the GPU or its driver fails."""


class GpuUnusable(Exception):
    """No GPU that the kernels run on; the message says why, in one line."""


class Gpu:
    """The first GPU, with the kernels loaded. Thread-safe: each thread has a stream of its own.

    Copies and launches are put on the calling thread's stream and return at once; ``get`` and
    ``wait`` wait for it. Raises one of FAULTS when the GPU fails.
    """

    def __init__(self, built: Path = BUILT) -> None:
        try:
            facts = cupy.cuda.runtime.getDeviceProperties(0)
            self.driver = cupy.cuda.runtime.driverGetVersion()
        except FAULTS as error:
            raise GpuUnusable(f"no NVIDIA GPU can be used ({error})") from error
        name = facts["name"].decode("utf-8", "replace")
        self.name = f"{name}, compute capability {facts['major']}.{facts['minor']}"
        self._threads = threading.local()
        self._kernels: dict[str, Any] = {}
        for room, kernels in KERNELS.items():
            path = built / f"{room}.fatbin"
            if not path.is_file():
                raise GpuUnusable(f"the CUDA kernels are not here: {path} is missing")
            try:
                module = cupy.RawModule(path=str(path))
                self._kernels |= {kernel: module.get_function(kernel) for kernel in kernels}
            except FAULTS as error:
                raise GpuUnusable(
                    f"the kernels do not load on {self.name} ({error}): they need compute "
                    "capability 7.0 or later, and NVIDIA's driver 525 or newer"
                ) from error

    def free_bytes(self) -> int:
        """The GPU's free memory."""
        return int(cupy.cuda.runtime.memGetInfo()[0])

    @property
    def stream(self) -> Any:
        """The calling thread's stream."""
        if not hasattr(self._threads, "stream"):
            self._threads.stream = cupy.cuda.Stream(non_blocking=True)
        return self._threads.stream

    def room(self, size: int) -> Any:
        """Uninitialised memory of the GPU: an array of bytes, aligned to 256."""
        with self.stream:  # freed memory is used again in the order of this stream
            return cupy.empty(size, cupy.uint8)

    def put(self, buffer: Buffer) -> Any:
        """A copy of ``buffer`` on the GPU."""
        array = self.room(len(buffer))
        self.send(buffer, array)
        return array

    def send(self, buffer: Buffer, array: Any) -> None:
        """Copy to the GPU. A pinned buffer must not change before the stream has done it."""
        _check_sizes(len(buffer), array.nbytes)
        if array.nbytes:
            with address_of(buffer) as source:
                array.data.copy_from_host_async(source, array.nbytes, self.stream)

    def fetch(self, array: Any, buffer: Buffer) -> None:
        """Copy from the GPU into the writable ``buffer``, which is complete after ``wait``."""
        _check_sizes(array.nbytes, len(buffer))
        if array.nbytes:
            with address_of(buffer, writable=True) as target:
                array.data.copy_to_host_async(target, array.nbytes, self.stream)

    def get(self, array: Any) -> bytes:
        """The bytes of an array, once all work before has ended."""
        copy = bytearray(array.nbytes)
        self.fetch(array, copy)
        self.wait()
        return bytes(copy)

    def copy(self, source: Any, target: Any) -> None:
        """Copy on the GPU."""
        _check_sizes(source.nbytes, target.nbytes)
        target.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, jobs: Any) -> None:
        """Start a kernel, whose one argument is the address of ``jobs``."""
        with self.stream:
            self._kernels[kernel](grid, (threads,), (jobs,))

    def wait(self) -> None:
        """Wait for all work of the calling thread."""
        self.stream.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the GPU takes for what ``work`` puts on the stream, by its own clock."""
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self.stream)
        work()
        stop.record(self.stream)
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) / 1000


def limit_pool(size: int) -> None:
    """Use at most this many bytes of the GPU's memory."""
    cupy.get_default_memory_pool().set_limit(size=size)


def pin(memory: memoryview) -> bool:
    """Register host memory with the driver, so that copies go at the bus's full rate. False where
    the driver refuses: copies then go through a buffer of its own."""
    with address_of(memory, writable=True) as address:
        try:
            cupy.cuda.runtime.hostRegister(address, len(memory), 0)
        except FAULTS:
            return False
    return True


def _check_sizes(source: int, target: int) -> None:
    if source != target:
        raise ValueError(f"{source} bytes cannot be copied to {target}")
