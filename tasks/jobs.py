"""The steps of a job: its machine, and its command there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Final

import msgspec

from blocks import Workspace
from blocks.secret_variables import load_secrets
from tasks.machines import find_machines
from tasks.programs import THAW_S
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.jobs.records import Job, job_id, new_job_id
from torpor.control.jobs.report import JobCost
from torpor.control.money.budgets import between
from torpor.control.money.costs import Cost, charge, costs, dollars, read, until
from torpor.control.remote.agent import Agent, Session
from torpor.control.rental.records import Rental
from torpor.control.reports import without
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.records import Unread
from torpor.control.time_zones import zone_named
from torpor.control.variables import Secrets, variables
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineInUse,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import (
    NODES,
    Machine,
    MachineId,
    WorkspaceName,
    WorkspaceSpec,
    reserved_name,
)
from torpor.shared.wire.activity import Activity, ReadActivity
from torpor.shared.wire.job import JobLook, JobState, LookAtJob, StartJob, StopJob

GRACE_S = 30.0
"""Seconds that a command has to end by itself after SIGTERM."""
ANSWER_S = 300.0
"""Seconds for one look at a command, within which a new agent may have to be installed."""
START_S = 300.0
MOST_OLD_LOGS = 20
STOP_S = GRACE_S + 150.0
"""Seconds after which an agent that has not answered a stop hangs, on a disk or for want of memory.
The agent's own limits for the steps of a stop add up to this."""
# A fixed address. Nothing is sent to it: the system only chooses the interface. Without a network,
# the answer is the host's own address.
_ADDRESS: Final = """
import socket
for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as line:
            line.connect((far, 9))
            print(line.getsockname()[0])
            break
    except OSError:
        pass
else:
    print("127.0.0.1")
"""


def machine_in_use(
    opened: OpenWorkspace,
    wanted: MachineId | None,
    fits: Callable[[Machine, Rental], bool] = lambda machine, rental: True,
) -> tuple[Machine, Rental] | None:
    """The workspace's machine that was handed over: the ``wanted`` one, or the only other one that
    ``fits``. A machine that is being ended counts only if it is the ``wanted`` one, because a job
    ran on it. None if there is no machine; InvalidInput if there are several, or none and may be
    one that no provider block reaches."""
    shown = find_machines(opened)
    over = [
        (machine, rental)
        for machine, rental in shown.machines
        if rental is not None
        and rental.state == "handed over"
        and (machine.id == wanted or not rental.is_ending(machine))
    ]
    if not over:
        opened.markets.check_reached(shown.rentals)
    of = [one for one in over if one[0].id == wanted] or [one for one in over if fits(*one)]
    if len(of) > 1:
        raise InvalidInput(
            f"workspace {opened.spec.name} is on {len(of)} machines: "
            f"{', '.join(machine.id for machine, _ in of)}. A job runs on one: end each other one "
            f"with `torpor hibernate {opened.spec.name} --machine ID` first"
        )
    return of[0] if of else None


def job_of_run(opened: OpenWorkspace, wanted: str, *, begins: bool) -> Job | None:
    """The job with that id. Without an id, the last job that this run has begun: Prefect may start
    a run again. None if that has ended without success: a retry begins another job. A run that
    ``begins`` the job of that id, for which a machine was rented, is answered in the same way.
    InvalidInput where that is a job of another run, of which this one is a copy."""
    found = opened.jobs.of(job_id(wanted.strip())) if wanted else None
    if begins or not wanted:
        begun = opened.jobs.started_by(runner().run)
        if found is not None and not begun:
            _check_begun_here(found)
            begun = [found]
        return begun[-1] if begun and not begun[-1].unsuccessful else None
    if found is None:
        raise InvalidInput(
            f"workspace {opened.spec.name} has no job {wanted} in {opened.store.address}: "
            f"`torpor job list {opened.spec.name}` shows its jobs; with `job` empty, another one "
            "begins"
        )
    return found


def _check_begun_here(job: Job) -> None:
    """Raise InvalidInput for a job that another run began: its command may be another one. An open
    job whose record names no run passes."""
    by = job.begun_by or (job.driver if job.ended else runner().run)
    if by != runner().run:
        raise InvalidInput(
            f"job {job.id} of workspace {job.workspace} was begun by flow run {by} and is "
            f"{job.state}: this run begins no job of that id. Start it with `job` empty: then it "
            "begins a job of its own"
        )


def next_job_id(opened: OpenWorkspace, wanted: str = "") -> str:
    """The id of the job that this run is to begin: the ``wanted`` one, unless a job has it or the
    run has begun one."""
    run = runner().run
    begun = len(opened.jobs.started_by(run))
    if wanted and not begun and opened.jobs.of(job_id(wanted.strip())) is None:
        return wanted.strip()
    return new_job_id(run, begun)


def argv_of(command: str | Sequence[str]) -> list[str]:
    """The program and its arguments: a line is run by a login shell. InvalidInput for none."""
    argv = ["bash", "-lc", command] if isinstance(command, str) and command.strip() else command
    if not argv or not argv[0]:
        raise InvalidInput(
            "the job has no command: give a line for bash, or a program and its arguments, each as "
            "an item of its own"
        )
    return list(argv)


def check_environment(env: Sequence[str], secrets: Sequence[str]) -> None:
    """InvalidInput for variables that no command can have, and for a Secret block that is missing.
    Called before anything is rented."""
    both = variables(env).keys() & load_secrets(secrets, of="this job").keys()
    if both:
        raise InvalidInput(f"{', '.join(sorted(both))} is among both `env` and `secrets`")


def secrets_of(job: Job) -> Secrets:
    """The values of the job's secrets; InvalidInput where a block is missing."""
    return Secrets(load_secrets(job.secrets, of=f"job {job.id}"))


def secrets_to_hide(job: Job) -> Secrets:
    """The values of the job's secrets, to mask them in its log. A Secret block that was deleted
    since is left out."""
    try:
        return secrets_of(job)
    except InvalidInput as error:
        runner().log.warning("secrets are not hidden in the log of job %s: %s", job.id, error)
        return Secrets()


def stored_logs(opened: StoredWorkspace) -> list[str]:
    """The jobs that ended last, of those whose whole log is in a snapshot in the store."""
    there = snapshot_ids(opened.store, opened.spec.name)
    return [job.id for job in opened.jobs.ended(MOST_OLD_LOGS) if job.final in there]


def block_name(workspace: Workspace | str, otherwise: WorkspaceName) -> str:
    """The name of the Workspace block, by which another run finds it."""
    name = workspace if isinstance(workspace, str) else workspace._block_document_name
    return name or str(otherwise)


def nodes_of(opened: OpenWorkspace) -> OpenWorkspace:
    """The opened workspace under the reserved name of its jobs' other nodes."""
    return opened.under(reserved_name(NODES, opened.spec.name))


def for_nodes(opened: OpenWorkspace, nodes: int) -> OpenWorkspace:
    """The opened workspace with only those markets that have machines for a job on so many nodes.
    InvalidInput where no market has machines that reach each other. Called before anything is
    rented."""
    if nodes == 1:
        return opened
    able = tuple(one for one in opened.providers if one.abilities.private_network)
    if not able:
        at = ", ".join(provider.identity for provider in opened.providers)
        raise InvalidInput(
            f"a job on {nodes} nodes needs machines that reach each other, and those of {at} do "
            "not: add a provider whose machines do (docs/providers.md), or use one node"
        )
    return replace(opened, providers=able)


def check_packages_of_nodes(spec: WorkspaceSpec, nodes: int) -> None:
    """InvalidInput where only the first of several nodes would get its packages back."""
    if nodes > 1 and spec.environment == "keep":
        raise InvalidInput(
            f"workspace {spec.name} has `environment` keep, and a wake puts packages back on the "
            "first node of a job alone: use one node, or install what the command needs in "
            f"`setup` of torpor.yaml and run `torpor edit {spec.name} environment=image`"
        )


@step("ask for address", retries=ONCE)
def address_of(session: Session) -> str:
    """The address of the machine's own network interface."""
    done = session.run_script(_ADDRESS)
    try:
        return str(ip_address(done.stdout.decode(errors="replace").strip()))
    except ValueError:
        raise MachineError(
            f"a machine does not say its address: {done.stderr.decode(errors='replace')[-500:]}"
        ) from None


@step("start command", run_name="start attempt {request.attempt}", retries=ONCE)
def start_command(session: Agent, request: StartJob) -> JobState:
    """Start the command on the machine, or continue it where it was frozen, unless this attempt was
    started before."""
    within_s = THAW_S if request.frozen else START_S
    return session.call(request, request_id=_request(), within_s=within_s)


def end_command(session: Agent, job: str) -> JobState:
    """End the command and what it left in the background."""
    return session.call(StopJob(job, GRACE_S), request_id=_request(), within_s=STOP_S)


stop_command = step("stop command")(end_command)


def look_at_command(session: Agent, job: str, offset: int, most_bytes: int) -> JobLook:
    """The state of the command, and more of its log. Not a step, because a job is looked at
    thousands of times."""
    wanted = LookAtJob(job, offset, most_bytes)
    look = session.call(wanted, request_id=_request(), within_s=ANSWER_S)
    return msgspec.structs.replace(look, text=without_nuls(look.text))


def read_activity(session: Agent, seconds: float) -> Activity:
    """What the machine's sampler saw in the last ``seconds``."""
    return session.call(ReadActivity(seconds), request_id=_request(), within_s=ANSWER_S)


def without_nuls(text: str) -> str:
    """The text without NUL characters, which Prefect's database refuses."""
    return text.replace("\0", "")


def check_no_job(opened: OpenWorkspace, machine: MachineId | None = None) -> None:
    """MachineInUse while a job runs on the workspace's machine, or is about to. With ``machine``,
    jobs on other machines do not count."""
    if (job := job_at(opened, machine)) is not None:
        raise MachineInUse(
            f"job {job.id} of workspace {opened.spec.name} is {job.state}: it hibernates the "
            f"machine when it has ended. `torpor job cancel {job.id}` ends it now and saves its "
            "work"
        )


def job_at(
    opened: OpenWorkspace, machine: MachineId | None = None, *, queued: bool = False
) -> Job | None:
    """A job that runs on the workspace's machine, or is about to. With ``machine``, jobs on other
    machines do not count. ``queued``: a job that no run drives yet counts, too: it may begin on any
    machine."""
    for job in opened.jobs.open():
        if not (queued or job.driven or job.attempt):
            continue
        if machine is None or job.attempt is None:
            return job
        if machine in {job.attempt.machine, *(node.machine for node in job.others)}:
            return job
    return None


def check_no_other_job(opened: OpenWorkspace, machine: Machine, job: str) -> None:
    """MachineInUse while another job than ``job`` works on the machine."""
    for other in opened.jobs.open():
        if other.id != job and other.attempt is not None and other.attempt.machine == machine.id:
            raise MachineInUse(f"job {other.id} works on machine {machine.id}: it was kept")


@step("see that no frozen command is to go on")
def check_not_frozen(opened: OpenWorkspace, machine: Machine) -> None:
    """Raise WorkspaceBusy while the frozen command of a job is to go on on the machine: a snapshot
    would remove the images, and the files would differ from those that the command was frozen
    with."""
    rental = None if machine.label is None else opened.rentals.of(machine.label)
    for job in opened.jobs.open():
        ours = job.rented == machine.id or (rental is not None and rental.job == job.id)
        if job.frozen is not None and ours:
            raise WorkspaceBusy(
                f"the command of job {job.id} was frozen, and goes on on machine {machine.id} "
                "soon: try again once it runs"
            )


def rentals_of(opened: OpenWorkspace, job: Job, unread: Unread | None = None) -> list[Rental]:
    """The machines that were rented for the job, and those of others from the job's first attempt
    on them to its end. ``unread``: as in Records.read_each."""
    began = {one.rental: one.began_unix for one in reversed(job.attempts)}
    ledgers = [opened.rentals] + [nodes_of(opened).rentals] * (job.nodes > 1)
    mine: list[Rental] = []
    for one in read(ledgers, job.created_unix, unread):
        if one.job != job.id and one.label.rental in began:
            since = max(one.created_unix, began[one.label.rental])
            mine.append(msgspec.structs.replace(one, created_unix=since, queued_unix=None))
        elif one.job == job.id:
            mine.append(one)
    return [until(one, job.ended_unix) for one in mine]


def cost_of(opened: OpenWorkspace, job: Job) -> JobCost:
    """What the machines of a job have cost; with the reason where that is not known."""
    unread = Unread()
    try:
        mine = rentals_of(opened, job, unread)
    except TorporError as error:  # the job is over, and its bill can be read later
        return JobCost(f"not known: {error}")
    if not mine and not unread:
        return JobCost("no machine was rented")
    now_unix = job.ended_unix or time.time()
    each = costs(mine, now_unix, zone_named("UTC"))
    high = sum(one.high for one in each)
    words = between(sum(one.low for one in each), high)
    unknown = sum(not one.price_usd_h for one in mine)
    machines = "1 machine" if unknown == 1 else f"{unknown} machines"
    words += f", with {machines} of unknown price" if unknown else ""
    words += without(unread) + "".join(f"; {why}" for why in unread.values())
    return JobCost(words, None if unread else float(dollars(high)), _saved(mine, each))


def _saved(mine: Sequence[Rental], each: Sequence[Cost]) -> str:
    """How much less the job's spot machines cost than the same machines on demand; empty without
    spot machines."""
    spot = [one for one in mine if one.spot]
    if not spot:
        return ""
    if not all(one.on_demand_usd_h and one.price_usd_h for one in spot):
        return "not known: a market does not state its price on demand"
    counted = [one for one in each if one.rental.spot]
    paid = sum(one.high for one in counted)
    whole = sum(charge(one.rental.on_demand_usd_h, one.high_us) for one in counted)
    share = 100 * (whole - paid) / whole if whole else 0.0
    return (
        f"{float(dollars(whole - paid)):.2f} $ of {float(dollars(whole)):.2f} $ ({share:.0f} %), "
        "for the same hours on demand"
    )


def machines_of(opened: OpenWorkspace, job: Job) -> str:
    """The machines that the job has now, in words, including one that is being woken."""
    names, unread = {attempt.rental for attempt in job.attempts}, Unread()
    nodes = nodes_of(opened).rentals.open(unread) if job.nodes > 1 else []
    found = [
        f"{rental.machine or 'one that is being rented'} at {rental.provider}, {rental.state}"
        for rental in (*opened.rentals.open(unread), *nodes)
        if rental.job == job.id or rental.label.rental in names
    ]
    return "; ".join([*found, *map(str, unread.values())])


def _request() -> str:
    return f"{runner().run}:job:{secrets.token_hex(8)}"
