"""Files by directory, grouped as a person would name them: /data/runs, and not its 500 runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from torpor.shared.wire.losses import LeftBehind

_DEEPEST: Final = 8
"""Files in deeper directories count to the directory at this depth."""
_WIDE: Final = frozenset(
    {
        *("/", "/home", "/mnt", "/media", "/opt", "/srv", "/var", "/var/lib", "/usr", "/usr/lib"),
        *("/usr/share", "/usr/local", "/usr/local/lib", "/usr/local/share"),
        "/var/lib/docker/volumes",
    }
)
_WIDE_IN_HOME: Final = ("/.cache", "/.config", "/.local", "/.local/share")


class _Node:
    __slots__ = ("below", "bytes", "files", "newest_ns", "own_bytes", "own_files", "own_newest_ns")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.files = self.bytes = self.newest_ns = 0
        self.own_files = self.own_bytes = self.own_newest_ns = 0


class Groups:
    """``wide``: directories of which each part is named separately: homes, and the tops of
    disks."""

    def __init__(self, wide: set[str]) -> None:
        self._top = _Node()
        self._wide = _WIDE | wide | {home + name for home in wide for name in _WIDE_IN_HOME}

    def add(self, directory: str, files: int, size: int, newest_ns: int) -> None:
        """Count files that lie in ``directory`` itself."""
        node = self._top
        for name in ("", *directory.strip("/").split("/")[:_DEEPEST]):
            if name:
                node = node.below.setdefault(name, _Node())
            node.files += files
            node.bytes += size
            node.newest_ns = max(node.newest_ns, newest_ns)
        node.own_files += files
        node.own_bytes += size
        node.own_newest_ns = max(node.own_newest_ns, newest_ns)

    @property
    def total(self) -> LeftBehind:
        return _left("/", self._top.files, self._top.bytes, self._top.newest_ns)

    def largest(self, count: int) -> list[LeftBehind]:
        """The groups, those with most bytes first."""
        return sorted(self._groups("/", self._top), key=lambda group: -group.bytes)[:count]

    def directories(self) -> Iterator[LeftBehind]:
        """Each directory that has files of its own."""
        pending = [("/", self._top)]
        while pending:
            path, node = pending.pop()
            if node.own_files:
                yield _left(path, node.own_files, node.own_bytes, node.own_newest_ns)
            pending += ((os.path.join(path, name), child) for name, child in node.below.items())

    def size_near(self, directory: str) -> int:
        """Bytes below the first three names of ``directory``."""
        node = self._top
        for name in directory.strip("/").split("/")[:3]:
            node = node.below[name]
        return node.bytes

    def _groups(self, path: str, node: _Node) -> Iterator[LeftBehind]:
        wide = path in self._wide
        if not wide and (node.own_files or len(node.below) != 1):
            yield _left(path, node.files, node.bytes, node.newest_ns)
            return
        if node.own_files:
            yield _left(path, node.own_files, node.own_bytes, node.own_newest_ns)
        for name, child in node.below.items():
            yield from self._groups(os.path.join(path, name), child)


def _left(path: str, files: int, size: int, newest_ns: int) -> LeftBehind:
    shown = os.fsencode(path).decode(errors="backslashreplace")
    return LeftBehind(shown, files, size, newest_ns / 1e9)
