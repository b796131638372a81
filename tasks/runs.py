"""What flows ask Prefect about runs of jobs."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

RunState = Literal["waiting", "taken", "running", "cancelled", "crashed", "ended", "unknown"]
"""The state of a run. ``taken``: by a worker, which has not started it. ``cancelled``: by a person;
its process may still be ending. ``crashed``: its process is gone. ``unknown``: no run with this id
is known."""
GONE: Final[tuple[RunState, ...]] = ("cancelled", "crashed", "ended")

TAG: Final = "torpor"
"""The tag of every deployment of torpor's."""
FLOW_POOL: Final = "torpor"
JOB_POOL: Final = "torpor-jobs"
JOB_QUEUES: Final = ("critical", "high", "normal", "low")
"""The queues of torpor's work pool; runs in the first one start first."""
CONTINUING: Final = JOB_QUEUES[0]
"""The queue of runs that continue a job: its machine costs money while nobody drives it, so no job
that has not begun goes first."""


class JobRun(NamedTuple):
    """A run of the flow `job`."""

    id: str
    queue: str
    state: RunState
    state_unix: float  # when the run came into this state
    created_unix: float
    parameters: dict[str, Any]  # blocks are given by their names
    due_unix: float = 0.0  # when the run may begin; 0: when it was created
