"""Jobs whose run has gone: another run continues them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from flows.job import continue_job
from tasks.cancellation import stop_if_cancelled
from tasks.job_listing import queued_jobs, read_jobs, record_of
from tasks.runner import runner
from tasks.runs import CONTINUING, GONE, JobRun, RunState
from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.listing import QueuedJob
from torpor.control.jobs.policy import wait_s
from torpor.control.jobs.records import LOST_S, Job
from torpor.control.reports import moment
from torpor.control.store.shared_listings import SharedListings
from torpor.control.watch_report import WatchedJob
from torpor.shared.values import WorkspaceName

STUCK_S: Final = 600.0
"""Seconds after which the process of a run that shows no progress is gone: a worker starts a run
that it has taken within seconds, and a run writes its job's record within a minute."""
_RECENT_S: Final = 3600.0
"""A run that crashed more than this many seconds ago is not started again: its user has seen the
crash, and may have submitted the job once more."""


@dataclass(frozen=True)
class JobSeen:
    """An open job. ``queued``: the run that waits to continue it. ``driver``: how Prefect sees the
    run that drives it, or drove it last. ``after``: the job of its workspace whose turn comes
    before its own. ``stopping``: a request asks to stop it; read only for jobs whose turn has not
    come. ``trouble``: the error of Prefect or of the store, which leaves these unknown."""

    opened: OpenWorkspace
    job: Job
    after: str = ""
    queued: QueuedJob | None = None
    driver: RunState = "unknown"
    stopping: bool = False
    trouble: Exception | None = None

    @property
    def left(self) -> bool:
        """Whether no run drives the job or will, its turn has come, and its wait is over."""
        return self._is_due and (not self.after or self.stopping)

    @property
    def due_unix(self) -> float:
        """When the job may be continued: the more runs have failed in a row, the later."""
        failures = self.job.failures
        return self.job.driven_unix + wait_s(failures) if failures else 0.0

    @property
    def holds_slot(self) -> bool:
        """Whether the run that has gone still counts against the limit of its pool."""
        return not self.job.driven and self.driver in ("running", "cancelled")

    @property
    def _is_due(self) -> bool:
        waits = self.queued is not None or self.driver in ("waiting", "taken")
        free = not self.job.driven and not waits and self.trouble is None
        return free and time.time() >= self.due_unix

    def with_stop(self) -> JobSeen:
        """The job with what the store says of a request to stop it: a job whose turn has not come
        is continued only to be stopped. A request that cannot be read is the trouble of this job
        alone."""
        if not self.after or not self._is_due:
            return self
        try:
            return replace(self, stopping=self.opened.jobs.stop_asked(self.job.id) is not None)
        except Exception as error:  # noqa: BLE001 - the other jobs are continued all the same
            return replace(self, trouble=error)

    def watched(self, next_step: str = "") -> WatchedJob:
        """The job as a row of watch's table. Without ``next_step``, what is true if nothing is
        done."""
        attempt = self.job.attempt
        return WatchedJob(
            self.job.id,
            self.job.workspace,
            self.job.state,
            self.job.driven,
            next_step or self._next_step(),
            self.job.failures,
            self.job.why,
            self.job.rented if attempt is None else attempt.machine,
        )

    def _next_step(self) -> str:
        if self.trouble is not None:
            return f"not known: {self.trouble}"
        if self.queued is not None:
            return f"run {self.queued.run} in queue {self.queued.queue} continues it"
        if self.driver in ("waiting", "taken"):
            return "its own run waits in its queue"
        if self.left:
            return "continue it: this was a dry run"
        if not self.job.driven and time.time() < self.due_unix:
            return (
                f"{self.job.failures} runs have failed: it is tried again {moment(self.due_unix)}"
            )
        if not self.job.driven:
            return f"none: job {self.after} of this workspace comes first"
        if self.driver in GONE:
            return "its run has gone: another one continues it soon"
        return "none: a run drives it"


def see_jobs(
    opened: Mapping[WorkspaceName, OpenWorkspace], once: SharedListings
) -> tuple[list[JobSeen], dict[WorkspaceName, str]]:
    """The open jobs of these workspaces, and the errors of those that could not be read. If one
    record cannot be trusted, no job of its workspace is continued: it may be that job's turn.
    ``once``: the listings of this look."""
    found: list[JobSeen] = []
    troubles: dict[WorkspaceName, str] = {}
    looks = [(one, read_jobs.submit(one.through(once.of), 0)) for one in opened.values()]
    for one, look in looks:
        try:
            read = look.result()
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            troubles[one.spec.name] = str(trouble(error))
            continue
        if read.unread:
            troubles[one.spec.name] = read.unread
        else:
            jobs = read.open
            first = jobs[0].id if jobs else ""
            found += [JobSeen(one, job, "" if job.id == first else first) for job in jobs]
    return _with_runs(found), troubles


def _with_runs(found: list[JobSeen]) -> list[JobSeen]:
    if not found:
        return []
    try:
        # A run that has begun waits for a silent driver before the record names it as the driver.
        queued = {one.job: one for one in queued_jobs(CONTINUING, LOST_S)}
        found = [
            replace(
                seen,
                queued=None if seen.job.driven else queued.get(seen.job.id),
                driver=runner().state(seen.job.driver),
            )
            for seen in found
        ]
    except Exception as error:  # noqa: BLE001 - machines are looked at without Prefect
        return [replace(seen, trouble=error) for seen in found]
    return [seen.with_stop() for seen in found]


def act_on(seen: JobSeen) -> WatchedJob:
    """Continue a job that nobody drives; one whose run was cancelled is continued to be stopped."""
    if seen.trouble is not None:
        raise seen.trouble
    stop_if_cancelled(seen.opened, seen.job, seen.driver)
    # first, so that the next run in the pool gets the slot that the lost run gives up
    next_step = f"{continue_job(seen.job) or 'it'} continued it" if seen.left else ""
    if seen.holds_slot:
        why = f"it is silent since it last drove job {seen.job.id}: another run continues the job"
        runner().give_up(seen.job.driver, seen.driver, why)
    return seen.watched(next_step)


def free_slots(blocks: Mapping[str, OpenWorkspace]) -> None:
    """Look for runs of jobs that came to nothing: a run that its worker took and never started is
    put back into its queue, and so is one that crashed before it recorded its job, or the job of
    its retry. A run that has gone on for long without recording anything has crashed, and gives its
    slot back."""
    now_unix = time.time()
    for run in runner().job_runs("crashed", ended_unix=now_unix - _RECENT_S):
        ended_unix = _last_ended_unix(run, blocks)
        if ended_unix is not None and runner().put_back(run.id, ended_unix):
            runner().log.warning("job run %s starts again: its job was not on record", run.id)
    for run in runner().job_runs("taken", "running"):
        if now_unix - run.state_unix < STUCK_S:
            continue
        if run.state == "taken" and runner().put_back(run.id):
            runner().log.warning("job run %s waits again: its worker never started it", run.id)
        elif run.state == "taken":
            runner().log.warning("job run %s has a process that does not begin", run.id)
        elif (ended_unix := _last_ended_unix(run, blocks)) is not None and (
            ended_unix < run.state_unix
        ):
            why = "nothing was recorded of its job: see whether its process runs"
            runner().give_up(run.id, run.state, why)
            runner().log.warning("job run %s was given up: %s", run.id, why)


def _last_ended_unix(run: JobRun, blocks: Mapping[str, OpenWorkspace]) -> float | None:
    """When the last job that the run has recorded ended, so that the run begins another job if it
    is started again; 0 where it has recorded none. None where it would begin none, or where that is
    unknown."""
    opened = blocks.get(str(run.parameters.get("workspace")))
    try:
        record = None if opened is None else record_of(opened, run)
    except Exception:  # noqa: BLE001 - its store does not answer, which the look at its jobs tells
        return None
    if opened is None or record is None:
        return None if opened is None else 0.0
    begins = bool(run.parameters.get("command"))
    return record.ended_unix if begins and record.unsuccessful else None
