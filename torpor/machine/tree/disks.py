"""The machine's mounts: which are disks that end with it, and which are not to be touched."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from torpor.machine.tree.mappings import PROC

_DISKS: Final = re.compile(
    r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|jfs|reiserfs|overlay|aufs|tmpfs|vfat|exfat|ntfs3?"
    r"|fuseblk|fuse\.fuse-overlayfs"
)
"""File systems that end with their machine. tmpfs is one of them: its files are in memory."""
_NO_DATA: Final = re.compile(
    r"proc|sysfs|devtmpfs|devpts|cgroup2?|securityfs|debugfs|tracefs|pstore|bpf|mqueue|hugetlbfs"
    r"|configfs|fusectl|binfmt_misc|autofs|efivarfs|rpc_pipefs|nsfs|selinuxfs|squashfs|iso9660"
    r"|erofs|cramfs|fuse\.(lxcfs|gvfsd-fuse|portal)"
)
"""File systems that hold no user's files, or that nobody can write to."""
_SYSTEM_MOUNTS: Final = ("/proc", "/sys", "/dev", "/run")
"""Mount points that belong to the kernel and to running programs."""


class Mount(NamedTuple):
    """One line of the mount table. ``root``: the directory of the device that is mounted."""

    path: str
    kind: str
    device: str = ""
    root: str = "/"


class Mounts:
    """The mount table. No method touches a mount, because a network that is away would block."""

    def __init__(self, table: Sequence[Mount]) -> None:
        self._at = {
            mount.path: mount for mount in table
        }  # of two mounts at one path, the later one is on top
        self.parents = {os.path.dirname(path) for path in self._at if path != "/"}

    @classmethod
    def of_this_machine(cls, volumes: Sequence[str] = ()) -> Mounts:
        """``volumes``: where disks are mounted that outlive the machine, if they are."""
        table = _table((PROC / "self/mountinfo").read_bytes())
        return cls([m._replace(kind="volume") if m.path in volumes else m for m in table])

    def __contains__(self, path: str) -> bool:
        return path in self._at

    def is_disk(self, path: str) -> bool:
        """Whether what lies at this absolute path ends with the machine."""
        if is_under(path, _SYSTEM_MOUNTS):
            return is_under(path, ("/dev/shm",))  # noqa: S108 - it is looked at, not used
        place = path
        while place not in self._at and place != "/":
            place = os.path.dirname(place)
        return place == "/" or _DISKS.fullmatch(self._at[place].kind) is not None

    def disks(self) -> list[str]:
        """The directories in which to look for files: each disk once, even if it is mounted at
        several places."""
        found = [
            mount
            for mount in self._at.values()
            if mount.path != "/"
            and _DISKS.fullmatch(mount.kind)
            and not is_under(mount.path, _SYSTEM_MOUNTS)
        ]
        again = {
            mount.path
            for mount in found
            for other in (*found, self._at.get("/"))
            if other is not None
            and mount.device
            and mount.device == other.device
            and mount is not other
            and (
                _inside(mount.root, other.root)
                or (mount.root == other.root and other.path < mount.path)
            )
        }
        return ["/", *sorted(mount.path for mount in found if mount.path not in again)]

    def remote(self) -> list[Mount]:
        """Mounts that do not end with the machine as far as can be known."""
        return [
            mount
            for mount in self._at.values()
            if mount.path != "/"
            and not _DISKS.fullmatch(mount.kind)
            and not _NO_DATA.fullmatch(mount.kind)
            and not is_under(mount.path, _SYSTEM_MOUNTS)
        ]


def _table(text: bytes) -> list[Mount]:
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        fields, kinds = left.split(b" "), right.split(b" ")
        if len(fields) < 5:
            continue
        root, path = (
            os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), field))
            for field in fields[3:5]
        )
        found.append(Mount(path, os.fsdecode(kinds[0]), os.fsdecode(fields[2]), root))
    return found


def _inside(path: str, place: str) -> bool:
    return path != place and path.startswith(os.path.join(place, ""))


def is_under(path: str, places: Sequence[str]) -> bool:
    """Whether ``path`` is one of ``places`` or below one."""
    return any(path == place or _inside(path, place) for place in places)
