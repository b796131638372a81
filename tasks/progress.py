"""How a run shows its progress: in its log, in a progress bar of the UI, and at a terminal."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from tasks.runner import runner
from tasks.waiting import waits_of
from torpor.shared.wire.request import Event

UPDATE_S: Final = 2.0
"""Seconds between two updates of a progress bar. Each update is a request to the server: often
enough for the eye, and rare enough for the server's database."""


class Follower(Protocol):
    """A person who follows a run at a terminal. Any thread may call these methods."""

    def begins(self, thing: str, words: str) -> None:
        """An action begins. ``thing`` names it among those under way, and ``words`` describe it to
        people. Called again when the words change."""

    def ends(self, thing: str) -> None:
        """The action ``thing`` has ended or failed, and so has the transfer of that name."""

    def moves(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """This many bytes have been moved for ``what``. The first call has none, and the last has
        all, unless ``what`` ends before."""

    def prints(self, text: str) -> None:
        """A command on a machine has printed this text."""


_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)
_thing: ContextVar[str] = ContextVar("thing", default="")


@contextmanager
def followed_by(follower: Follower | None) -> Iterator[None]:
    """Within this context, tell ``follower`` what runs do; nobody for None."""
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


def following() -> Follower | None:
    """Who follows the runs of this context."""
    return _follower.get()


@contextmanager
def doing(words: str) -> Iterator[None]:
    """While this context lasts, show in the run's log and to its follower what is being done, which
    may take a while."""
    follower = _follower.get()
    token = _thing.set(secrets.token_hex(8))
    try:
        now(words)
        yield
    finally:
        if follower is not None:
            follower.ends(_thing.get())
        _thing.reset(token)


def now(words: str) -> None:
    """Show what is done now, as a part of the action of the enclosing ``doing``."""
    runner().log.info("%s", words)
    follower = _follower.get()
    if follower is not None:
        follower.begins(_thing.get(), words)


class Progress:
    """Adds up the progress of the parts of one phase. Thread-safe."""

    def __init__(self, key: str, description: str, total_bytes: int) -> None:
        self._lock = threading.Lock()
        self._total_bytes = total_bytes
        self._parts: dict[Hashable, int] = {}
        self._updated = time.monotonic()
        self._shown = runner().progress(key, description)
        self._description = description
        self._follower = _follower.get()
        self._waits = waits_of(runner())
        self._tell(0)

    def event(self, part: Hashable, event: Event) -> None:
        """A part has moved ``event.bytes`` so far, or waits for its store."""
        if event.away is not None:
            self._waits.hear(event.away)
            return
        with self._lock:
            self._parts[part] = max(self._parts.get(part, 0), event.bytes)
            now = time.monotonic()
            if now - self._updated < UPDATE_S:
                return
            self._updated = now
            done_bytes = min(sum(self._parts.values()), max(0, self._total_bytes - 1))
        self._shown(min(99.9, 100.0 * done_bytes / max(1, self._total_bytes)))
        self._tell(done_bytes)

    def done(self) -> None:
        self._shown(100.0)
        self._tell(self._total_bytes)

    def give_up(self) -> None:
        """Note that this part moves no more bytes."""
        if self._follower is not None:
            self._follower.ends(self._description)

    def _tell(self, done_bytes: int) -> None:
        if self._follower is not None and self._total_bytes:
            self._follower.moves(self._description, done_bytes, self._total_bytes)
