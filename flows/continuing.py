"""Jobs whose run has gone: another run continues them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flows.job import job
from tasks.job_listing import FLOW, job_of, queued_jobs, read_jobs
from tasks.runner import runner
from tasks.runs import OpenRun, RunState
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.listing import QueuedJob
from torpor.control.jobs.records import Job, Stop
from torpor.control.watching import WatchedJob
from torpor.shared.errors import TorporError
from torpor.shared.values import WorkspaceName

CONTINUING: Final = "critical"
"""The queue of runs that continue a job: its machine costs money while nobody drives it, so no job
that has not begun goes first."""
_AGAIN_S: Final = 900
"""A run that was to continue a job and did not is followed by another after this time."""
STUCK_S: Final = 600.0
"""A worker starts a run that it has taken within seconds, and a run writes its job's record within
a minute. After this time, their process is gone."""


@dataclass(frozen=True)
class JobSeen:
    """An open job, the run that waits to continue it, and how Prefect sees the run that drives
    it."""

    opened: OpenWorkspace
    job: Job
    queued: QueuedJob | None
    driver: RunState

    @property
    def cancelled(self) -> bool:
        """Whether a person has cancelled its run in Prefect, and nobody has seen that yet."""
        return self.driver == "cancelled" and self.opened.jobs.stop_asked(self.job.id) is None

    @property
    def left(self) -> bool:
        """Whether nobody drives it or will."""
        return not self.job.driven and self.queued is None

    @property
    def holds_slot(self) -> bool:
        """Whether the run that has gone still counts as one of its pool."""
        if self.job.driven or (self.queued is not None and self.queued.run == self.job.driver):
            return False
        return self.driver in ("taken", "running", "cancelled")

    def watched(self, next_step: str = "") -> WatchedJob:
        """As a row. Without ``next_step``, what is so without any action."""
        return WatchedJob(
            self.job.id,
            self.job.workspace,
            self.job.state,
            self.job.driven,
            next_step or self._next_step(),
        )

    def _next_step(self) -> str:
        if self.queued is not None:
            return f"run {self.queued.run} in queue {self.queued.queue} continues it"
        if self.left:
            return "continue it: this was a dry run"
        if self.driver in ("cancelled", "ended"):
            return "its run has gone: another one continues it soon"
        return "none: a run drives it"


def see_jobs(
    opened: Mapping[WorkspaceName, OpenWorkspace],
) -> tuple[list[JobSeen], dict[WorkspaceName, str]]:
    """The open jobs of these workspaces, and the errors of those that could not be read."""
    found: list[tuple[OpenWorkspace, Job]] = []
    troubles: dict[WorkspaceName, str] = {}
    looks = [(one, read_jobs.submit(one, 0)) for one in opened.values()]
    for one, look in looks:
        try:
            found += [(one, job) for job in look.result().open]
        except TorporError as error:
            troubles[one.spec.name] = str(error)
    queued = {one.job: one for one in queued_jobs()} if found else {}
    return [
        JobSeen(one, job, queued.get(job.id), runner().state(job.driver)) for one, job in found
    ], troubles


def act_on(seen: JobSeen) -> WatchedJob:
    """Continue a job that nobody drives; one whose run was cancelled is continued to be stopped."""
    if seen.cancelled:
        why = "its run was cancelled in Prefect"
        stop = Stop("cancelled", seen.job.on_cancel, why, time.time())
        seen.opened.jobs.ask_stop(seen.job.id, stop)
    # first: whoever is next in the pool takes the slot that the lost run gives up
    next_step = f"{continue_job(seen.job) or 'it'} continued it" if seen.left else ""
    if seen.holds_slot:
        why = f"it is silent since it last drove job {seen.job.id}: another run continues the job"
        runner().give_up(seen.job.driver, why)
    return seen.watched(next_step)


def continue_job(record: Job, key: str = "continue") -> str:
    """Start a run that continues a job which nobody drives; returns what runs now. Asked twice
    within a quarter of an hour, it starts one."""
    return runner().start(
        job,
        f"{key}-{record.id}-{record.driver}-{int(time.time()) // _AGAIN_S}",
        queue=CONTINUING,
        workspace=record.block,
        job=record.id,
    )


def free_slots(blocks: Mapping[str, OpenWorkspace]) -> None:
    """Give up the runs of jobs whose process went before it wrote a record: they would hold their
    slots for ever. One that its worker never started is submitted again."""
    now_unix = time.time()
    for run in runner().runs(FLOW):
        if now_unix - run.state_unix < STUCK_S or run.state not in ("taken", "running"):
            continue
        if run.state == "taken" and run.queue:
            why = "its worker took it and did not start it"
            runner().give_up(run.id, why)
            again = runner().start(job, f"again-{run.id}", queue=run.queue, **run.parameters)
            runner().log.warning("job run %s: %s; %s replaces it", run.id, why, again)
        elif _left_no_record(run, blocks):
            why = "its process is gone, and it has begun nothing: submit the job again"
            runner().give_up(run.id, why)
            runner().log.warning("job run %s: %s", run.id, why)


def _left_no_record(run: OpenRun, blocks: Mapping[str, OpenWorkspace]) -> bool:
    opened = blocks.get(str(run.parameters.get("workspace")))
    return opened is not None and opened.jobs.of(job_of(run)) is None
