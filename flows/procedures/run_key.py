"""Keys under which runs are started: two flows that see the same start one run of it."""

from __future__ import annotations

from typing import Final

RETRY_S: Final = 900
"""Seconds after which `watch` starts a failed run again, instead of at every look."""


def run_key(what: str, seconds: float, every_s: int = RETRY_S) -> str:
    """The key of a run that does ``what``, for ``Runner.start``. It changes after each period of
    ``every_s`` seconds, by a clock that shows ``seconds``."""
    return f"{what}-{int(seconds) // every_s}"
