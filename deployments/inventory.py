"""Everything visible of a tree, by a walk that shares no code with the engine.

The demo compares a woken workspace with it: if torpor's own reading and checking were wrong in
the same way, this would still notice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Inventory = dict[str, dict[str, Any]]
"""What is seen of each name below a tree's root. The root itself is "."."""


def inventory_of(root: Path) -> Inventory:
    """The inventory of everything below ``root``. Reads every file from its first to its last
    byte."""
    names: dict[tuple[int, int], list[str]] = {}
    stats = {path: path.lstat() for path in [root, *sorted(_below(root))]}
    for path, seen in stats.items():
        names.setdefault((seen.st_dev, seen.st_ino), []).append(str(path.relative_to(root)))
    return {
        str(path.relative_to(root)): {
            "mode": stat.filemode(seen.st_mode),
            "owner": (seen.st_uid, seen.st_gid),
            "mtime_ns": seen.st_mtime_ns,
            # A directory's size is the file system's own.
            "size": 0 if stat.S_ISDIR(seen.st_mode) else seen.st_size,
            "names": names[seen.st_dev, seen.st_ino],
            "target": os.readlink(path) if path.is_symlink() else "",
            "xattrs": _xattrs(path),
            **(_content(path, seen.st_size) if stat.S_ISREG(seen.st_mode) else {}),
        }
        for path, seen in stats.items()
    }


def sizes_of(inventory: Inventory) -> dict[str, int]:
    """The size of each file, holes included, by the first of its names."""
    return {one["names"][0]: one["size"] for one in inventory.values() if "content" in one}


def differences(was: Inventory, now: Inventory) -> list[str]:
    """One line for each name and attribute that differs; empty: identical."""
    found = [f"{path!r} is missing" for path in was.keys() - now.keys()]
    found += [f"{path!r} appeared" for path in now.keys() - was.keys()]
    for path in sorted(was.keys() & now.keys()):
        for what in {**was[path], **now[path]}:
            before, after = was[path].get(what), now[path].get(what)
            if before != after:
                found.append(f"{path!r}: {what} was {before!r:.60}, is {after!r:.60}")
    return found


def _below(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)


def _xattrs(path: Path) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as cause:
        if cause.errno == errno.ENOTSUP:
            return {}
        raise
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}


def _content(path: Path, size: int) -> dict[str, Any]:
    """The SHA-256 of a file, and the ranges that have data; the rest are holes."""
    data, at = [], 0
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            while at < size:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                data.append((begin, at))
        except OSError as cause:
            if cause.errno != errno.ENXIO:  # only a hole follows until the end
                raise
    return {"content": digest, "data": data}
