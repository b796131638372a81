"""What the agent says of the machine that it runs on."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from pathlib import Path

from torpor.shared.wire.protocol import PROTOCOL, Hello

_ID_FILE = "machine-id"
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "no limit" as a number near 2^63


def machine_id(home: Path) -> str:
    """This machine's random id, made once and kept in ``home``."""
    path = home / _ID_FILE
    for _ in range(2):
        try:
            found = path.read_text("ascii").strip()
        except FileNotFoundError:
            found = ""
        if len(found) == 32 and all(c in "0123456789abcdef" for c in found):
            return found
        fresh = path.with_name(f".{_ID_FILE}-{os.getpid()}")
        fresh.write_text(secrets.token_hex(16) + "\n", "ascii")
        os.replace(fresh, path)
    return path.read_text("ascii").strip()


def hello(home: Path, agent: str, busy: bool) -> Hello:
    """The facts of the agent's first line, as they are now."""
    return Hello(
        protocol=PROTOCOL,
        agent=agent,
        machine=machine_id(home),
        python=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        cpus=cpu_count(),
        memory_bytes=memory_bytes(),
        clock_unix=time.time(),
        busy=busy,
    )


def cpu_count(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, and a container's quota where there is one."""
    cpus = len(os.sched_getaffinity(0))
    quota, period = [*_words(cgroup / "cpu.max"), "", ""][:2]
    if quota.isdigit() and period.isdigit() and int(period):
        cpus = min(cpus, max(1, -(-int(quota) // int(period))))
    return cpus


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may use: the machine's, or a container's limit where lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = (_words(cgroup / name) or [""])[0]
        if limit.isdigit() and 0 < int(limit) < _NO_LIMIT_BYTES:
            total = min(total, int(limit))
    return total


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except (OSError, ValueError):
        return []
