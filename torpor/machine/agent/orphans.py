"""Finds runs that have lost their control side."""

from __future__ import annotations

import time
from collections.abc import Hashable


class Orphans:
    """Runs by the connections whose requests named them. All calls are made under the owner's lock.

    Another connection does not keep a run alive: a second control side that waits for the workspace
    would otherwise wait forever for one that was killed.
    """

    def __init__(self) -> None:
        self._named: dict[Hashable, set[str]] = {}
        self._alone_since: dict[str, float] = {}

    def named(self, connection: Hashable, run: str) -> None:
        """Note that a request of ``connection`` works on ``run``."""
        self._named.setdefault(connection, set()).add(run)
        self._alone_since.pop(run, None)

    def gone(self, connection: Hashable) -> None:
        """Note that the connection has ended."""
        left = self._named.pop(connection, set())
        for run in left.difference(*self._named.values()):
            self._alone_since[run] = time.monotonic()

    def take(self, alone_s: float) -> list[str]:
        """The runs without a connection for ``alone_s`` seconds. Each is returned once."""
        now = time.monotonic()
        taken = [run for run, since in self._alone_since.items() if now - since >= alone_s]
        for run in taken:
            del self._alone_since[run]
        return taken
