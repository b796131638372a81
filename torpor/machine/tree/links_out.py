"""Symbolic links of a workspace that lead out of it, to data that a snapshot of it lacks."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from torpor.machine.tree.absence import GONE
from torpor.machine.tree.disks import Mounts, is_under
from torpor.machine.tree.left_behind import CACHES, shown, taken_bytes
from torpor.machine.tree.owned import Owned
from torpor.shared.format.manifest import SYMLINK, Entry
from torpor.shared.wire.losses import LeftBehind, LinkOut

_MOST_LINKS: Final = 40  # as many as the kernel follows
_IN_CACHE: Final = re.compile(f"({CACHES.pattern})(/.*)?")
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/snap")


class LinksOut:
    """Looks where links lead. ``since_ns``: what is older came with the machine; None: that is
    unknown, and only directories of the system count as part of the machine. ``older``: files that
    are older count too, outside of the system's directories. ``skipped``: real paths that are in
    the snapshot, or may be lost. ``top``: the directory that is the whole machine. ``stop`` ends
    the look: what it has not seen then counts as data."""

    def __init__(
        self,
        roots: Sequence[bytes],
        skipped: Sequence[str],
        since_ns: int | None,
        mounts: Mounts,
        stop: Callable[[], bool],
        top: str = "/",
        older: bool = False,
    ) -> None:
        self._older = older
        self._roots = [os.fsdecode(root) for root in roots]
        self._skipped = [*self._roots, *skipped]
        self._since_ns = since_ns
        self._mounts = mounts
        self._stop = stop
        self._top = top
        self._owned = Owned("", since_ns or 0)
        self._seen: dict[str, LeftBehind | None] = {}

    def find(self, entries: Sequence[Entry]) -> tuple[list[LinkOut], int]:
        """The first link to each place with data, most bytes first; and how many links there are
        to all of them."""
        return self.behind(
            (
                os.path.join(self._roots[entry.root], os.fsdecode(entry.path)),
                os.fsdecode(entry.target),
            )
            for entry in entries
            if entry.kind == SYMLINK
        )

    def behind(self, links: Iterable[tuple[str, str]]) -> tuple[list[LinkOut], int]:
        """Find links as ``find`` does, for links that are given by their paths and their
        targets."""
        found: dict[str, LinkOut] = {}
        count = 0
        for link, target in links:
            data = self._behind(link, target)
            if data is not None:
                count += 1
                found.setdefault(data.path, LinkOut(shown(link), data))
        return sorted(found.values(), key=lambda link: -link.data.bytes), count

    def _behind(self, link: str, target: str) -> LeftBehind | None:
        names = target.split("/")
        climbs = next((n for n, name in enumerate(names) if name != ".."), len(names))
        place = os.path.normpath(os.path.join(os.path.dirname(link), target))
        # a ".." after a name may lead out of the target of another link
        if ".." not in names[climbs:] and is_under(place, self._roots):
            return None
        if place not in self._seen:
            self._seen[place] = self._look(os.path.join(os.path.dirname(link), target))
        return self._seen[place]

    def _look(self, place: str) -> LeftBehind | None:
        try:
            real = self._resolve(place)
        except OSError:  # it is unknown where the link leads
            named = os.path.normpath(place)
            return None if is_under(named, self._skipped) else LeftBehind(shown(named), 0, 0, 0.0)
        if (
            real is None
            or not is_under(real, [self._top])
            or is_under(real, self._skipped)
            or _IN_CACHE.fullmatch(real)
        ):
            return None
        if any(is_under(root, [real]) for root in self._roots):
            return None  # the link leads to a directory that contains the workspace
        if self._since_ns is None and is_under(real, _SYSTEM):
            return None
        found, whole = self._data(real)
        return found if found.files or not whole else None

    def _resolve(self, path: str) -> str | None:
        """The real path of a path; None if it does not exist, or is not on a disk of this machine.
        No network is asked. OSError where it is unknown."""
        pending = [name for name in reversed(path.split("/")) if name not in ("", ".")]
        real, links = "/", 0
        while pending:
            name = pending.pop()
            if name == "..":
                real = os.path.dirname(real)
                continue
            here = os.path.join(real, name)
            if not self._mounts.is_disk(here):
                return None
            try:
                leads = os.readlink(here)
            except GONE:
                return None
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                real = here  # the name is no link
                continue
            links += 1
            if links > _MOST_LINKS:
                return None
            if leads.startswith("/"):
                real = "/"
            pending += [name for name in reversed(leads.split("/")) if name not in ("", ".")]
        return real

    def _data(self, top: str) -> tuple[LeftBehind, bool]:
        """What came or changed at or below ``top``, and whether all of it was looked at."""
        since_ns = 0 if self._older and not is_under(top, _SYSTEM) else self._since_ns or 0
        files = size = newest = 0
        pending, whole = [top], True
        while pending:
            if self._stop():
                whole = False
                break
            try:
                there = [*self._entries(pending.pop())]
            except OSError:
                whole = False
                continue
            for path, facts in there:
                if stat.S_ISDIR(facts.st_mode):
                    pending.append(path)
                elif stat.S_ISREG(facts.st_mode) and facts.st_ctime_ns >= since_ns:
                    if self._since_ns is not None and self._owned.owns(path, facts.st_size):
                        continue
                    files += 1
                    size += taken_bytes(facts)
                    newest = max(newest, facts.st_ctime_ns)
        return LeftBehind(shown(top), files, size, newest / 1e9), whole

    def _entries(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """The contents of a directory, or a file itself; nothing where it is gone. OSError where
        that is unknown; directories of the system that only root can read hold no data of an
        ordinary user."""
        try:
            facts = os.lstat(path)
            if not stat.S_ISDIR(facts.st_mode):
                yield path, facts
                return
            with os.scandir(path) as names:
                for entry in names:
                    there = entry.path
                    if there in self._mounts and not self._mounts.is_disk(there):
                        continue
                    if entry.name == "__pycache__" or is_under(there, self._skipped):
                        continue
                    if not CACHES.fullmatch(there):
                        with suppress(*GONE):
                            yield there, entry.stat(follow_symlinks=False)
        except GONE:
            return
        except PermissionError:
            if not is_under(path, _SYSTEM):
                raise
