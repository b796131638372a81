"""The table of a run in the UI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tasks.runner import runner
from torpor.control.reports import Report

E = TypeVar("E", bound=BaseException)

_flow: ContextVar[str] = ContextVar("flow", default="")


@contextmanager
def shown_as(flow: str) -> Iterator[None]:
    """Show the tables of reports under this flow's name."""
    token = _flow.set(flow)
    try:
        yield
    finally:
        _flow.reset(token)


def current_flow() -> str:
    """The name of the running flow."""
    return _flow.get()


def show(report: Report) -> None:
    """Show a report as a table in the UI."""
    flow = _flow.get()
    key = f"{flow}-{report.about}" if report.about else flow
    runner().table(key=key, rows=report.rows(), description=report.title())


def shown(report: Report, fault: E) -> E:
    """Show the report of a run that fails, and which therefore cannot return it; returns the error
    to raise."""
    show(report)
    return fault
