"""The machine's GPU, lent to one run at a time, and never again after it took an agent down."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_kernels.device import Device
from gpu_kernels.driver import LIBRARY, GpuError
from gpu_kernels.native import BUILT
from torpor.shared.codecs.gpu import GpuEncoder

MARKER: Final = "gpu.open"
"""In the agent's folder, from before the driver is loaded until all is given back to it."""

_lent: Final = threading.Lock()  # of this process: what encoders may take is bounded for each


def open_gpu(home: Path) -> GpuEncoder:
    """An encoder on the first GPU, for one run; raises GpuError with the reason for none.

    Only one agent lives in ``home``. So a marker that is there is of one that died while it had the
    GPU open, perhaps by the driver's fault, or of work that hangs there still.
    """
    if not _lent.acquire(blocking=False):
        raise GpuError("another run of this agent has it")
    try:
        marker = _mark(home)
        try:
            return _encoder(marker)
        except BaseException:
            marker.unlink()
            raise
    except BaseException:
        _lent.release()
        raise


def _encoder(marker: Path) -> GpuEncoder:
    def release() -> None:
        with suppress(OSError):  # then it stays, and the GPU is left alone: no run fails by that
            marker.unlink()
        _lent.release()

    device = Device(LIBRARY, BUILT)
    try:
        return GpuEncoder(device, release)
    except BaseException:
        device.close()
        raise


def _mark(home: Path) -> Path:
    marker = home / MARKER
    try:
        fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise GpuError(
            f"an agent died while it had it open; remove {marker} to have it tried again"
        ) from None
    except OSError as error:
        raise GpuError(f"{marker} cannot be written ({error.strerror})") from None
    with suppress(OSError):  # a full disk: what counts is that the file is there
        os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        os.fsync(fd)  # a driver may take the whole machine down
    os.close(fd)
    return marker
