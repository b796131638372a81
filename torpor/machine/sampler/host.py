"""CPU, network and disk activity: of the container where the machine is one, else of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from torpor.shared.values import KIB
from torpor.shared.wire.activity import UNKNOWN

_SECTOR_BYTES: Final = 512  # the unit of /proc/diskstats, whatever the sectors of the disk are


class HostLook(NamedTuple):
    """Percent of one core, and KiB/s in both directions."""

    cpu: int
    network: int
    disk: int


class HostSampler:
    """Rates between two looks. The first look, and a look after a counter was reset, knows no rate.

    ``root`` is the folder that holds ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu = _first(
            (_cpu_of_cgroup_2, root / "sys/fs/cgroup/cpu.stat"),
            (_cpu_of_cgroup_1, root / "sys/fs/cgroup/cpuacct/cpuacct.usage"),
            (_cpu_of_host, root / "proc/stat"),
        )
        self._disk = _first(
            (_disk_of_cgroup_2, root / "sys/fs/cgroup/io.stat"),
            (_disk_of_cgroup_1, root / "sys/fs/cgroup/blkio/blkio.throttle.io_service_bytes"),
            (_disk_of_host, root / "proc/diskstats"),
        )
        self._network = _first((_network, root / "proc/net/dev"))
        self._before: tuple[float, tuple[float | None, ...]] | None = None

    def look(self) -> HostLook:
        now_s = self._clock()
        counters = (self._cpu(), self._network(), self._disk())
        before, self._before = self._before, (now_s, counters)
        if before is None or now_s <= before[0]:
            return HostLook(UNKNOWN, UNKNOWN, UNKNOWN)
        passed_s = now_s - before[0]
        cpu, network, disk = (
            UNKNOWN if new is None or old is None or new < old else (new - old) / passed_s
            for old, new in zip(before[1], counters, strict=True)
        )
        return HostLook(_whole(cpu, 0.01), _whole(network, KIB), _whole(disk, KIB))


def _whole(rate: float, unit: float) -> int:
    return UNKNOWN if rate < 0 else min(round(rate / unit), 2**31 - 1)


def _first(*sources: tuple[Callable[[str], float], Path]) -> Callable[[], float | None]:
    """Find the first source that can be read now, and use it from now on."""
    for parse, path in sources:

        def read(parse: Callable[[str], float] = parse, path: Path = path) -> float | None:
            try:
                return parse(path.read_text("ascii", "replace"))
            except (OSError, ValueError, IndexError):  # the source is gone, or of an unknown form
                return None

        if read() is not None:
            return read
    return lambda: None


def _cpu_of_cgroup_2(text: str) -> float:
    values = dict(line.split(maxsplit=1) for line in text.splitlines())
    if "usage_usec" not in values:
        raise ValueError("no usage")
    return int(values["usage_usec"]) / 1e6


def _cpu_of_cgroup_1(text: str) -> float:
    return int(text) / 1e9


def _cpu_of_host(text: str) -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, text.splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _disk_of_cgroup_2(text: str) -> float:
    pairs = [word.split("=") for line in text.splitlines() for word in line.split()[1:]]
    return sum(int(value) for name, value in pairs if name in ("rbytes", "wbytes"))


def _disk_of_cgroup_1(text: str) -> float:
    rows = [line.split() for line in text.splitlines()]
    return sum(int(row[2]) for row in rows if len(row) == 3 and row[1] in ("Read", "Write"))


def _disk_of_host(text: str) -> float:
    """The bytes of whole disks. Those of partitions, mapped and loop devices are left out, because
    they are part of a disk's."""
    rows = [line.split() for line in text.splitlines()]
    disks = [row for row in rows if row[2].startswith(("sd", "vd", "xvd", "nvme", "mmcblk"))]
    names = {row[2] for row in disks}
    whole = [row for row in disks if not _is_partition(row[2], names)]
    return sum((int(row[5]) + int(row[9])) * _SECTOR_BYTES for row in whole)


def _is_partition(name: str, names: set[str]) -> bool:
    disk = name.rstrip("0123456789")
    return disk != name and (disk in names or disk.removesuffix("p") in names)


def _network(text: str) -> float:
    rows = [line.split(":", 1) for line in text.splitlines()[2:]]
    counters = [values.split() for name, values in rows if name.strip() != "lo"]
    return sum(int(row[0]) + int(row[8]) for row in counters)
