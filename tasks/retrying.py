"""How tasks are retried: the error says whether the same call may succeed later."""

from __future__ import annotations

from typing import Any, Final

from prefect.cache_policies import NO_CACHE
from prefect.tasks import Task

from torpor.shared.errors import TorporError, WorkspaceBusy

BUSY_WAIT_S: Final = 15
BUSY_TRIES: Final = 6
"""90 s: longer than the minute after which a run without its control side gives up."""


def retry_if_retryable(task: Task[..., Any], task_run: Any, state: Any) -> bool:
    """Whether a task's error may pass; every other one is final at once."""
    error = _error(state)
    return isinstance(error, TorporError) and error.retryable


def retry_if_busy(task: Task[..., Any], task_run: Any, state: Any) -> bool:
    """As above, and a workspace that another run holds is waited for."""
    error = _error(state)
    return isinstance(error, WorkspaceBusy) or (isinstance(error, TorporError) and error.retryable)


STEP: Final[dict[str, Any]] = {
    "retries": 3,
    "retry_delay_seconds": [1, 5, 20],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retry_if_retryable,
    "cache_policy": NO_CACHE,  # sessions and blocks are no cache keys
    "persist_result": False,  # and no results either
}
"""Options of a task that may be repeated: every one of ours is idempotent."""

ONCE: Final[dict[str, Any]] = {"cache_policy": NO_CACHE, "persist_result": False}
"""Options of a task whose own loop already waits and repeats."""


def _error(state: Any) -> BaseException | None:
    data = getattr(state, "data", None)
    if isinstance(data, BaseException):
        return data
    exception = getattr(data, "exception", None)
    return exception if isinstance(exception, BaseException) else None
