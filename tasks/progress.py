"""A progress bar in the UI, fed by the parts of one phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from tasks.runner import runner
from tasks.waiting import waits_of
from torpor.shared.wire.request import Event

UPDATE_S: Final = 2.0
"""Each update is a request to the server: enough for an eye, little for its database."""

_hears: ContextVar[Callable[[str, float], None] | None] = ContextVar("hears", default=None)


@contextmanager
def progress_told_to(hears: Callable[[str, float], None]) -> Iterator[None]:
    """Call ``hears`` with the description and the percent of each progress bar in this context."""
    token = _hears.set(hears)
    try:
        yield
    finally:
        _hears.reset(token)


class Progress:
    """Adds up what the parts of one phase say. Thread-safe."""

    def __init__(self, key: str, description: str, total_bytes: int) -> None:
        self._lock = threading.Lock()
        self._total = max(1, total_bytes)
        self._parts: dict[Hashable, int] = {}
        self._updated = time.monotonic()
        self._shown = runner().progress(key, description)
        self._description = description
        self._hears = _hears.get()
        self._waits = waits_of(runner())

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
            percent = min(99.9, 100.0 * sum(self._parts.values()) / self._total)
        self._show(percent)

    def done(self) -> None:
        self._show(100.0)

    def _show(self, percent: float) -> None:
        self._shown(percent)
        if self._hears is not None:
            self._hears(self._description, percent)
