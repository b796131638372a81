"""Job: a command that runs to its end, whatever becomes of its machines."""

from __future__ import annotations

import time
from typing import Annotated, Final, Literal

from pydantic import Field

from blocks import Workspace
from flows.hibernate import hibernate_machine
from flows.procedures.fleet import MOST_MACHINES
from flows.procedures.job.driver import Driver, driving
from flows.procedures.run_key import run_key
from flows.wake import wake_workspace
from tasks.flow import flow
from tasks.guards import Guard, NothingBegan, NothingLost
from tasks.job_listing import failure_of
from tasks.jobs import (
    argv_of,
    block_name,
    check_environment,
    check_packages_of_nodes,
    cost_of,
    for_nodes,
    job_of_run,
    next_job_id,
    stop_command,
)
from tasks.machines import open_session
from tasks.ownership import check_owner
from tasks.run_table import shown
from tasks.runner import runner
from tasks.runs import CONTINUING
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.jobs.decide import EndJob, JobMachine, next_move
from torpor.control.jobs.records import Job
from torpor.control.jobs.report import JobReport
from torpor.control.safety import boot_clock_s
from torpor.shared.errors import EndUnproven, MachineInUse, TorporError, UnsavedWork
from torpor.shared.values import WantChange

_CONTINUE_S: Final = 300


@flow("job")
def job(
    workspace: Workspace | str,
    command: str | list[str] = "",
    env: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    secrets: list[str] = [],  # noqa: B006
    save: list[str] = [],  # noqa: B006
    save_minutes: Annotated[float, Field(gt=0, le=24 * 60)] = 30.0,
    spot: Literal["never", "allowed", "only"] = "never",
    retries: Annotated[int, Field(ge=0, le=100)] = 0,
    on_cancel: Literal["hibernate", "keep"] = "hibernate",
    keep_logs: bool = False,
    keep_saves: Annotated[int, Field(ge=1, le=1000)] = 3,
    nodes: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = 1,
    gpu: str = "",
    image: str = "",
    max_hours: Annotated[float, Field(ge=0, le=24 * 366)] = 0.0,
    max_usd: Annotated[float, Field(ge=0, le=1e6)] = 0.0,
    job: str = "",
) -> JobReport:
    """Run a command on the workspace's machine until it ends, then hibernate.

    The job wakes the workspace on the cheapest machine that fits, or uses the running one. It saves
    at intervals. When its machine is lost, it continues from the newest save on another one. Fails
    with JobFailed if the command fails; its work is stored all the same.

    Args:
        workspace: The Workspace block to work on, or its name.
        command: A line for `bash -lc`, or a list: the program and each argument as an item of its
            own, which no shell runs. It starts in the first directory of the workspace.
        env: Environment variables of the command, each as NAME=VALUE. They are stored in clear.
        secrets: Environment variables of the command that are secret, each as NAME=BLOCK: the name
            of the Secret block that holds the value, such as HF_TOKEN=hugging-face.
        save: A command that makes the program write its state, run before each save. May stay
            empty.
        save_minutes: Minutes between two saves. The first ones on a spot machine come sooner.
        spot: Whether to rent spot machines, which cost less and may be taken away at any time. This
            replaces the Workspace block's choice.
        retries: How often a command that fails is started again.
        on_cancel: What becomes of the machine when the job is cancelled.
        keep_logs: Whether the logs of earlier jobs stay in the workspace. Off: this job removes
            those that are in the last snapshots of their jobs.
        keep_saves: How many of the job's newest saves stay, its last snapshot among them. Those
            that you pin stay too, and do not count.
        nodes: On how many machines the command runs at the same time, all in one region of one
            market. Only the first one's work is stored.
        gpu: The GPUs to rent for it, in order of preference, as in the Workspace block. Empty:
            those of the block.
        image: The image of the machines that are rented for it. Empty: that of the block.
        max_hours: How long the command may run, in all attempts together. Then it is stopped, and
            its work stored. 0: no limit.
        max_usd: What its machines may cost. The command is stopped in time to store its work. 0:
            no limit but the budgets of the workspace.
        job: Without `command`: the id of a job to continue. With `command`: the id that the new job
            gets. `torpor run` gives it to the machine that it rents first, so that `watch` finds a
            machine whose job never began; a second run with this id is refused. Empty: begin a new
            job with an id of its own.

    Returns:
        The job's record in `job` (such as `job.state` and `job.newest`), its `cost`, and in
        `lost_s` the seconds of work that lost machines took with them.

    Raises:
        JobFailed: The command failed, its limits were spent, or it was preempted too often. The
            message names the snapshot with its work.
        InvalidInput: There is no command, a Secret block is missing, or the workspace cannot be
            used.
        WorkspaceBusy: Another run drives the job.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Train on spot machines for at most 20 dollars:
        ```python
        from flows import job

        report = job("mywork", ["python", "train.py", "--resume"], spot="allowed", max_usd=20)
        print(report.job.state, report.cost, report.lost_s)
        ```
    """
    opened = open_workspace(workspace)
    probe_store(opened)
    check_owner(opened)
    record = job_of_run(opened, job, begins=bool(command))
    if record is None:
        check_environment(env, secrets)
        check_packages_of_nodes(opened.spec, nodes)
        for_nodes(opened, nodes)  # InvalidInput before anything is recorded
        opened.wanting(WantChange(gpu=gpu))  # refused before anything is recorded
        record = Job(
            id=next_job_id(opened, job),
            workspace=opened.spec.name,
            block=block_name(workspace, opened.spec.name),
            command=argv_of(command),
            env=env,
            secrets=secrets,
            save=save,
            save_minutes=save_minutes,
            spot=spot,
            retries=retries,
            on_cancel=on_cancel,
            keep_logs=keep_logs,
            keep_saves=keep_saves,
            nodes=nodes,
            gpu=gpu.strip(),
            image=image.strip(),
            max_hours=max_hours,
            max_usd=max_usd,
            created_unix=time.time(),
            begun_by=runner().run,
        )
    record = drive(opened, record)
    report = JobReport(record, cost_of(opened, record))
    failure = failure_of(opened, record)
    if failure is not None:
        raise shown(report, failure)
    return report


def drive(opened: OpenWorkspace, record: Job, driven_for: str = "") -> Job:
    """Bring a job to its end, one move after the other. After an error any run may continue the
    job. WorkspaceBusy if another run drives it. ``driven_for``: the job of this run, where it is
    another one that waits for this."""
    if record.ended:
        return record
    with driving(opened, record, continue_job, driven_for) as driver:
        while not driver.job.ended:
            with driver.tried_again():
                seen = driver.look()
                move, on = next_move(driver.job, seen, driver.stop), seen.machine
                match move:
                    case EndJob():
                        driver.end(move)
                    case "wait for turn":
                        _wait_for_turn(driver)
                    case "look again":
                        driver.look_again_later()
                    case "clear":
                        driver.clear()
                    case "rent":
                        _rent(driver)
                    case "keep" if on:
                        driver.keep(on.machine)
                    case "revive" if on:
                        driver.revive(on)
                    case "run" if on:
                        driver.attend(on)
                    case "renew" | "hibernate" if on:
                        _hibernate(driver, on, ends=move == "hibernate")
                    case _:
                        raise AssertionError(f"{move} needs a machine")
    return driver.job


def continue_job(record: Job, key: str = "continue") -> str:
    """Start a run that continues a job which nobody drives; returns what runs now. Two runs that
    see the same job start only one: its key changes _CONTINUE_S seconds after the job was last
    driven and at each multiple of that, because a run needs a minute until the job's record names
    it as the driver."""
    silent_s = time.time() - record.driven_unix
    return runner().start(
        job,
        run_key(f"{key}-{record.id}-{record.version}", silent_s, _CONTINUE_S),
        queue=CONTINUING,
        workspace=record.block,
        job=record.id,
    )


def _wait_for_turn(driver: Driver) -> None:
    """Wait until it is this job's turn: jobs of one workspace run one after the other. If nobody
    drives the job whose turn it is, this run drives it."""
    first = driver.wait_for_turn()
    if first is not None:
        with driver.driving_for(first):
            drive(open_workspace(first.block), first, driven_for=driver.job.id)


def _rent(driver: Driver) -> None:
    """Wake the newest save on a new machine, or wait where no machine is on sale."""
    opened = driver.renting()
    if opened is None:
        return
    try:
        with driver.beside_others(opened) as (there, snapshot):
            report = wake_workspace(there, snapshot)
    except TorporError as error:
        driver.wait_after(error)
    else:
        driver.rented(report)


def _hibernate(driver: Driver, on: JobMachine, *, ends: bool) -> None:
    """Hibernate with proof, and end the job; without ``ends``, the next attempt begins with all
    nodes from what was stored. The machine is kept for another job, for the user who asked to keep
    it, for data beside the workspace, and for a command or a server that was started there."""
    driver.begin_to_hibernate(on)
    began_s = boot_clock_s()
    try:
        probe_store(driver.opened)
        with open_session(driver.opened, on.machine) as session:
            if not ends:  # its market may have said wrongly that the machine did not run
                stop_command(session, driver.job.id)
            begun = NothingBegan(driver.opened, session, began_s)
            guards: list[Guard] = [driver.end_of_job, NothingLost(driver.job.block), begun]
            hibernate_machine(driver.opened, session, on.machine, guards)
    except (MachineInUse, EndUnproven, UnsavedWork) as error:
        goes_on = driver.is_over_despite(error) if ends else driver.renewed_despite(error)
        if not goes_on:
            return
    if ends:
        driver.end()
