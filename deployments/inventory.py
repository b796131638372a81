"""Everything visible of a tree, by a walk that shares no code with the engine.

The demo compares a woken workspace with it: if torpor's own reading and checking were wrong in
the same way, this would still notice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Sight:
    """Everything about one name in a tree."""

    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    target: bytes
    xattrs: tuple[tuple[str, bytes], ...]
    content: str
    data: tuple[tuple[int, int], ...]
    """Where a file has data; the rest of it is holes."""
    same_file: tuple[bytes, ...]
    """All names of a file that has several."""


@dataclass(frozen=True)
class Inventory:
    """A tree by the paths in it; the tree's own root is ``b""``."""

    sights: dict[bytes, Sight]

    @classmethod
    def of(cls, root: Path) -> Inventory:
        """Look at everything below ``root``; every file is read from its first to its last byte."""
        top = os.fsencode(root)
        stats = {b"": os.lstat(top), **_walk(top, b"")}
        names: dict[tuple[int, int], list[bytes]] = {}
        for path, seen in stats.items():
            if not stat.S_ISDIR(seen.st_mode):
                names.setdefault((seen.st_dev, seen.st_ino), []).append(path)
        sights = {}
        for path, seen in stats.items():
            shared = names.get((seen.st_dev, seen.st_ino), [])
            sights[path] = _sight(
                os.path.join(top, path) if path else top,
                seen,
                tuple(sorted(shared)) if len(shared) > 1 else (),
            )
        return cls(sights)

    @property
    def files(self) -> int:
        """Regular files, each once however many names it has."""
        files = [(p, s) for p, s in self.sights.items() if s.kind == "file"]
        return sum(1 for path, sight in files if not sight.same_file or path == sight.same_file[0])

    @property
    def bytes(self) -> int:
        """Bytes of all files, holes included, each file once."""
        return sum(
            sight.size
            for path, sight in self.sights.items()
            if sight.kind == "file" and (not sight.same_file or path == sight.same_file[0])
        )

    def count(self, kind: str) -> int:
        return sum(sight.kind == kind for sight in self.sights.values())

    def differences(self, other: Inventory) -> list[str]:
        """One line for each name and attribute that differs; empty: identical."""
        found = []
        for path in sorted(self.sights.keys() | other.sights.keys()):
            mine, theirs = self.sights.get(path), other.sights.get(path)
            shown = repr(os.fsdecode(path) or "the workspace itself")
            if mine is None or theirs is None:
                found.append(f"{shown}: {'appeared' if mine is None else 'is missing'}")
                continue
            for field in fields(Sight):
                was, is_now = getattr(mine, field.name), getattr(theirs, field.name)
                if was != is_now:
                    found.append(f"{shown}: {field.name} was {_short(was)}, is {_short(is_now)}")
        return found


def _walk(top: bytes, inside: bytes) -> dict[bytes, os.stat_result]:
    found = {}
    for name in os.listdir(os.path.join(top, inside) if inside else top):
        path = os.path.join(inside, name) if inside else name
        seen = os.lstat(os.path.join(top, path))
        found[path] = seen
        if stat.S_ISDIR(seen.st_mode):
            found |= _walk(top, path)
    return found


def _sight(full: bytes, seen: os.stat_result, same_file: tuple[bytes, ...]) -> Sight:
    kind = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
    }.get(stat.S_IFMT(seen.st_mode), "special")
    is_file = kind == "file"
    return Sight(
        kind=kind,
        mode=stat.S_IMODE(seen.st_mode),
        uid=seen.st_uid,
        gid=seen.st_gid,
        mtime_ns=seen.st_mtime_ns,
        size=0 if kind == "directory" else seen.st_size,  # a directory's is the file system's own
        target=os.readlink(full) if kind == "symlink" else b"",
        xattrs=_xattrs(full),
        content=_sha256(full) if is_file else "",
        data=_data(full, seen.st_size) if is_file else (),
        same_file=same_file,
    )


def _xattrs(full: bytes) -> tuple[tuple[str, bytes], ...]:
    try:
        names = sorted(os.listxattr(full, follow_symlinks=False))
    except OSError as cause:
        if cause.errno == errno.ENOTSUP:
            return ()
        raise
    return tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in names)


def _sha256(full: bytes) -> str:
    digest = hashlib.sha256()
    with open(full, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _data(full: bytes, size: int) -> tuple[tuple[int, int], ...]:
    runs = []
    fd = os.open(full, os.O_RDONLY)
    try:
        at = 0
        while at < size:
            try:
                begin = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as cause:
                if cause.errno == errno.ENXIO:  # nothing but a hole until the end
                    break
                raise
            at = os.lseek(fd, begin, os.SEEK_HOLE)
            runs.append((begin, at))
    finally:
        os.close(fd)
    return tuple(runs)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
