"""How much memory this process may take, and whether the kernel has ended processes for want of it:
from the control group that a container or a session is in, and from the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from torpor.shared.values import KIB, MIB

_UNLIMITED: Final = 1 << 60


class _Group(NamedTuple):
    """A control group's files, in one of the kernel's two versions."""

    folder: Path
    limit: str
    used: str
    peak: str
    kills: str
    cache: tuple[str, ...]  # keys of memory.stat whose pages the kernel can take back


_VERSION_2: Final = (
    "memory.max", "memory.current", "memory.peak", "memory.events",
    ("inactive_file", "active_file"),
)  # fmt: skip
_VERSION_1: Final = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes",
    "memory.oom_control", ("total_inactive_file", "total_active_file"),
)  # fmt: skip


class Room(NamedTuple):
    """Memory in bytes. ``peak`` is the most that was in use; 0 where the kernel does not say."""

    limit: int
    used: int
    peak: int
    of_group: bool

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)

    def __str__(self) -> str:
        whose = "its control group (of the container or session)" if self.of_group else "the host"
        most = f"at most {self.peak // MIB} MiB were in use, and " if self.peak else ""
        return f"{whose} has {self.limit // MIB} MiB; {most}{self.used // MIB} MiB are in use now"


def room(root: Path = Path("/")) -> Room | None:
    """The memory limit of the host or of a control group around this process, whichever leaves
    least; None where none is known. ``root`` is the folder that holds ``proc`` and ``sys``."""
    rooms = [_room_of(group) for group in _groups(root)]
    with suppress(OSError, KeyError, ValueError):
        host = _numbers((root / "proc/meminfo").read_text("ascii", "replace").replace(":", ""))
        total = host["MemTotal"] * KIB
        rooms.append(Room(total, total - host["MemAvailable"] * KIB, 0, of_group=False))
    return min((one for one in rooms if one is not None), key=lambda one: one.left, default=None)


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes of this one's control groups, or else of the host, the kernel has ended
    for want of memory; 0 where it does not say."""
    groups = list(_groups(root))
    if groups and groups[0].kills == _VERSION_2[3]:
        # a group's counter includes its kills in inner groups, which another login sees
        groups.reverse()
    for file in [*(group.folder / group.kills for group in groups), root / "proc/vmstat"]:
        with suppress(OSError, KeyError, ValueError):
            return _numbers(file.read_text("ascii", "replace"))["oom_kill"]
    return 0


def _groups(root: Path) -> Iterator[_Group]:
    """The control group of this process, and the groups around it."""
    found: list[tuple[Path, Path, tuple[str, str, str, str, tuple[str, ...]]]] = []
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines():
            _, names, path = line.split(":", 2)
            if not names:
                found.append((root / "sys/fs/cgroup", Path(path.lstrip("/")), _VERSION_2))
            elif "memory" in names.split(","):
                found.append((root / "sys/fs/cgroup/memory", Path(path.lstrip("/")), _VERSION_1))
    for mounted, inner, files in found:
        # A container may see its own group mounted at the top, while the host's name for it is
        # shown.
        places = [mounted / inner, *(mounted / part for part in inner.parents)]
        for folder in dict.fromkeys(places):
            if (folder / files[1]).exists():
                yield _Group(folder, *files)


def _room_of(group: _Group) -> Room | None:
    def number(name: str) -> int:
        with suppress(OSError):
            text = (group.folder / name).read_text("ascii", "replace").strip()
            return _UNLIMITED if text == "max" else int(text)
        return 0

    try:
        limit, used, peak = number(group.limit), number(group.used), number(group.peak)
        stat = _numbers((group.folder / "memory.stat").read_text("ascii", "replace"))
    except (OSError, ValueError):
        return None
    if not 0 < limit < _UNLIMITED:
        return None
    cached = sum(stat.get(key, 0) for key in group.cache)
    return Room(limit, max(0, used - cached), peak, of_group=True)


def _numbers(text: str) -> dict[str, int]:
    """The lines of a file of the kernel: a name, a number, and maybe a unit."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
