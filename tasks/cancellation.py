"""Stops the job of a run that a person has cancelled in Prefect."""

from __future__ import annotations

import time

from tasks.runner import runner
from tasks.runs import RunState
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job, Stop


def stop_if_cancelled(opened: OpenWorkspace, job: Job, state: RunState) -> Stop | None:
    """Ask for the stop of a job if this state of its run says that a person has cancelled the run.
    If the run of another job drives this one, the cancellation is meant for that other job, and
    does not count."""
    if state != "cancelled" or job.driven_for:
        return None
    stop = Stop("cancelled", job.on_cancel, "its run was cancelled in Prefect", time.time())
    opened.jobs.ask_stop(job.id, stop, unless_asked=True)
    return opened.jobs.stop_asked(job.id)


def state_of(run: str) -> RunState:
    """The state of a run; unknown also where Prefect does not answer, so that the job continues."""
    try:
        return runner().state(run)
    except Exception as error:  # noqa: BLE001 - the server may fail in any way
        runner().log.warning("the state of run %s is not known: %s", run, error)
        return "unknown"
