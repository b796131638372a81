"""The kernels on a CPU: the C twins where their library loads, plain Python elsewhere.

Both give the same bytes. Only the entropy encoders need the library: without one they say None, and
the caller stores the plane another way.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_kernels import native
from gpu_kernels.native import Buffer
from gpu_kernels.planes import portable as portable_planes
from gpu_kernels.rans import portable as portable_rans

_LEVELS = ("C", "C with AVX2", "C with AVX-512")


def path() -> str:
    """Which code runs here, for reports."""
    lib = native.library()
    return "Python" if lib is None else _LEVELS[lib.torpor_cpu_level()]


def split(plain: memoryview, width: int, rotate: bool, planes: Sequence[memoryview]) -> None:
    """Cut elements of ``width`` bytes into as many writable planes."""
    lib = native.library()
    if lib is None:
        portable_planes.split(plain, width, rotate, planes)
    else:
        native.split(lib, plain, width, rotate, planes)


def join(planes: Sequence[Buffer], width: int, rotate: bool, plain: memoryview) -> None:
    """Put planes back together into the writable ``plain``."""
    lib = native.library()
    if lib is None:
        portable_planes.join(planes, width, rotate, plain)
    else:
        native.join(lib, planes, width, rotate, plain)


def rans_encode(plain: Buffer, capacity: int) -> memoryview | None:
    """The rANS stream of ``plain`` in at most ``capacity`` bytes, or None."""
    lib = native.library()
    return None if lib is None else native.rans_encode(lib, plain, capacity)


def rans_decode(stream: Buffer, symbols: int) -> bytearray:
    """Exactly ``symbols`` bytes; raises RansStreamError on any other stream."""
    lib = native.library()
    if lib is not None:
        return native.rans_decode(lib, stream, symbols)
    return portable_rans.decode(memoryview(stream), symbols)
