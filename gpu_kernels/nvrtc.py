"""Compiles CUDA source to a fat binary by the compilers in NVIDIA's wheels: no GPU, driver, nvcc or
header of CUDA is needed, and the same source gives the same bytes."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, Final

WHEELS: Final = ("nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-nvfatbin-cu12==12.9.82")
"""The last compilers of CUDA 12, whose binaries NVIDIA's driver 525 loads, and the last that know
compute capability 7.0 (V100)."""

_LIBRARIES: Final = (
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia/nvfatbin/lib/libnvfatbin.so.12",
)
_FLAGS: Final = ("-std=c++17", "-default-device")
_FAT_FLAGS: Final = ("-64", "-host=linux", "-compress=false")
"""Uncompressed: which compression a driver can read depends on its age."""
_STDINT: Final = b"""
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
"""
"""A header that NVRTC lacks."""


class CompilerError(Exception):
    """A compiler's wheel is missing, or a compiler refused the source."""


def fat_binary(
    name: str, source: bytes, headers: Mapping[str, bytes], architectures: Sequence[int]
) -> bytes:
    """The source as machine code for each of the ``architectures`` (70 is sm_70), and as PTX of the
    first one for GPUs that none of them fits. ``headers`` are named as the source includes them."""
    nvrtc, nvfatbin = (_library(*pair) for pair in zip(WHEELS, _LIBRARIES, strict=True))
    fat = ctypes.c_void_p()
    _call(nvfatbin, "nvFatbinCreate", ctypes.byref(fat), _texts(_FAT_FLAGS), len(_FAT_FLAGS))
    try:
        for number in architectures:
            code = _compiled(nvrtc, name, source, headers, f"sm_{number}", "CUBIN")
            known_as = (str(number).encode(), name.encode())
            _call(nvfatbin, "nvFatbinAddCubin", fat, code, ctypes.c_size_t(len(code)), *known_as)
        oldest = architectures[0]
        code = _compiled(nvrtc, name, source, headers, f"compute_{oldest}", "PTX")
        known_as = (str(oldest).encode(), name.encode())
        _call(nvfatbin, "nvFatbinAddPTX", fat, code, ctypes.c_size_t(len(code)), *known_as, b"")
        return _output(nvfatbin, "nvFatbinSize", "nvFatbinGet", fat)
    finally:
        nvfatbin.nvFatbinDestroy(ctypes.byref(fat))


def _compiled(
    nvrtc: ctypes.CDLL,
    name: str,
    source: bytes,
    headers: Mapping[str, bytes],
    target: str,
    kind: str,
) -> bytes:
    known = {"stdint.h": _STDINT, **headers}
    texts, names = _texts(list(known.values())), _texts(list(known))
    flags = (f"--gpu-architecture={target}", *_FLAGS)
    program = ctypes.c_void_p()
    made = (source, name.encode(), len(known), texts, names)
    _call(nvrtc, "nvrtcCreateProgram", ctypes.byref(program), *made)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), _texts(flags)):
            log = _output(nvrtc, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
            said = log.rstrip(b"\0").decode("utf-8", "replace").strip()
            raise CompilerError(f"NVRTC refused {name} for {target}: {said}")
        return _output(nvrtc, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _library(wheel: str, path: str) -> ctypes.CDLL:
    name, _, version = wheel.partition("==")
    try:
        brought = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise CompilerError(f"{wheel} is not installed: run make kernels") from None
    if brought.version != version:
        raise CompilerError(f"{name} {brought.version} is not {version}: run make kernels")
    return ctypes.CDLL(str(brought.locate_file(path)))


def _output(library: ctypes.CDLL, size_of: str, get: str, what: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(library, size_of, what, ctypes.byref(size))
    output = ctypes.create_string_buffer(size.value)
    _call(library, get, what, output)
    return output.raw


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status:
        raise CompilerError(f"{function} ended with status {status}")


def _texts(texts: Sequence[str | bytes]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    return (ctypes.c_char_p * len(texts))(*encoded)
