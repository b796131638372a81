"""Seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Wall seconds of each named phase of a flow, in the order they first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started
