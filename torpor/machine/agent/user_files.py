"""Which files of a home a snapshot of its own holds: those that a user has written there, by the
same look that says what would be lost."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from torpor.machine.agent.losses import HOMES_S, LookBehind
from torpor.machine.tree.absence import GONE
from torpor.machine.tree.credentials import is_credential
from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.left_behind import Look, UserNames, shown
from torpor.machine.tree.walk import absolute_root
from torpor.shared.errors import UnsavedWork
from torpor.shared.values import GIB
from torpor.shared.wire.snapshot import UserFiles

MOST_BYTES: Final = GIB
MOST_FILES: Final = 100_000
"""More than either is no work that was left there by mistake: its user decides where it belongs.
The names are held in memory, about 300 bytes each."""
_SHOWN: Final = 3


class UserNamesOnly:
    """The names of the last look. ``root``: the home."""

    def __init__(self, home: Path, request: UserFiles) -> None:
        self.root = os.path.realpath(os.fsencode(os.path.expanduser("~")))
        self._home = os.fsdecode(self.root)
        self._request = request
        beside = [os.path.realpath(os.fsencode(absolute_root(path))) for path in request.beside]
        self._behind = LookBehind(home, beside)
        self._names: set[bytes] = set()

    def leaves_out(self, path: bytes) -> bool:
        """Whether a path below the home is none of them, nor a directory above one."""
        return path not in self._names

    def look(self, check: Callable[[], None]) -> None:
        """Look for them. UnsavedWork where some of them may not be stored, or are not known."""
        ends_s = time.monotonic() + HOMES_S

        def stop() -> bool:
            check()
            return time.monotonic() > ends_s

        where = self._behind.where(self._request)
        mounts = Mounts.of_this_machine(self._request.volumes)
        found = Look(where, mounts, stop).user_names(MOST_FILES)
        below = [os.path.relpath(path, self._home) for path in found.names]
        _check(found, below)
        tops = {os.path.join(self._home, path.partition("/")[0]) for path in below}
        links = self._behind.links_from(tops, _links(found.names), self._request, stop)
        if links:
            raise UnsavedWork(
                f"{links[0].link} is a link to {links[0].data.path}, which is in no snapshot"
            )
        self._names = {os.fsencode(name) for path in below for name in _with_parents(path)}


def _check(found: UserNames, below: Sequence[str]) -> None:
    if len(below) > MOST_FILES or found.bytes > MOST_BYTES:
        raise UnsavedWork(
            f"that takes at most {MOST_FILES:,} files with {MOST_BYTES:,} bytes, and there are "
            f"{'more' if found.unseen else f'{len(below):,} with {found.bytes:,}'}"
        )
    if found.unseen:
        raise UnsavedWork(f"what else is there is not known: {shown('; '.join(found.unseen))}")
    if found.elsewhere:
        raise UnsavedWork(f"in the home of another user: {_named(found.elsewhere)}")
    if keys := [f"~/{path}" for path in below if is_credential(path)]:
        raise UnsavedWork(f"by the name, there may be credentials in {_named(keys)}")
    if not below:
        raise UnsavedWork("they have gone since the look for them began")


def _links(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those that are links, and what they say."""
    for path in paths:
        try:
            yield path, os.readlink(path)
        except GONE:  # since it was listed: the walk sees that
            continue
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file
                raise UnsavedWork(f"{shown(path)}: {error.strerror}") from None


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
    return ", ".join(map(shown, paths[:_SHOWN])) + more


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = os.path.dirname(path)
