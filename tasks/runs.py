"""What flows ask Prefect about runs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

RunState = Literal["waiting", "taken", "running", "cancelled", "ended", "unknown"]
"""``taken``: by a worker, which has not started it. ``cancelled``: by a person; its process may
still be ending. ``unknown``: nobody knows a run of this id."""


class OpenRun(NamedTuple):
    """A run of a deployment that has not ended."""

    id: str
    queue: str
    state: RunState
    state_unix: float  # since when it is so
    created_unix: float
    parameters: dict[str, Any]  # a block is given by its name
