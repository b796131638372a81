"""What a machine does now, for metrics: rates of its last minute, and figures of each GPU. A
machine may say anything, so a figure that no machine can have is left out, like an unknown one;
neither counts as 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from torpor.shared.values import KIB, MIB
from torpor.shared.wire.activity import STALE_S, Activity, GpuFigures, Sample

MOST_UNNAMED: Final = 16
"""GPUs that are shown of a machine if no record says how many it has."""
_MINUTE_S: Final = 60.0
_AHEAD_S: Final = 5.0  # seconds by which figures may be newer than the answer that brings them
_KB: Final = 1000  # NVML counts PCIe in units of 1000 bytes

_MOST_CORES_PERCENT: Final = 1024 * 100
_MOST_BYTES_S: Final = 10**12
_MOST_MEMORY_MIB: Final = 4 * MIB  # 4 TiB, the most memory of one GPU
_MOST_C: Final = 150
_MOST_W: Final = 5000


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; None for what is unknown."""

    percent: float | None = None
    used_mib: float | None = None
    free_mib: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    pcie_sent_bytes_s: float | None = None
    pcie_received_bytes_s: float | None = None


class MachineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One machine; None for what is unknown. ``model``: of its GPUs, as its record names it."""

    model: str = ""
    cpu_percent: float | None = None  # of one core
    network_bytes_s: float | None = None
    disk_bytes_s: float | None = None
    gpus: list[GpuUse] = []


def machine_use(activity: Activity, model: str = "", gpus: int = 0) -> MachineUse:
    """The machine's use by its own report. ``model`` and ``gpus``: what it was rented with."""
    seen = [
        sample
        for sample in activity.samples
        if sample.boot == activity.boot and -_AHEAD_S <= activity.now_s - sample.at_s <= _MINUTE_S
    ]
    return MachineUse(
        model=model,
        cpu_percent=_mean(seen, "cpu", 1, _MOST_CORES_PERCENT),
        network_bytes_s=_mean(seen, "network", KIB, _MOST_BYTES_S),
        disk_bytes_s=_mean(seen, "disk", KIB, _MOST_BYTES_S),
        gpus=[_gpu(one) for one in _table(activity)[: gpus or MOST_UNNAMED]],
    )


def _table(activity: Activity) -> Sequence[GpuFigures]:
    """The table of GPUs; nothing where it is of another boot, or old because its sampler has ended
    or lost the GPUs."""
    table = activity.gpus
    if table is None or table.boot != activity.boot:
        return []
    return table.gpus if -_AHEAD_S <= activity.now_s - table.at_s <= STALE_S else []


def _gpu(said: GpuFigures) -> GpuUse:
    return GpuUse(
        percent=_figure(said.percent, 1, 100),
        used_mib=_figure(said.used_mib, 1, _MOST_MEMORY_MIB),
        free_mib=_figure(said.free_mib, 1, _MOST_MEMORY_MIB),
        temperature_c=_figure(said.temperature_c, 1, _MOST_C),
        power_w=_figure(said.power_mw, 0.001, _MOST_W),
        pcie_sent_bytes_s=_figure(said.pcie_sent_kb_s, _KB, _MOST_BYTES_S),
        pcie_received_bytes_s=_figure(said.pcie_received_kb_s, _KB, _MOST_BYTES_S),
    )


def _mean(seen: Sequence[Sample], name: str, unit: int, most: float) -> float | None:
    """The mean over the seconds in which the figure is known."""
    found = [_figure(getattr(sample, name), unit, most) for sample in seen]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known else None


def _figure(value: float, unit: float, most: float) -> float | None:
    return value * unit if 0 <= value * unit <= most else None
