"""The CUDA driver's functions by ctypes: its library is there wherever a GPU is.

Signatures and constants are those of cuda.h, the same since CUDA 11; the names with a version are
what that header's macros stand for, up to CUDA 12. Newer drivers still have them. ctypes lets go of
the interpreter's lock during each call.
"""

from __future__ import annotations

import ctypes
from typing import Final

LIBRARY: Final = "libcuda.so.1"
NOT_READY: Final = 600
"""What ``cuStreamQuery`` says while there is work on the stream."""
NON_BLOCKING: Final = 1
"""A flag of ``cuStreamCreate``: waits for no other stream."""

_Size = ctypes.c_size_t
_Number = ctypes.c_int
_Unsigned = ctypes.c_uint
_Handle = ctypes.c_void_p  # CUcontext, CUmodule, CUfunction, CUstream and CUevent are pointers
_Address = ctypes.c_uint64  # CUdeviceptr

_SIGNATURES: Final[dict[str, tuple[object, ...]]] = {
    "cuInit": (_Unsigned,),
    "cuDeviceGetCount": (ctypes.POINTER(_Number),),
    "cuDeviceGet": (ctypes.POINTER(_Number), _Number),
    "cuDeviceGetName": (ctypes.c_char_p, _Number, _Number),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Handle), _Number),
    "cuDevicePrimaryCtxRelease_v2": (_Number,),
    "cuCtxSetCurrent": (_Handle,),
    "cuMemGetInfo_v2": (ctypes.POINTER(_Size), ctypes.POINTER(_Size)),
    "cuModuleLoadData": (ctypes.POINTER(_Handle), ctypes.c_char_p),
    "cuModuleUnload": (_Handle,),
    "cuModuleGetFunction": (ctypes.POINTER(_Handle), _Handle, ctypes.c_char_p),
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), _Size),
    "cuMemFree_v2": (_Address,),
    "cuMemHostAlloc": (ctypes.POINTER(ctypes.c_void_p), _Size, _Unsigned),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_Address, ctypes.c_void_p, _Size, _Handle),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _Address, _Size, _Handle),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, _Size, _Handle),
    "cuStreamCreate": (ctypes.POINTER(_Handle), _Unsigned),
    "cuStreamQuery": (_Handle,),
    "cuStreamDestroy_v2": (_Handle,),
    "cuEventCreate": (ctypes.POINTER(_Handle), _Unsigned),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _Handle, _Handle),  # milliseconds
    "cuEventDestroy_v2": (_Handle,),
    "cuLaunchKernel": (
        _Handle, *(_Unsigned,) * 7, _Handle,
        ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p),
    ),  # function, grid x y z, block x y z, shared bytes, stream, parameters, extra
    "cuGetErrorString": (_Number, ctypes.POINTER(ctypes.c_char_p)),
}  # fmt: skip


class GpuError(Exception):
    """The GPU cannot be used, or not any more: the message says why, in one line for a log."""


class Driver:
    """The functions of one driver library. Thread-safe, as the driver is."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
            for name, signature in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.argtypes, function.restype = signature, _Number
        except (OSError, AttributeError) as error:
            raise GpuError(f"no CUDA driver ({error})") from error
        self._library = loaded

    def call(self, name: str, *args: object) -> None:
        """Call a function; raises GpuError with the driver's words when it fails."""
        self.check(name, self.ask(name, *args))

    def ask(self, name: str, *args: object) -> int:
        """Call a function; the result is its CUresult, 0 for success."""
        return int(getattr(self._library, name)(*args))

    def check(self, name: str, result: int) -> None:
        """Raise GpuError unless ``result``, of the function of that name, is success."""
        if result:
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(words))
            said = (words.value or b"an unknown error").decode("utf-8", "replace")
            raise GpuError(f"{name} failed with {result}: {said}")
