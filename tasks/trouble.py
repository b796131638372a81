"""What went wrong with one of several machines, workspaces or markets."""

from __future__ import annotations

from tasks.runner import runner
from torpor.shared.errors import TorporError, as_ours


def trouble(error: Exception) -> TorporError:
    """The error as one of ours, for whoever goes on with the others. The log has the traceback of
    one that is not: what a hostile machine, market or store says may raise anything."""
    found = as_ours(error)
    if found is not error:
        runner().log.error("an error that torpor does not know: %s", found, exc_info=error)
    return found
