"""The phases of a run: how many seconds each took, and who is told when one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torpor.shared.errors import TorporError

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)
_hears: ContextVar[Callable[[str], None] | None] = ContextVar("hears", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the wall seconds of this context to this phase of the run."""
    hears, seconds = _hears.get(), _seconds.get()
    if hears is not None:
        hears(name)
    if seconds is None:
        yield
        return
    started = time.monotonic()
    seconds.setdefault(name, 0.0)
    try:
        yield
    finally:
        seconds[name] += time.monotonic() - started


@contextmanager
def measured_phases() -> Iterator[dict[str, float]]:
    """Measure the phases in this context apart from those around it. Returns the seconds of each,
    in the order in which they began first."""
    seconds: dict[str, float] = {}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


def seconds_by_phase() -> dict[str, float]:
    """The seconds of each phase of this run until now."""
    return dict(_seconds.get() or {})


@contextmanager
def phases_told_to(hears: Callable[[str], None]) -> Iterator[None]:
    """Call ``hears`` with the name of each phase in this context, before the phase begins."""
    token = _hears.set(hears)
    try:
        yield
    finally:
        _hears.reset(token)


@contextmanager
def phase_named_in_errors(what: str) -> Iterator[None]:
    """Name in an error of ``what`` the phase of this context in which it happened."""
    now = ["prepare"]
    with phases_told_to(lambda name: now.__setitem__(0, name)):
        try:
            yield
        except TorporError as error:
            raise type(error)(f"{what} in phase {now[0]}: {error}") from error
