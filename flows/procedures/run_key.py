"""Keys under which runs are started: two flows that see the same start one run of it."""

from __future__ import annotations

from typing import Final

RETRY_S: Final = 900
"""A run that `watch` has started and that failed is started again after this time, and not at every
look."""


def run_key(what: str, seconds: float, every_s: int = RETRY_S) -> str:
    """The key of a run that does ``what``, for ``Runner.start``: another one in each period of
    ``every_s``, by a clock that shows ``seconds``."""
    return f"{what}-{int(seconds) // every_s}"
