"""Commands about jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal

from cyclopts import App, CoercionError, Group, Parameter, Token, convert
from cyclopts.validators import Number

from deployments.terminal import say
from torpor.shared.errors import InvalidInput, NoOffer
from torpor.shared.values import WantChange
from torpor_cli.flow_runs import Options, run
from torpor_cli.output import shown_progress
from torpor_cli.question import ask_to_rent, confirm
from torpor_cli.server import connected

JOBS: Final = Group("Jobs", sort_key=3)
job = App(name="job", help="Run commands on a workspace's machine until they end.", group=JOBS)
Flag = Annotated[bool, Parameter(negative=())]
Several = Annotated[list[str] | None, Parameter(negative=())]


def _time(type_: Any, tokens: Sequence[Token]) -> Any:
    """The hours that a text such as 90m means; a number without a unit is hours."""
    (token,) = tokens
    with suppress(ValueError, OverflowError):
        return timedelta(hours=float(token.value))
    try:
        return convert(type_, tokens)
    except CoercionError:
        raise ValueError(f"{token.value!r} is no time: write 5, 2h or 90m.") from None


Hours = Annotated[timedelta | None, Parameter(converter=_time)]
MOST_USD: Final = 1e6


@job.command(name="run")
def run_(
    workspace: str,
    *command: str,
    env: Several = None,
    secret: Several = None,
    spot: Literal["never", "allowed", "only"] = "never",
    save_minutes: float = 30.0,
    save: str = "",
    retries: int = 0,
    on_cancel: Literal["hibernate", "keep"] = "hibernate",
    keep_logs: Flag = False,
    keep_saves: int = 3,
    nodes: int = 1,
    gpu: str = "",
    image: str = "",
    max_hours: Hours = None,
    max_usd: float | None = None,
    queue: Literal["critical", "high", "normal", "low"] = "normal",
    yes: Flag = False,
    options: Options | None = None,
) -> None:
    """Run a command, save at intervals, continue on another machine if one is lost, and hibernate.

    torpor job run mywork --spot allowed -- python train.py

    It uses the machine that the workspace is on, after a question, or rents one after a question
    that names the price. What the command prints goes to standard output; the rest to standard
    error.

    Args:
        workspace: The workspace.
        command: The program and its arguments, after `--`.
        env: A variable of the command, as NAME=VALUE. May be repeated.
        secret: A variable whose value is in a Secret block, as NAME=BLOCK. May be repeated.
        spot: Whether to rent spot machines, whatever the workspace says.
        save_minutes: Minutes between two saves.
        save: A line for bash that makes the program write its state, run before each save.
        retries: How often the command may fail and begin again.
        on_cancel: What becomes of the machine when the job is cancelled.
        keep_logs: Keep the logs of earlier jobs in the workspace.
        keep_saves: How many of its newest saves stay.
        nodes: On how many machines the command runs at the same time.
        gpu: The GPUs to rent, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+.
        image: The image of the machines to rent.
        max_hours: How long the command may run, such as 5, 2h or 90m, in all attempts together.
        max_usd: What the job may cost, in USD. It ends in time to store its work.
        queue: The queue that a detached job waits in.
        yes: Do not ask.
    """
    hours, usd = limits(max_hours, max_usd)
    if not yes:
        change = WantChange(gpu, [], spot, image)
        _ask(workspace, nodes, usd, change, wide=options is not None and options.wide)
    run(
        "job",
        options,
        queue=queue,
        detached=partial(detached_job, workspace=workspace),
        beside_output=True,
        workspace=workspace,
        command=list(command),
        env=env or [],
        secrets=secret or [],
        save=["bash", "-lc", save] if save.strip() else [],
        save_minutes=save_minutes,
        spot=spot,
        retries=retries,
        on_cancel=on_cancel,
        keep_logs=keep_logs,
        keep_saves=keep_saves,
        nodes=nodes,
        gpu=gpu,
        image=image,
        max_hours=hours,
        max_usd=usd,
    )


def limits(max_hours: timedelta | None, max_usd: float | None) -> tuple[float, float]:
    """The limits in hours and in dollars; 0 for no limit."""
    hours = 0.0 if max_hours is None else max_hours.total_seconds() / 3600
    usd = max_usd or 0.0
    if max_hours is not None and hours <= 0:
        raise InvalidInput("--max-hours must be more than 0: write it as 5, 2h or 90m")
    if max_usd is not None and not 0 < usd <= MOST_USD:
        raise InvalidInput(
            f"--max-usd is {max_usd:g}: give dollars, more than 0 and at most {MOST_USD:,.0f}"
        )
    return hours, usd


def _ask(workspace: str, nodes: int, usd: float, change: WantChange, *, wide: bool) -> None:
    """Ask before a job that needs a machine of its own, or ends the one that is there."""
    with connected():
        from flows.procedures.listing import needs_machine

        if not needs_machine(workspace):
            say_awake(workspace, change)
            ask_on_awake(workspace)
            return
        try:
            ask_to_rent(
                workspace,
                "newest",
                nodes,
                starts=False,
                change=change,
                again=True,
                wide=wide,
                max_usd=usd,
                together=True,
            )
        except NoOffer as error:
            raise NoOffer(
                f"{error}. With --yes the job begins all the same, and waits until an offer fits"
            ) from None


def say_awake(workspace: str, change: WantChange) -> None:
    """Say what a job does with a machine that is there."""
    chosen = {"--gpu": change.gpu, "--image": change.image}
    chosen["--spot"] = "" if change.spot == "never" else change.spot
    named = [option for option, given in chosen.items() if given]
    other = f" by {' and '.join(named)}" if named else ""
    say(
        f"torpor: the job runs on the machine that workspace {workspace} is on, and hibernates it "
        "when the command has ended: all that runs there ends then, such as kernels and tmux. "
        f"Where the machine is lost, the job rents another one{other}, for at most max_price_usd_h "
        "of the workspace, where it has that",
        sys.stderr,
    )


def ask_on_awake(workspace: str, given: str = "") -> None:
    """Ask before a job starts on the machine that is awake. ``given``: what else a yes gives the
    job."""
    confirm(
        f"Run the job on the machine of {workspace}, and hibernate that afterwards{given}?",
        "no job was begun",
    )


@job.command(name="list")
def list_(*workspace: str, ended: int = 20, options: Options | None = None) -> None:
    """List jobs: those that run, those that wait, and those that ended last.

    Args:
        workspace: Only the jobs of these workspaces.
        ended: How many ended jobs of each workspace to list.
    """
    with connected():
        from blocks import Workspace
        from blocks.reference import saved_names

        for name in {*workspace} - {*saved_names(Workspace)}:
            Workspace.of(name)  # a wrong name is an error here, a damaged block becomes a row
    run("jobs", options, workspaces=list(workspace), ended=ended)


@job.command
def status(workspace: str, job: str = "", *, options: Options | None = None) -> None:
    """Show everything about one job.

    Args:
        workspace: The workspace, or the job's id alone.
        job: The job's id, after the workspace.
    """
    workspace, job = _named(workspace, job)
    run("job_status", options, workspace=workspace, job=job, lines=0)


@job.command
def log(
    workspace: str,
    job: str = "",
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative=())] = False,
    tail: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
) -> None:
    """Print what a job's command prints: from its machine while that runs, else from the store.

    Args:
        workspace: The workspace, or the job's id alone.
        job: The job's id, after the workspace.
        follow: Go on until the job has ended.
        tail: Only the last so many lines of what is there.
    """
    workspace, job = _named(workspace, job)
    with connected(), shown_progress() as follower:
        from tasks.job_listing import found_job, wait_for_record
        from tasks.job_log import JobLogReader
        from tasks.workspace_blocks import open_workspace

        opened = open_workspace(workspace)
        record = wait_for_record(opened, workspace, job) if follow else None
        record = record or found_job(opened, workspace, job)[0]
        if record is None:
            raise InvalidInput(
                f"job {job} has not begun: it waits for its turn, and has no log yet. "
                f"`torpor job log {job} -f` waits for it"
            )
        reader = JobLogReader(opened, record)
        for text in reader.follow(tail) if follow else reader.read(tail):
            follower.prints(text)
            follower.flush()
            if follower.read_enough:
                break


@job.command
def approve(
    workspace: str,
    job: str = "",
    *,
    max_hours: Hours = None,
    max_usd: float | None = None,
    past_budgets: Flag = False,
    yes: Flag = False,
) -> None:
    """Let a job that runs use more than it was submitted with, after a question.

    Args:
        workspace: The workspace, or the job's id alone.
        job: The job's id, after the workspace.
        max_hours: How long its command may run, in all attempts together.
        max_usd: What the job may cost in all, in USD.
        past_budgets: Let it go on, and rent again, where the budgets of its workspace are spent: up
            to its own limit in USD, which it must have.
        yes: Do not ask.
    """
    workspace, job = _named(workspace, job)
    hours, usd = limits(max_hours, max_usd)
    if not (hours or usd or past_budgets):
        raise InvalidInput("name what the job may use: --max-hours, --max-usd or --past-budgets")
    with connected():
        from msgspec import structs

        from tasks.job_limits import approve as let
        from tasks.job_listing import found_job
        from tasks.jobs import cost_of
        from tasks.workspace_blocks import open_workspace
        from torpor.control.jobs.records import Approval
        from torpor.control.jobs.report import allowed

        approval = Approval(
            max_hours=hours, max_usd=usd, past_budgets=past_budgets, approved_unix=time.time()
        )
        opened = open_workspace(workspace)
        record, _ = found_job(opened, workspace, job)
        if record is None:
            raise InvalidInput(
                f"job {job} has not begun: cancel it, and submit it again with other limits"
            )
        asked = (
            f"Job {job} may use {allowed(record)}, and has cost {cost_of(opened, record)}. Let it "
            f"use {allowed(structs.replace(record, **approval.changes(record)))}?"
        )
        if not yes:
            confirm(asked, f"job {job} may use what it might before")
        say(f"job {job} may use {allowed(let(opened, record, approval))}")


@job.command
def cancel(
    workspace: str,
    job: str = "",
    *,
    machine: Literal["as submitted", "hibernate", "keep"] = "as submitted",
    options: Options | None = None,
) -> None:
    """End a job's command, store the workspace, and destroy the machine or keep it.

    Args:
        workspace: The workspace, or the job's id alone.
        job: The job's id, after the workspace.
        machine: What becomes of the machine.
    """
    workspace, job = _named(workspace, job)
    run("cancel_job", options, workspace=workspace, job=job, machine=machine)


def _named(workspace: str, job: str) -> tuple[str, str]:
    """The workspace and the job that a person means, who may have named the job alone."""
    if job:
        return workspace, job
    with connected():
        from tasks.job_listing import workspace_of

        return workspace_of(workspace), workspace


def detached_job(run: str, workspace: str, job: str = "") -> dict[str, str]:
    """The message about a job that the worker runs: its id, and the next commands. ``job``: the id
    that the job was given; empty where its run makes one."""
    from torpor.control.jobs.listing import commands_for
    from torpor.control.jobs.records import new_job_id

    job = job or new_job_id(run)
    return {"job": job, **commands_for(job, workspace)}
