"""Where kernels run: a GPU through CuPy, or the CPU shim that the tests use.

Both hold memory, copy, and launch a kernel that takes one pointer to an array of jobs. What is
launched, and with what buffers, is the same code for both: ``gpu_kernels.device``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy

from gpu_kernels.native import BUILT, Buffer

ALIGN: Final = 16
"""Every address that a kernel gets is a multiple of this."""


class Memory(Protocol):
    """A run of a device's memory, freed with its last reference."""

    @property
    def address(self) -> int: ...

    @property
    def bytes(self) -> int: ...


class Device(Protocol):
    """One place that runs kernels. Not for use by two threads at once."""

    @property
    def name(self) -> str: ...

    def room(self, size: int) -> Memory:
        """Uninitialised memory, aligned to ALIGN; raises MemoryError where there is not enough."""

    def put(self, data: Buffer) -> Memory:
        """Copy to the device."""

    def get(self, memory: Memory, offset: int, size: int) -> bytes:
        """Copy from the device, once everything launched before has ended."""

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, jobs: Memory) -> None:
        """Start a kernel behind everything launched before."""


class ShimMemory:
    """Host memory for the shim."""

    def __init__(self, size: int) -> None:
        # Fresh memory is filled with rubbish, as a GPU's would be: a kernel that reads what it
        # did not write shows.
        self._held = (ctypes.c_char * (size + ALIGN))()
        ctypes.memset(self._held, 0xA5, size + ALIGN)
        self.address = -(-ctypes.addressof(self._held) // ALIGN) * ALIGN
        self.bytes = size


class Shim:
    """The kernels under g++, one thread after another: for tests, on any machine."""

    name = "CPU shim"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        size = ctypes.c_uint32
        self._library.torpor_shim_launch.argtypes = (
            ctypes.c_char_p, size, size, size, ctypes.c_void_p,
        )  # fmt: skip

    def room(self, size: int) -> ShimMemory:
        return ShimMemory(size)

    def put(self, data: Buffer) -> ShimMemory:
        memory = ShimMemory(len(data))
        ctypes.memmove(memory.address, bytes(data), len(data))
        return memory

    def get(self, memory: Memory, offset: int, size: int) -> bytes:
        return ctypes.string_at(memory.address + offset, size)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, jobs: Memory) -> None:
        if self._library.torpor_shim_launch(kernel.encode(), *grid, threads, jobs.address):
            raise ValueError(f"the shim has no kernel {kernel!r} of {threads} threads")


class CudaMemory:
    """Memory of a GPU, from CuPy's pool."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.address = int(array.data.ptr)
        self.bytes = int(array.nbytes)


class Cuda:
    """One NVIDIA GPU, by CuPy; the kernels are loaded from the fat binaries that build made."""

    def __init__(self, index: int = 0) -> None:
        import cupy  # where there is no GPU there is no CuPy: see probe.py

        self._cupy = cupy
        self._gpu = cupy.cuda.Device(index)
        with self._gpu:
            self.name = str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())
            self._modules = [
                cupy.RawModule(path=str(BUILT / f"{room}.fatbin")) for room in ("planes", "rans")
            ]
            self.stream = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def here(self) -> Iterator[Any]:
        """This GPU and its stream, current; yields CuPy."""
        with self._gpu, self.stream:
            yield self._cupy

    def room(self, size: int) -> CudaMemory:
        with self.here() as cupy:
            try:
                return CudaMemory(cupy.empty(size, cupy.uint8))
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise MemoryError(f"{self.name} has no {size} bytes free") from error

    def put(self, data: Buffer) -> CudaMemory:
        memory = self.room(len(data))
        with self.here():
            memory.array.set(numpy.frombuffer(data, numpy.uint8), stream=self.stream)
            self.stream.synchronize()  # the source may go away once this returns
        return memory

    def get(self, memory: Memory, offset: int, size: int) -> bytes:
        if not isinstance(memory, CudaMemory):
            raise TypeError("memory of another device")
        with self.here():
            return bytes(memory.array[offset : offset + size].get(stream=self.stream).tobytes())

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, jobs: Memory) -> None:
        room = kernel.partition("_")[0]
        module = self._modules[0 if room == "planes" else 1]
        with self.here() as cupy:
            module.get_function(kernel)(grid, (threads,), (cupy.uint64(jobs.address),))
