"""Seconds by phase, and listeners for phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_hears: ContextVar[Callable[[str], None] | None] = ContextVar("hears", default=None)


class Phases:
    """Wall seconds of each named phase of a flow, in the order they first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        hears = _hears.get()
        if hears is not None:
            hears(name)
        started = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started


@contextmanager
def phases_told_to(hears: Callable[[str], None]) -> Iterator[None]:
    """Call ``hears`` with the name of each phase in this context, before the phase begins."""
    token = _hears.set(hears)
    try:
        yield
    finally:
        _hears.reset(token)
