"""Whether kernels can run on a GPU here: asked, never assumed, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_kernels.native import BUILT

if TYPE_CHECKING:
    from gpu_kernels.launch import Cuda

ROOMS = ("planes", "rans")


@dataclass(frozen=True)
class Probe:
    """``gpus`` is 0 where kernels cannot run; ``reason`` then says why, in a line for the log."""

    gpus: int
    reason: str


def probe() -> Probe:
    """Look for the built kernels, CuPy, a driver and a GPU. Starts no work on any GPU."""
    missing = [room for room in ROOMS if not (BUILT / f"{room}.fatbin").exists()]
    if missing:
        return Probe(0, f"no CUDA kernels for {', '.join(missing)} were built: nvcc was missing")
    try:
        import cupy
    except ImportError as error:
        return Probe(0, f"CuPy is not there ({error}): install torpor[gpu] where a GPU is")
    try:
        gpus = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return Probe(0, f"no CUDA driver or GPU answers ({error})")
    return Probe(gpus, "" if gpus else "the CUDA driver lists no GPU")


def open_gpu(index: int = 0) -> Cuda:
    """The GPU of that number; raises RuntimeError with the reason where there is none."""
    found = probe()
    if not 0 <= index < found.gpus:
        raise RuntimeError(found.reason or f"GPU {index} was asked for, {found.gpus} are here")
    from gpu_kernels.launch import Cuda

    return Cuda(index)
