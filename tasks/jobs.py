"""The steps of a job: its machine, and its command there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from blocks import Workspace
from tasks.machines import check_reached, renting
from tasks.retrying import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job, job_id
from torpor.control.money.budgets import between
from torpor.control.money.costs import costs
from torpor.control.remote.seam import Agent
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import AT_ONCE_S
from torpor.control.zones import zone_named
from torpor.shared.errors import InvalidInput, MachineInUse, TorporError
from torpor.shared.values import Machine, MachineId, WorkspaceName
from torpor.shared.wire.job import JobLook, JobState, LookAtJob, StartJob, StopJob

GRACE_S = 30.0
"""How long a command that is stopped may take to end by itself."""
LOOK_S = 300.0
"""The longest look at a command. A new agent may have to be installed within it."""
START_S = 300.0
STOP_S = GRACE_S + 150.0
"""An agent that has not answered after this time hangs, with a disk or for want of memory: its own
limits for each step of a stop add up to as much."""


@step("find machine of job")
def machine_in_use(
    opened: OpenWorkspace, wanted: MachineId | None
) -> tuple[Machine, Rental] | None:
    """The workspace's machine that was handed over, of several the ``wanted`` one; None if it is on
    none. Closes the rental of one that has provably gone. One that is being ended counts only for
    a job that ran on it. InvalidInput if it may be on one that no provider block reaches."""
    held = renting(opened)
    held.end_abandoned(within_s=AT_ONCE_S)
    over = [
        (machine, rental)
        for machine, rental in held.machines()
        if rental is not None
        and rental.state == "handed over"
        and (machine.id == wanted or not rental.is_ending(machine))
    ]
    if len(over) > 1:
        names = ", ".join(machine.id for machine, _ in over)
        over = [one for one in over if one[0].id == wanted]
        if not over:
            raise InvalidInput(
                f"workspace {opened.spec.name} is on several machines: {names}. A job runs on one: "
                "hibernate the others first"
            )
    if not over:
        check_reached(opened)
    return over[0] if over else None


def begun_job(opened: OpenWorkspace, wanted: str) -> Job | None:
    """The job with that id. Without one, the job that this very run has begun, if there is one:
    Prefect may start a run again."""
    if not wanted:
        return opened.jobs.begun_by(runner().run)
    found = opened.jobs.of(job_id(wanted.strip()))
    if found is None:
        raise InvalidInput(
            f"workspace {opened.spec.name} has no job {wanted} in {opened.store.address}: list its "
            "jobs, or leave `job` empty to begin a new one"
        )
    return found


def check_command(command: Sequence[str]) -> None:
    if not command or not command[0]:
        raise InvalidInput(
            "the job has no command: give a program and its arguments, each as an item of its own"
        )


def block_name(workspace: Workspace | str, otherwise: WorkspaceName) -> str:
    """The name of the Workspace block, by which another run finds it."""
    name = workspace if isinstance(workspace, str) else workspace._block_document_name
    return name or str(otherwise)


@step("start command", run_name="start attempt {request.attempt}", retries=ONCE)
def start_command(session: Agent, request: StartJob) -> JobState:
    """Start the command on the machine, unless this attempt was started before."""
    return session.call(request, request_id=_request(), within_s=START_S)


@step("stop command")
def stop_command(session: Agent, job: str) -> JobState:
    """End the command and what it left in the background."""
    return session.call(StopJob(job, GRACE_S), request_id=_request(), within_s=STOP_S)


def look_at_command(session: Agent, job: str, offset: int, most_bytes: int) -> JobLook:
    """How the command stands, and more of its log. No step: a job is looked at thousands of
    times."""
    wanted = LookAtJob(job, offset, most_bytes)
    return session.call(wanted, request_id=_request(), within_s=LOOK_S)


def check_no_job(opened: OpenWorkspace) -> None:
    """MachineInUse while a job runs on the workspace's machine, or is about to."""
    for job in opened.jobs.open():
        if job.driven or job.attempt is not None:
            raise MachineInUse(
                f"job {job.id} of workspace {opened.spec.name} is {job.state}: it hibernates the "
                "machine when it has ended. Stop it with cancel-job, which saves its work"
            )


def check_no_other_job(opened: OpenWorkspace, machine: Machine, job: str) -> None:
    """MachineInUse while another job than ``job`` works on the machine."""
    for other in opened.jobs.open():
        if other.id != job and other.attempt is not None and other.attempt.machine == machine.id:
            raise MachineInUse(f"job {other.id} works on machine {machine.id}: it was kept")


def cost_of(opened: OpenWorkspace, job: Job) -> str:
    """What the machines of a job have cost, in words."""
    names = {one.rental for one in job.attempts}
    if not names:
        return "no machine was rented"
    try:
        found = [*opened.rentals.open(), *opened.rentals.history(job.created_unix)]
    except TorporError as error:  # the job is over; its bill can be read later
        return f"not known: {error}"
    mine = [one for one in found if one.label.rental in names]
    each = costs(mine, time.time(), zone_named("UTC"))
    words = between(sum(one.low for one in each), sum(one.high for one in each))
    unknown = sum(not one.price_usd_h for one in mine)
    return f"{words}, with {unknown} machines of unknown price" if unknown else words


def _request() -> str:
    return f"{runner().run}:job:{secrets.token_hex(8)}"
