"""Errors of one among several machines, workspaces or markets."""

from __future__ import annotations

from tasks.runner import runner
from torpor.shared.errors import TorporError, as_ours


def trouble(error: Exception) -> TorporError:
    """The error as one of torpor's, for a caller that continues with the other machines, workspaces
    or markets. An error of another kind, which a hostile machine, market or store can cause, is
    logged with its traceback."""
    found = as_ours(error)
    if found is not error:
        runner().log.error("an error that torpor does not know: %s", found, exc_info=error)
    return found
