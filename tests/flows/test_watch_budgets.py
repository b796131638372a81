"""Watch and budgets: what a budget can no longer pay for is hibernated, with proof."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest

import blocks
from flows import watch
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly
from tests.fixtures.rentals import handed_over
from tests.fixtures.world import World
from torpor.control.jobs.records import Approval, Attempt, Job, Jobs, Stop
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.money.exhaustion import LEAST_S, START_S
from torpor.control.rental.records import Rental, Rentals
from torpor.control.reports import Row
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import list_snapshots
from torpor.control.watch_report import Watched, WatchReport
from torpor.shared.errors import InvalidInput, MachineInUse, StillChanging, StoreUnavailable
from torpor.shared.values import IdleRules, MachineId, ObjectKey, WorkspaceName

LEAD_S = START_S + LEAST_S
HOUR = 3600.0


class _Beside(PlainRunner):
    """Starts flows beside the run, as the deployment does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threads: list[threading.Thread] = []

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        context = copy_context()
        run = threading.Thread(target=lambda: context.run(flow.fn, **parameters))
        self.threads.append(run)
        run.start()
        return f"run {key.rpartition('-')[0]}"


class _Starts(PlainRunner):
    """Notes what is started, and starts nothing; or fails."""

    def __init__(self, *args: Any, fault: Exception | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.started: list[dict[str, Any]] = []
        self.rows: Sequence[Row] = []
        self._fault = fault

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        self.started.append({"flow": flow.name, "key": key, **parameters})
        if self._fault is not None:
            raise self._fault
        return "run one"

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        self.rows = rows


def _zone() -> str:
    """One in which no month begins or ends within the hour: it would begin with nothing spent."""
    return "Etc/GMT+12" if datetime.now(timezone.utc).hour in (0, 23) else "UTC"


def _limited(
    opened: Sequence[OpenWorkspace], left_s: float, *names: WorkspaceName
) -> tuple[list[OpenWorkspace], OpenBudget]:
    """Under a budget of the workspaces ``names`` that is spent in ``left_s`` from now on."""
    books = [Rentals(one.store, one.spec.name) for one in opened]
    fields: dict[str, Any] = {"name": "lab", "timezone": _zone(), "workspaces": names}
    whole = OpenBudget(Budget(usd_month=Decimal(10**6), **fields), lambda: books)
    now = whole.status(time.time())
    usd = now.high / 1e6 + float(now.usd_h) * left_s / HOUR
    budget = OpenBudget(Budget(usd_month=Decimal(f"{usd:.6f}"), **fields), lambda: books)
    return [replace(one, budgets=lambda: [budget]) for one in opened], budget


def _of(report: WatchReport, machine: MachineId | None) -> Watched:
    (found,) = [one for one in report.watched if one.machine == machine]
    return found


@pytest.mark.rule(15)
@pytest.mark.parametrize("left_s", [LEAD_S - 30, 0])
def test_three_machines_of_a_spent_budget_are_hibernated_with_proof(
    lab: Lab, left_s: float
) -> None:
    names = [WorkspaceName(name) for name in ("demo", "two", "three", "free")]
    base = lab.opened
    opened = [
        replace(base, spec=msgspec.structs.replace(base.spec, name=name, idle=base.spec.idle))
        for name in names
    ]
    machines: dict[WorkspaceName, MachineId] = {}
    for one in opened:
        machine, rental = handed_over(one)
        one.rentals.change(rental, created_unix=time.time() - HOUR / 2, seen_unix=time.time())
        machines[one.spec.name] = machine.id
        folder = lab.workspace(machine.id)
        folder.mkdir(exist_ok=True)
        (folder / "weights.bin").write_bytes(one.spec.name.encode() * 30_000)
    before_unix = time.time()
    opened, budget = _limited(opened, left_s, *names[:3])
    events: list[dict[str, Any]] = []
    with _Beside(*opened, wait_factor=0.1, on_event=events.append) as runs:
        report = watch.fn(dry_run=False)
        for run in runs.threads:
            run.join()
    assert [one.id for one in lab.machines()] == [machines[names[3]]]
    for one in opened[:3]:
        (kept,) = list_snapshots(lab.store, one.spec.name)
        verify_snapshot(lab.store, kept, one.seal)
        (ended,) = one.rentals.history()
        assert ended.state == "ended"
        row = _of(report, machines[one.spec.name])
        assert row.next_step.startswith("budget lab is spent")
        assert row.next_step.endswith(f"run budget-{row.machine} hibernates it")
    assert "budget" not in _of(report, machines[names[3]]).next_step
    (told,) = _spent(events)
    for name in names[:3]:
        assert f"Machine {machines[name]}: " in told["payload"]["message"]

    passed_s = time.time() - before_unix
    spent = budget.status(time.time())
    over_usd = -spent.left / 1e6
    print(f"budget spent in {left_s:.0f} s: overshoot {over_usd:.4f} $ after {passed_s:.1f} s")
    assert over_usd <= 3 * 4.0 / HOUR * max(0.0, passed_s - left_s) + 1e-5


@pytest.fixture
def costly(world: World, prefect_server: object) -> Iterator[World]:
    """Of a workspace that is named as its block and its budget are. A budget holds for every
    workspace of a name, also for those that other tests saved on the server they share."""
    world = world.named("costly")
    name = world.access.spec.name
    world.access.save_blocks(name)
    blocks.Budget(usd_month=0.01, workspaces=[name], timezone=_zone()).save(name)
    yield world
    blocks.Budget.delete(name)


def test_a_budget_block_ends_a_machine_in_prefect(costly: World) -> None:
    machine, rental = handed_over(costly.opened)
    costly.opened.rentals.change(rental, created_unix=time.time() - HOUR / 2)
    costly.workspace(machine.id).mkdir()
    (costly.workspace(machine.id) / "weights.bin").write_bytes(b"w" * 100_000)
    name = costly.access.spec.name
    seen = watch([name])
    assert f"budget {name} is spent: hibernate it" in _of(seen, machine.id).next_step
    assert len(costly.machines()) == 1
    ended = _of(watch([name], dry_run=False), machine.id)
    assert ended.next_step == f"budget {name} is spent: it was hibernated: wake it to work on it"
    assert costly.machines() == [] and costly.verify_listed() == 1


@pytest.fixture
def machine(lab: Lab) -> Rental:
    """In use for half an hour, at 4 $ an hour; it does not answer SSH."""
    rental = handed_over(lab.opened)[1]
    return lab.opened.rentals.change(rental, created_unix=time.time() - HOUR / 2)


def _watch(
    lab: Lab, left_s: float, fault: Exception | None = None, **options: Any
) -> tuple[WatchReport, _Starts, list[dict[str, Any]]]:
    (opened,), _ = _limited([lab.opened], left_s, DEMO)
    events: list[dict[str, Any]] = []
    with _Starts(opened, fault=fault, retries=0, on_event=events.append) as runs:
        report = watch.fn(**{"dry_run": False, **options})
    return report, runs, events


def _spent(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in events if one["payload"].get("kind") == "budget spent"]


def test_it_goes_on_until_the_budget_is_spent_within_the_lead_time(
    lab: Lab, machine: Rental
) -> None:
    report, runs, events = _watch(lab, LEAD_S + 60)
    assert not runs.started
    assert _of(report, machine.machine).kind == "unknown"
    _, runs, events = _watch(lab, LEAD_S - 60)
    (started,) = runs.started
    assert started["flow"] == "hibernate"
    assert started["machine"] == machine.machine
    assert "only_if_idle" not in started
    assert started["key"].startswith(f"budget-{machine.machine}-")
    (sent,) = _spent(events)
    assert sent["payload"]["subject"] == "lab" and not sent["related"]


def test_a_dry_run_says_what_it_would_do(lab: Lab, machine: Rental) -> None:
    report, runs, events = _watch(lab, 0, dry_run=True)
    assert not runs.started
    assert (
        _of(report, machine.machine).next_step
        == "budget lab is spent: hibernate it: this was a dry run"
    )
    assert not events


@pytest.mark.rule(15)
def test_a_machine_that_never_comes_to_rest_stays_and_the_run_fails(
    lab: Lab, machine: Rental
) -> None:
    with pytest.raises(StillChanging):
        _watch(lab, 0, fault=StillChanging("weights.bin changed in each of 10 passes"))
    assert machine.machine in lab.market.alive


@pytest.mark.rule(15)
@pytest.mark.parametrize("asked", [None, Stop("cancelled", "keep", "by a user", 1.0)])
def test_a_job_on_the_machine_is_asked_to_stop_instead(
    lab: Lab, machine: Rental, asked: Stop | None
) -> None:
    jobs = Jobs(lab.store, DEMO)
    attempt = Attempt(
        number=1, machine=machine.machine or MachineId(""), provider="vast:1",
        rental=machine.label.rental, spot=True, price_usd_h=4.0, began_unix=0, seen_unix=0,
    )  # fmt: skip
    job = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0,
              state="running", attempts=[attempt])  # fmt: skip
    jobs.take(job, "gone")
    if asked is not None:
        jobs.ask_stop(job.id, asked)
    report, runs, _ = _watch(lab, 0)
    assert not runs.started
    assert f"job {job.id} is asked to stop" in _of(report, machine.machine).next_step
    stop = jobs.stop_asked(job.id)
    assert stop is not None
    if asked is None:
        assert (stop.state, stop.then, stop.why) == (
            "over budget",
            "hibernate",
            "budget lab is spent",
        )
    else:
        assert stop == asked


@pytest.mark.parametrize("heeded", [True, False], ids=["its driver knows", "just approved"])
def test_a_job_that_a_person_lets_go_past_the_budget_goes_on(
    lab: Lab, machine: Rental, heeded: bool
) -> None:
    jobs = Jobs(lab.store, DEMO)
    attempt = Attempt(
        number=1, machine=machine.machine or MachineId(""), provider="vast:1",
        rental=machine.label.rental, spot=True, price_usd_h=4.0, began_unix=0, seen_unix=0,
    )  # fmt: skip
    job = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0,
              state="running", attempts=[attempt], max_usd=40, past_budgets=heeded)  # fmt: skip
    jobs.take(job, "gone")
    if not heeded:
        jobs.approve(job.id, Approval(past_budgets=True, approved_unix=time.time()))
    report, runs, _ = _watch(lab, 0)
    assert not runs.started and jobs.stop_asked(job.id) is None
    assert f"job {job.id} goes on up to its own limit" in _of(report, machine.machine).next_step
    assert machine.machine in lab.market.alive


@pytest.mark.parametrize("past", [True, False], ids=["let go on", "not asked about"])
def test_a_job_on_another_machine_keeps_no_replica_past_the_budget(
    lab: Lab, machine: Rental, past: bool
) -> None:
    jobs = Jobs(lab.store, DEMO)
    attempt = Attempt(
        number=1, machine=MachineId("another"), provider="vast:1", rental="another",
        spot=True, price_usd_h=4.0, began_unix=0, seen_unix=0,
    )  # fmt: skip
    job = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0,
              state="running", attempts=[attempt], max_usd=40, past_budgets=past)  # fmt: skip
    jobs.take(job, "drives it")
    _, runs, _ = _watch(lab, 0)
    hibernated = [one["machine"] for one in runs.started if one["flow"] == "hibernate"]
    assert hibernated == [machine.machine]
    assert jobs.stop_asked(job.id) is None


def test_a_replica_is_hibernated_while_a_job_runs_on_another_machine(lab: Lab) -> None:
    machine = lab.rent()
    lab.workspace(machine.id).mkdir()
    (lab.workspace(machine.id) / "work").write_text("mine")
    attempt = Attempt(
        number=1, machine=MachineId("another"), provider="vast:1", rental="another",
        spot=True, price_usd_h=4.0, began_unix=0, seen_unix=0,
    )  # fmt: skip
    job = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0,
              state="running", attempts=[attempt])  # fmt: skip
    here = msgspec.structs.replace(
        job, id="1" * 12, attempts=[msgspec.structs.replace(attempt, machine=machine.id)]
    )
    lab.opened.jobs.take(here, "drives it")
    with pytest.raises(MachineInUse, match=here.id):
        hibernate_plainly(lab.opened, machine=machine.id)
    lab.opened.jobs.end(msgspec.structs.replace(lab.opened.jobs.open()[0], state="failed"))
    lab.opened.jobs.take(job, "drives it")
    hibernate_plainly(lab.opened, machine=machine.id)
    assert lab.machines() == []


def test_an_approval_that_nobody_signed_keeps_no_machine_past_the_budget(
    lab: Lab, machine: Rental
) -> None:
    jobs = Jobs(lab.store, DEMO)
    waiting = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0)
    jobs.take(waiting, "gone")
    forged = b'{"past_budgets": true, "approved_unix": 1.0}'
    lab.store.put(ObjectKey(f"workspaces/{DEMO}/jobs/approved/{waiting.id}"), forged)
    _watch(lab, 0)
    stop = jobs.stop_asked(waiting.id)
    assert stop is not None and stop.state == "over budget"


def test_a_job_that_waits_for_a_run_does_not_keep_the_machine(lab: Lab, machine: Rental) -> None:
    jobs = Jobs(lab.store, DEMO)
    waiting = Job(id="0" * 12, workspace=DEMO, block="demo", command=["x"], created_unix=0)
    jobs.leave(jobs.take(waiting, "gone"))
    _, runs, _ = _watch(lab, 0)
    hibernated = [one["machine"] for one in runs.started if one["flow"] == "hibernate"]
    assert hibernated == [machine.machine]
    assert jobs.stop_asked(waiting.id) is None


@pytest.mark.rule(15)
def test_jobs_that_cannot_be_read_keep_the_machine(
    lab: Lab, machine: Rental, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Jobs, *_: Any) -> Any:
        raise StoreUnavailable("503")

    monkeypatch.setattr(Jobs, "open", away)
    report, runs, _ = _watch(lab, 0)
    assert not runs.started
    assert "it is kept" in report.watched[1].next_step and "503" in report.watched[1].next_step
    assert machine.machine in lab.market.alive


@pytest.mark.rule(15)
def test_a_budget_that_cannot_be_read_ends_nothing_and_warns(
    lab: Lab, machine: Rental, caplog: pytest.LogCaptureFixture
) -> None:
    def away() -> Any:
        raise StoreUnavailable("503")

    def no_block() -> Any:
        raise InvalidInput("there is no block")

    budget = Budget(name="lab", usd_month=Decimal("0.01"), workspaces=(DEMO,))
    for budgets, words in (
        (lambda: [OpenBudget(budget, away)], "budget lab cannot be read: 503"),
        (no_block, "no budget can be read: there is no block"),
    ):
        with _Starts(replace(lab.opened, budgets=budgets)) as runs:
            report = watch.fn(dry_run=False)
        assert not runs.started
        assert words in report.message()
        assert f"no machine is hibernated for its cost: {words}" in caplog.text
    assert machine.machine in lab.market.alive


def test_a_budget_whose_workspaces_are_not_known_is_named_also_where_no_machine_runs(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    bad = OpenBudget(
        Budget(name="bad", usd_month=Decimal(5), workspaces=(WorkspaceName("gone"),)),
        tuple,
        "budget bad: there is no block workspace/gone",
    )
    with _Starts(replace(lab.opened, budgets=lambda: [bad])):
        report = watch.fn(dry_run=False)
    assert "budget bad: there is no block workspace/gone" in report.message()
    assert "budget bad: there is no block workspace/gone" in caplog.text


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"paths": ["~/data"]}, "differ in paths"),
        ({"idle": IdleRules(minutes=60)}, ""),
        ({"parts": 8}, ""),
    ],
)
def test_of_several_blocks_for_a_workspace_only_what_differs_keeps_it_over_its_budget(
    lab: Lab,
    machine: Rental,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    kept: str,
) -> None:
    (opened,), _ = _limited([lab.opened], 0, DEMO)
    other = replace(opened, spec=msgspec.structs.replace(opened.spec, **changes))

    class TwoBlocks(_Starts):
        def workspaces(self) -> list[str]:
            return ["one", "two"]

        def open(self, workspace: Any) -> OpenWorkspace:
            return opened if workspace == "one" else other

    with TwoBlocks(opened) as runs:
        report = watch.fn(dry_run=False)
    row = _of(report, machine.machine)
    assert bool(runs.started) == (not kept)
    assert ("idle" in changes) == ("differ in when it is idle" in row.differ)
    if kept:
        assert row.next_step.startswith("budget lab is spent: hibernate it yourself")
        assert kept in row.next_step
        assert "was not hibernated: budget lab is spent" in caplog.text


def test_a_machine_that_its_provider_does_not_show_is_named(lab: Lab, machine: Rental) -> None:
    lab.market.alive.clear()
    lab.market.proofs = False  # with a proof, its rental is closed
    report, runs, _ = _watch(lab, 0)
    assert not runs.started
    row = _of(report, machine.machine)
    assert row.reason == "its machine is lost; budget lab is spent, and it cannot be hibernated now"
