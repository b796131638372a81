"""Jobs on several machines. Their commands are real; all but one test have their machines in
memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from flows import job
from flows.procedures.job import driver
from flows.procedures.job.attempt import Attending
from flows.procedures.job.nodes import bring_nodes, end_nodes
from tasks.jobs import cost_of, nodes_of
from tasks.machines import renting
from tasks.overview import overview
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB, attempt_on, hurried, left_job
from tests.fixtures.ground import Ground
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.nodes import is_over, other_nodes, sleeping_with
from tests.fixtures.plain_flows import wake_plainly
from tests.fixtures.records import put_record
from tests.fixtures.rentals import handed_over
from tests.fixtures.supervised import end_all_of
from tests.fixtures.waiting import background, until
from tests.fixtures.world import World, kill
from tests.jobs import two_nodes
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.policy import losses
from torpor.control.jobs.records import Job, Node, Stop
from torpor.control.jobs.report import JobReport
from torpor.control.ports import free_ports
from torpor.control.providers.gpus import GpuModel
from torpor.control.rental import ending
from torpor.machine.supervisor.folder import all_kept
from torpor.shared.errors import HandedOver, InvalidInput, JobFailed, NoCapacity, TorporError
from torpor.shared.values import MachineId, Want, object_key
from torpor.shared.wire.job import JobLook, JobState, LookAtJob

pytestmark = pytest.mark.usefixtures("needs_server")

_STEPS = 20
PROGRAM = Path(two_nodes.__file__)
_SHOWS = "env | grep ^TORPOR_NODE | sort; env | grep ^TORPOR_MASTER"


@pytest.fixture
def nodes(lab: Lab) -> Iterator[Lab]:
    """The workspace sleeps, with the training program."""
    sleeping_with(lab, PROGRAM)
    lab.market.orders.clear()
    with hurried():
        yield lab
    end_all_of(lab.folder)


def _training(step_s: float = 0.0, go: Path | None = None) -> list[str]:
    """``go``: the file for which it waits halfway: a test that is held up meets it there."""
    (port,) = free_ports(1)
    return ["python3", "two_nodes.py", str(_STEPS), str(step_s), str(port), str(go or "")]


def _run(ground: Ground, command: list[str], count: int = 2, **options: Any) -> JobReport:
    with PlainRunner(ground.opened, wait_factor=0.1):
        report: JobReport = job.fn(DEMO, command, nodes=count, **options)
    return report


def _running(
    ground: Ground, command: list[str], **options: Any
) -> AbstractContextManager[Callable[[], JobReport]]:
    return background(lambda: _run(ground, command, **options))


def _open(ground: Ground) -> Job:
    """The job, once its command was started."""
    return until(
        lambda: next((one for one in ground.opened.jobs.open() if one.attempt is not None), None),
        "the command was started",
    )


def _goes_on(ground: Ground, go: Path) -> None:
    """The second attempt has begun, and may end."""
    until(lambda: len(_open(ground).attempts) == 2, "the next attempt has begun")
    go.touch()


def _step(ground: Ground) -> int:
    own = [one for one in ground.machines() if one.label and one.label.workspace == DEMO]
    try:
        return int(json.loads((ground.workspace(own[0].id) / "state.json").read_text())["n"])
    except (OSError, ValueError, LookupError):  # it is being made
        return 0


def _result(ground: Ground) -> Any:
    machine = wake_plainly(ground.opened).machine
    return json.loads((ground.workspace(MachineId(machine)) / "state.json").read_text())


def test_the_nodes_find_each_other_and_only_the_firsts_work_is_stored(nodes: Lab) -> None:
    report = _run(nodes, _training())
    assert report.job.state == "succeeded"
    assert len(report.job.attempts) == 1 and len(nodes.market.orders) == 2
    is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 2)


def test_a_lost_node_ends_the_attempt_and_the_next_one_has_all_again(
    nodes: Lab, tmp_path: Path
) -> None:
    with _running(nodes, _training(0.1, tmp_path / "go")) as ended:
        until(lambda: _step(nodes) > 4, "they work")
        (lost,) = other_nodes(nodes)
        del nodes.market.alive[lost.id]
        nodes.market.sweep()
        _goes_on(nodes, tmp_path / "go")
        report = ended()
    assert report.job.state == "succeeded"
    first, second = report.job.attempts
    assert (first.end, second.end) == ("machine lost", "command ended")
    assert "node 1" in first.error
    assert first.saved and losses([first]) == 0  # what it wrote was stored after its end
    assert first.machine != second.machine and len(nodes.market.orders) == 4
    is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 2)


def test_a_lost_supervisor_of_a_node_is_no_lost_machine(nodes: Lab, tmp_path: Path) -> None:
    """Else a command that uses up the memory of a node would be started a thousand times, because
    what the first node holds is stored each time."""
    with _running(nodes, _training(0.1, tmp_path / "go")) as ended:
        until(lambda: _step(nodes) > 4, "they work")
        (other,) = other_nodes(nodes)
        ((_, kept),) = all_kept(nodes.home(other.id) / ".torpor")
        assert kill([kept.supervisor.pid])
        _goes_on(nodes, tmp_path / "go")
        first, second = ended().job.attempts
    assert (first.end, second.end) == ("supervisor lost", "command ended")
    assert losses([first]) == 1


def test_each_node_knows_its_rank_and_the_addresses_of_all(
    nodes: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (port,) = free_ports(1)
    command = f"env | grep ^TORPOR_ | sort; exec python3 two_nodes.py 1 0 {port}"
    job_ = _run(nodes, ["bash", "-c", command], 3).job
    place = nodes.workspace(MachineId(wake_plainly(nodes.opened).machine))
    log = (place / f".torpor-jobs/{job_.id}.log").read_text()
    told = dict(line.split("=") for line in log.splitlines() if line.startswith("TORPOR_"))
    addresses = told["TORPOR_NODE_IPS"].split(",")
    assert (told["TORPOR_NODES"], told["TORPOR_NODE_RANK"]) == ("3", "0")
    assert len(addresses) == 3 and told["TORPOR_MASTER"] == addresses[0]
    shown = [record.getMessage() for record in caplog.records]
    for rank in (1, 2):
        assert f"node {rank}: TORPOR_NODE_RANK={rank}" in shown
        assert f"node {rank}: node {rank} has joined" in shown


@pytest.mark.parametrize("failing", [2, 3], ids=["a machine of three others", "the workspace's"])
def test_where_one_of_four_machines_fails_to_start_none_is_left_and_the_job_waits(
    nodes: Lab, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    nodes.market.faults = [*[None] * failing, NoCapacity("sold out")]
    waited = []

    def wait(self: driver.Driver, error: TorporError) -> None:
        waited.append(str(error))
        assert nodes.machines() == []
        wait_after(self, error)

    wait_after = driver.Driver.wait_after
    monkeypatch.setattr(driver.Driver, "wait_after", wait)
    report = _run(nodes, _training(), 4)
    assert report.job.state == "succeeded" and len(report.job.attempts) == 1
    assert len(waited) == 1 and "sold out" in waited[0]
    is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 4)


def test_another_region_is_tried_where_the_first_has_too_few(nodes: Lab) -> None:
    (offer,) = nodes.market.on_sale
    other = msgspec.structs.replace(offer, id="2", region="EU", domain="2", price_usd_h=5.0)
    nodes.market.on_sale = [offer, other]
    nodes.market.faults = [None, NoCapacity("sold out")]
    report = _run(nodes, _training(), 3)
    assert report.job.state == "succeeded"
    regions = [order.offer.region for order in nodes.market.orders]
    assert regions == ["US", "US", "EU", "EU", "EU"]
    is_over(nodes)


def test_markets_whose_machines_do_not_reach_each_other_are_refused_first(nodes: Lab) -> None:
    nodes.market.abilities = msgspec.structs.replace(nodes.market.abilities, private_network=False)
    with pytest.raises(InvalidInput, match="2 nodes needs machines that reach each other"):
        _run(nodes, ["true"])
    assert nodes.market.orders == [] and nodes.opened.jobs.open() == []


def test_packages_that_come_back_on_the_first_node_alone_are_refused_first(nodes: Lab) -> None:
    spec = msgspec.structs.replace(nodes.opened.spec, environment="keep")
    with pytest.raises(InvalidInput, match=r"the first node of a job alone.*environment=image"):
        _run(replace(nodes, opened=replace(nodes.opened, spec=spec)), ["true"])
    assert nodes.market.orders == [] and nodes.opened.jobs.open() == []


def test_a_workspace_that_is_awake_is_refused_and_stays(nodes: Lab) -> None:
    machine = wake_plainly(nodes.opened).machine
    with pytest.raises(JobFailed, match=f"is on machine {machine}.*hibernate the workspace"):
        _run(nodes, ["true"])
    assert [one.id for one in nodes.machines()] == [machine]


def test_a_node_whose_command_fails_ends_the_job(nodes: Lab) -> None:
    command = "if test $TORPOR_NODE_RANK = 1; then exit 3; fi; exec sleep 600"
    with pytest.raises(JobFailed, match="on node 1, the command ended with status 3"):
        _run(nodes, ["bash", "-c", command])
    is_over(nodes)


def test_a_retry_begins_with_all_nodes_again(nodes: Lab) -> None:
    command = "test $TORPOR_NODE_RANK != 0 || test -e again || { touch again; exit 3; }"
    job_ = _run(nodes, ["bash", "-c", command], retries=1).job
    first, second = job_.attempts
    assert (first.status, second.status, job_.state) == (3, 0, "succeeded")
    assert len(nodes.market.orders) == 4
    is_over(nodes)


@pytest.mark.parametrize("then", ["hibernate", "keep"])
def test_a_job_that_is_stopped_leaves_no_other_node(
    nodes: Lab, then: Literal["hibernate", "keep"], tmp_path: Path
) -> None:
    with _running(nodes, _training(0.1, tmp_path / "never")) as ended:
        until(lambda: _step(nodes) > 2, "they work")
        job_ = _open(nodes)
        nodes.opened.jobs.ask_stop(job_.id, Stop("cancelled", then, "enough", time.time()))
        job_ = ended().job
    assert (job_.state, job_.why) == ("cancelled", "enough")
    if then == "hibernate":
        is_over(nodes)
        assert _result(nodes)["n"] > 2
    else:
        (kept,) = nodes.machines()
        assert kept.id == job_.attempts[0].machine


@pytest.mark.rule(5)
def test_nodes_of_another_job_that_has_not_ended_stay(lab: Lab) -> None:
    working = left_job(lab)
    of_job = replace(nodes_of(lab.opened), job=working.id)
    with PlainRunner(lab.opened):
        renting(of_job).rent(lab.market.on_sale)
        end_nodes(lab.opened, "a job that waits")
        assert len(lab.machines()) == 1
        end_nodes(lab.opened, working.id)
    assert lab.machines() == [] and of_job.rentals.open() == []


@pytest.mark.rule(5)
def test_nodes_that_are_ready_when_another_run_drives_the_job_are_ended(nodes: Lab) -> None:
    def record(others: list[Node]) -> None:
        assert len(others) == 2
        raise HandedOver("another run drives the job")

    left = left_job(nodes, nodes=3)
    with PlainRunner(nodes.opened, wait_factor=0.01), pytest.raises(HandedOver):
        bring_nodes(nodes.opened, left, record)
    assert nodes.machines() == [] and nodes_of(nodes.opened).rentals.open() == []


def test_a_job_ends_while_its_market_still_ends_the_nodes(
    nodes: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "SLOW_S", 0.1)
    able = nodes.market.abilities
    nodes.market.abilities, nodes.market.slow = msgspec.structs.replace(able, ending_s=60.0), True
    assert _run(nodes, ["true"]).job.state == "succeeded"
    assert {one.state for one in nodes.machines()} == {"stopping"}
    (other,) = nodes_of(nodes.opened).rentals.open()
    assert other.state == "abandoned"  # watch records its end


def test_all_nodes_are_of_the_best_offer(nodes: Lab) -> None:
    (offer,) = nodes.market.on_sale
    nodes.market.on_sale = [offer, msgspec.structs.replace(offer, id="2", price_usd_h=5.0)]
    left = left_job(nodes, nodes=3)
    with PlainRunner(nodes.opened, wait_factor=0.01):
        bring_nodes(nodes.opened, left, lambda others: None)
        assert [order.offer.id for order in nodes.market.orders] == [offer.id, offer.id]
        end_nodes(nodes.opened, left.id)


def test_all_nodes_have_the_same_of_the_wanted_gpus(nodes: Lab) -> None:
    (offer,) = nodes.market.on_sale
    card = msgspec.structs.replace(offer, id="2", gpu=GpuModel("L40S", "", 48), domain="2")
    nodes.market.on_sale = [offer, card]
    nodes.market.faults = [None, NoCapacity("sold out")]
    opened = nodes.wanting(want=Want(gpu="H100, L40S:2"))
    left = left_job(nodes, nodes=3)
    with PlainRunner(opened, wait_factor=0.01):
        there, _ = bring_nodes(opened, left, lambda others: None)
        ordered = [order.offer.id for order in nodes.market.orders]
        assert ordered == [offer.id, offer.id, "2", "2"]
        assert (there.spec.want.gpu, there.spec.want.gpu_count) == ("L40S", 2)
        end_nodes(opened, left.id)


def test_a_budget_counts_all_nodes(nodes: Lab) -> None:
    limited = replace(nodes, opened=nodes.limited(6.0))  # one hour of one machine, not of two
    with pytest.raises(JobFailed, match="with 2 more at 4 \\$/h an hour would exceed"):
        _run(limited, ["true"])
    assert nodes.market.orders == []
    assert nodes.opened.jobs.ended(1)[0].state == "over budget"
    is_over(nodes)


def test_the_cost_of_a_job_counts_all_nodes(nodes: Lab) -> None:
    job_ = _run(nodes, ["true"]).job
    since = time.time() - 3600
    for rentals in (nodes.opened.rentals, nodes_of(nodes.opened).rentals):
        (ended,) = [one for one in rentals.history() if one.job == job_.id]
        longer = msgspec.structs.replace(ended, created_unix=since)
        key = rentals.key(ended.label).replace("/open/", "/ended/")
        put_record(nodes.store, object_key(key), longer)
    assert cost_of(nodes.opened, job_).words.startswith("8.")


def test_the_overview_counts_all_nodes(nodes: Lab) -> None:
    with _running(nodes, ["sleep", "600"]) as ended:
        job_ = _open(nodes)
        with PlainRunner(nodes.opened):
            (seen,) = overview({DEMO: nodes.opened}, lambda one: renting(one).machines(), [])
        nodes.opened.jobs.ask_stop(job_.id, Stop("cancelled", "hibernate", "", time.time()))
        ended()
    first, other = seen.machines
    assert job_.attempts[0].machine in first and other.endswith("a node of a job")
    assert seen.usd_h == 8.0


def test_a_lost_first_node_takes_the_others_with_it(nodes: Lab, tmp_path: Path) -> None:
    with _running(nodes, _training(0.1, tmp_path / "go"), save_minutes=0.01) as ended:
        until(lambda: _open(nodes).saves >= 1 and _step(nodes) > 4, "it was saved")
        del nodes.market.alive[_open(nodes).attempts[-1].machine]
        nodes.market.sweep()
        _goes_on(nodes, tmp_path / "go")
        job_ = ended().job
    assert [one.end for one in job_.attempts] == ["machine lost", "command ended"]
    assert len(nodes.market.orders) == 4
    is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 2)


def test_a_lost_machine_of_two_changes_no_result(
    world: World, short_agent: None, tmp_path: Path
) -> None:
    """Over SSH, with the local provider."""
    sleeping_with(world, PROGRAM)
    with hurried(), _running(world, _training(0.1, tmp_path / "go")) as ended:
        until(lambda: _step(world) > 4, "they work")
        (lost,) = other_nodes(world)
        assert kill([process.pid for process in world.processes(lost.id)])
        _goes_on(world, tmp_path / "go")
        job_ = ended().job
    assert [one.end for one in job_.attempts] == ["machine lost", "command ended"]
    assert job_.state == "succeeded"
    is_over(world)
    assert _result(world) == two_nodes.uninterrupted(_STEPS, 2)


class _Line:
    """A session to the first node, whose command stands as ``state``."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def call(self, request: Any, *, request_id: str, within_s: float) -> Any:
        return JobLook(self._state, "", 0) if isinstance(request, LookAtJob) else self._state

    def close(self) -> None:
        """Nothing waits."""


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (JobState(JOB, 1, "ended", 0), "command ended"),
        (JobState(JOB, 1, "ended", 1), "machine lost"),  # its command noticed the loss first
        (JobState(JOB, 1, "running"), "machine lost"),
    ],
)
def test_a_node_that_is_gone_is_a_loss_unless_the_first_has_succeeded(
    lab: Lab, state: JobState, end: str
) -> None:
    machine, rental = handed_over(lab.opened)
    gone = Node(machine=MachineId("m9"), provider=lab.market.identity)
    left = left_job(lab, nodes=2, others=[gone], attempts=[attempt_on(machine, rental)])
    driven = Driven(lab.opened.jobs, lab.opened.jobs.take(left, "mine"), lambda message: None)
    with PlainRunner(lab.opened):
        line: Any = _Line(state)
        Attending(lab.opened, driven, machine, rental, line).run()
    (attempt,) = driven.job.attempts
    assert (attempt.end, driven.job.others) == (end, [])
