"""What the agent takes of a machine's memory, by folders as the kernel shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from torpor.machine.agent.memory_room import memory_kills, room
from torpor.machine.agent.workers import WORKERS, workers_in
from torpor.shared.values import GIB, MIB

_HOST = {"proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n"}


def _kernel(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _version_2(at: str, limit: str, used: int, kills: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/{at}"
    return {
        f"{at}memory.max": f"{limit}\n",
        f"{at}memory.current": f"{used}\n",
        f"{at}memory.peak": f"{used}\n",
        f"{at}memory.events": f"low 0\nhigh 0\nmax 9\noom {kills}\noom_kill {kills}\n",
        f"{at}memory.stat": f"anon 1\ninactive_file {10 * MIB}\nactive_file {10 * MIB}\n",
    }


def _version_1(at: str, limit: int, used: int, kills: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{at}"
    return {
        f"{at}memory.limit_in_bytes": f"{limit}\n",
        f"{at}memory.usage_in_bytes": f"{used}\n",
        f"{at}memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        f"{at}memory.stat": f"cache 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file 0\n",
    }


@pytest.mark.parametrize(
    ("files", "left", "kills"),
    [
        ({}, 4 * GIB, 0),
        ({"proc/vmstat": "oom_kill 2\n"}, 4 * GIB, 2),
        # a container that sees its own group at the top
        ({"proc/self/cgroup": "0::/\n", **_version_2("", str(256 * MIB), 60 * MIB, 3)},
         216 * MIB, 3),
        # one that has the host's name for it
        ({"proc/self/cgroup": "0::/pods/ab\n", **_version_2("", str(256 * MIB), 60 * MIB, 3)},
         216 * MIB, 3),
        # a group inside of one that has less; both count the kill
        ({"proc/self/cgroup": "0::/user/one\n", **_version_2("user/one/", "max", 30 * MIB, 1),
          **_version_2("user/", str(512 * MIB), 500 * MIB, 4)}, 32 * MIB, 4),
        # a group that may take more than the host has
        ({"proc/self/cgroup": "0::/\n", **_version_2("", str(64 * GIB), 60 * MIB, 0)}, 4 * GIB, 0),
        ({"proc/self/cgroup": "0::/\n4:cpu,memory:/a\n3:cpuset:/b\n",
          **_version_1("a/", 128 * MIB, 30 * MIB, 5), **_version_1("", 1 << 62, 30 * MIB, 0)},
         118 * MIB, 5),
        ({"proc/self/cgroup": "nonsense\n", "proc/vmstat": "oom_kill\n"}, 4 * GIB, 0),
    ],
)  # fmt: skip
def test_the_tightest_of_groups_and_host_counts(
    files: dict[str, str], left: int, kills: int, tmp_path: Path
) -> None:
    found = room(_kernel(tmp_path, {**_HOST, **files}))
    assert found is not None and found.left == left
    assert memory_kills(tmp_path) == kills


def test_parts_at_work_fit_into_the_memory(tmp_path: Path) -> None:
    assert room(tmp_path) is None
    assert workers_in(None) == WORKERS
    _kernel(tmp_path, {"proc/self/cgroup": "0::/\n"})
    for limit, workers in ((64, 1), (256, 1), (300, 2), (8192, WORKERS)):
        _kernel(tmp_path, _version_2("", str(limit * MIB), 20 * MIB, 0))
        assert workers_in(room(tmp_path)) == workers
