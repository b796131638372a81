"""A run that a person cancelled in Prefect: its job is to be stopped."""

from __future__ import annotations

import time

from tasks.runner import runner
from tasks.runs import RunState
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job, Stop


def stop_if_cancelled(opened: OpenWorkspace, job: Job, state: RunState) -> Stop | None:
    """Ask for the stop of a job whose run is in this state, if that says that a person has
    cancelled it. A run that drives the job while its own one waits is cancelled for that one."""
    if state != "cancelled" or job.driven_for:
        return None
    stop = Stop("cancelled", job.on_cancel, "its run was cancelled in Prefect", time.time())
    opened.jobs.ask_stop(job.id, stop, unless_asked=True)
    return opened.jobs.stop_asked(job.id)


def state_of(run: str) -> RunState:
    """How a run stands; unknown, too, where Prefect does not answer: a job goes on without it."""
    try:
        return runner().state(run)
    except Exception as error:  # noqa: BLE001 - the server may fail in any way
        runner().log.warning("the state of run %s is not known: %s", run, error)
        return "unknown"
