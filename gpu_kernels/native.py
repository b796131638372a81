"""Calls the C twins in their shared object. ctypes lets go of the interpreter's lock meanwhile.

``library()`` is None where the object is not there or does not load: callers then take the slower
path in plain Python. Every function checks its buffers' sizes before C sees an address.
"""

from __future__ import annotations

import ctypes
import os
import platform
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol, cast

from gpu_kernels.rans.portable import RansStreamError

Buffer = bytes | bytearray | memoryview

BUILT: Final = Path(__file__).resolve().parent / "built"
RANS_SEGMENT_LOG2: Final = 15
"""Symbols of a segment, as a power of two. Larger segments store fewer states; smaller ones let a
GPU work on more at once."""
DISK_VERSION: Final = 3
"""The version of disk.h (TORPOR_DISK_VERSION) that this module calls."""
ENTRIES_VERSION: Final = 1
"""The version of entries.h (TORPOR_ENTRIES_VERSION) that this module calls."""
REFUSALS: Final = {
    1: "header or sizes",
    2: "frequency table",
    3: "first state",
    4: "number of words",
    5: "last state",
}
_NO_LIBRARY: Final = "TORPOR_NO_NATIVE"


class _Buffer(ctypes.Structure):
    """Py_buffer, as CPython has laid it out since 3.0 (stable ABI since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class Library(Protocol):
    """The functions of the shared object; contracts in planes.h, rans.h and cpu.h."""

    def torpor_planes_split(self, *args: object) -> int: ...
    def torpor_planes_join(self, *args: object) -> int: ...
    def torpor_rans_bound(self, *args: object) -> int: ...
    def torpor_rans_encode(self, *args: object) -> int: ...
    def torpor_rans_decode(self, *args: object) -> int: ...
    def torpor_cpu_level(self) -> int: ...
    def torpor_cpu_limit(self, level: int) -> int: ...


class DiskLibrary(Protocol):
    """The shared object's functions for small files; contracts in disk.h."""

    def torpor_look_at(self, *args: object) -> None: ...
    def torpor_read_files(self, *args: object) -> None: ...
    def torpor_write_files(self, *args: object) -> None: ...


class EntriesLibrary(Protocol):
    """The shared object's functions for the entries of a manifest; contracts in entries.h."""

    def torpor_entry_ends(self, *args: object) -> int: ...
    def torpor_check_entries(self, *args: object) -> int: ...
    def torpor_count_entries(self, *args: object) -> int: ...
    def torpor_describe_entries(self, *args: object) -> int: ...
    def torpor_fill_entries(self, *args: object) -> int: ...
    def torpor_group_entries(self, *args: object) -> int: ...


def library_path(machine: str | None = None) -> Path:
    """The path of the shared object for ``machine`` (default: this one), built or not."""
    return BUILT / f"libtorpor_kernels-{machine or platform.machine()}.so"


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The shared object, or None: not built, for another platform, or switched off."""
    if os.environ.get(_NO_LIBRARY):
        return None
    try:
        loaded = ctypes.CDLL(str(library_path()))
    except OSError:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    planes = ctypes.POINTER(ctypes.c_void_p)
    loaded.torpor_planes_split.argtypes = (pointer, size, number, number, planes)
    loaded.torpor_planes_join.argtypes = (planes, size, number, number, pointer)
    loaded.torpor_rans_bound.argtypes = (size, number)
    loaded.torpor_rans_bound.restype = size
    loaded.torpor_rans_encode.argtypes = (pointer, size, number, pointer, size)
    loaded.torpor_rans_encode.restype = size
    loaded.torpor_rans_decode.argtypes = (pointer, size, pointer, size)
    return loaded


@lru_cache(maxsize=1)
def disk_library() -> DiskLibrary | None:
    """The shared object, if its functions of disk.h have the version that this module calls."""
    loaded = _of_version("torpor_disk_version", DISK_VERSION)
    if loaded is None:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    look, read, write = (
        loaded.torpor_look_at,
        loaded.torpor_read_files,
        loaded.torpor_write_files,
    )
    look.argtypes = (number, pointer, size, pointer, pointer, pointer)
    read.argtypes = (number, pointer, pointer, size, pointer, pointer, pointer)
    write.argtypes = (
        *(number, pointer, pointer, pointer, pointer, pointer),
        *(number, size, pointer),
    )
    look.restype = read.restype = write.restype = None
    return cast(DiskLibrary, loaded)


@lru_cache(maxsize=1)
def entries_library() -> EntriesLibrary | None:
    """The shared object, if its functions of entries.h have the version that this module calls."""
    loaded = _of_version("torpor_entries_version", ENTRIES_VERSION)
    if loaded is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    ends, check, count, describe, fill, group = (
        loaded.torpor_entry_ends,
        loaded.torpor_check_entries,
        loaded.torpor_count_entries,
        loaded.torpor_describe_entries,
        loaded.torpor_fill_entries,
        loaded.torpor_group_entries,
    )
    ends.argtypes = (pointer, size, pointer, size)
    check.argtypes = (pointer, pointer, size, pointer, size, size, pointer)
    count.argtypes = (pointer, pointer, size, pointer, size, pointer)
    describe.argtypes = (pointer, pointer, size, pointer, pointer, pointer, pointer)
    group.argtypes = (
        *(pointer, pointer, size, size, pointer, size),
        *(pointer, pointer, size, pointer),
    )
    fill.argtypes = (
        *(pointer, pointer, size, pointer, pointer, size),
        *(pointer, pointer, size, pointer),
    )
    ends.restype = check.restype = fill.restype = group.restype = size
    return cast(EntriesLibrary, loaded)


def _of_version(function: str, version: int) -> ctypes.CDLL | None:
    """The shared object, if its version function returns that version."""
    loaded = cast(ctypes.CDLL | None, library())
    try:
        return loaded if loaded is not None and loaded[function]() == version else None
    except AttributeError:  # an older shared object
        return None


def split(
    lib: Library, plain: Buffer, width: int, rotate: bool, planes: Sequence[memoryview]
) -> None:
    """Cut ``plain`` into ``width`` writable planes of ``len(plain) / width`` bytes each."""
    elements = _elements(len(plain), width, planes)
    with address_of(plain) as source, _addresses(planes, writable=True) as targets:
        lib.torpor_planes_split(source, elements, width, rotate, targets)


def join(lib: Library, planes: Sequence[Buffer], width: int, rotate: bool, plain: Buffer) -> None:
    """Put planes back together into the writable ``plain``."""
    elements = _elements(len(plain), width, planes)
    with _addresses(planes) as sources, address_of(plain, writable=True) as target:
        lib.torpor_planes_join(sources, elements, width, rotate, target)


def rans_encode(
    lib: Library, plain: Buffer, capacity: int, segment_log2: int = RANS_SEGMENT_LOG2
) -> memoryview | None:
    """Encode into at most ``capacity`` bytes; None where that is not enough."""
    stream = bytearray(capacity)
    with address_of(plain) as source, address_of(stream, writable=True) as target:
        made = lib.torpor_rans_encode(source, len(plain), segment_log2, target, capacity)
    return memoryview(stream)[:made] if made else None


def rans_decode(lib: Library, stream: Buffer, symbols: int) -> bytearray:
    """Decode exactly ``symbols`` bytes; raises RansStreamError."""
    plain = bytearray(symbols)
    with address_of(stream) as source, address_of(plain, writable=True) as target:
        refusal = lib.torpor_rans_decode(source, len(stream), target, symbols)
    if refusal:
        raise RansStreamError(REFUSALS.get(refusal, "content"))
    return plain


def rans_bound(lib: Library, symbols: int, segment_log2: int = RANS_SEGMENT_LOG2) -> int:
    """The most that ``symbols`` bytes can take."""
    return int(lib.torpor_rans_bound(symbols, segment_log2))


def _elements(plain_bytes: int, width: int, planes: Sequence[Buffer]) -> int:
    elements, rest = divmod(plain_bytes, width)
    if width not in (2, 4, 8) or rest or len(planes) != width:
        raise ValueError(f"{plain_bytes} bytes do not make {len(planes)} planes of width {width}")
    if any(len(plane) != elements for plane in planes):
        raise ValueError(f"each of {width} planes must hold {elements} bytes")
    return elements


@contextmanager
def address_of(buffer: Buffer | array[int], *, writable: bool = False) -> Iterator[int]:
    """A buffer's address, held in place meanwhile. Unlike ``from_buffer`` it takes bytes too."""
    held = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(buffer), ctypes.byref(held), ctypes.c_int(int(writable))
    )
    try:
        yield held.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(held))


@contextmanager
def _addresses(
    buffers: Sequence[Buffer], *, writable: bool = False
) -> Iterator[ctypes.Array[ctypes.c_void_p]]:
    held: list[_Buffer] = []
    try:
        for buffer in buffers:
            view = _Buffer()
            ctypes.pythonapi.PyObject_GetBuffer(
                ctypes.py_object(buffer), ctypes.byref(view), ctypes.c_int(int(writable))
            )
            held.append(view)
        yield (ctypes.c_void_p * len(held))(*(view.buf for view in held))
    finally:
        for view in held:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
