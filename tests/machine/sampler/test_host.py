"""CPU, network and disk: which counters are read, and what a reset or a missing one gives."""

from __future__ import annotations

from pathlib import Path

from torpor.machine.sampler.host import HostSampler
from torpor.shared.wire.activity import UNKNOWN

_NET = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: {lo} 1 0 0 0 0 0 0 {lo} 1 0 0 0 0 0 0
  eth0: {rx} 1 0 0 0 0 0 0 {tx} 1 0 0 0 0 0 0
"""


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_container_is_measured_by_its_own_counters(tmp_path: Path) -> None:
    clock = [0.0]

    def counters(cpu_us: int, disk: int, net: int) -> None:
        _write(tmp_path, "sys/fs/cgroup/cpu.stat", f"usage_usec {cpu_us}\nuser_usec 1\n")
        _write(tmp_path, "sys/fs/cgroup/io.stat", f"8:0 rbytes={disk} wbytes=1024 rios=7\n")
        _write(tmp_path, "proc/net/dev", _NET.format(lo=net * 99, rx=net, tx=2048))
        _write(tmp_path, "proc/stat", "cpu 1 1 1 1 1 1 1 1 1 1\n")

    counters(0, 0, 0)
    host = HostSampler(tmp_path, lambda: clock[0])
    assert host.look() == (UNKNOWN, UNKNOWN, UNKNOWN)
    clock[0] = 2.0
    counters(3_000_000, 4096, 10240)
    assert host.look() == (150, 5, 2)
    clock[0] = 3.0
    counters(1_000_000, 4096, 10240)  # the container began again
    assert host.look() == (UNKNOWN, 0, 0)


def test_a_machine_without_cgroups_is_measured_by_its_own_counters(tmp_path: Path) -> None:
    clock = [0.0]
    disks = """ 8 0 sda 1 0 {0} 0 1 0 0 0
 8 1 sda1 1 0 {0} 0 1 0 0 0
 259 0 nvme0n1 1 0 {0} 0 1 0 0 0
 259 1 nvme0n1p1 1 0 {0} 0 1 0 0 0
 7 0 loop0 1 0 {0} 0 1 0 0 0
"""
    _write(tmp_path, "proc/stat", "cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 1\n")
    _write(tmp_path, "proc/diskstats", disks.format(0))
    host = HostSampler(tmp_path, lambda: clock[0])
    host.look()
    clock[0] = 1.0
    _write(tmp_path, "proc/stat", "cpu 20 20 10 999 999 0 0 0 0 0\ncpu0 1\n")
    _write(tmp_path, "proc/diskstats", disks.format(8))
    assert host.look() == (50, UNKNOWN, 8)


def test_what_has_no_counter_is_unknown(tmp_path: Path) -> None:
    clock = [0.0]
    host = HostSampler(tmp_path, lambda: clock[0])
    for clock[0] in (0.0, 1.0):
        assert host.look() == (UNKNOWN, UNKNOWN, UNKNOWN)
