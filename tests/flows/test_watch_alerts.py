"""What `watch` tells people, and that it tells it once."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from flows import hibernate, watch
from tasks.alert_server import ComingRun
from tasks.autosave import AutosaveSummary
from tasks.plain_runner import PlainRunner
from tasks.watch import MachineLook
from tasks.workspace import OpenWorkspace
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.driver import JOB, attempt_on, left_job
from tests.fixtures.lab import Lab
from tests.fixtures.machines import destroy_all
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.small_saves import put_save, verified_save
from torpor.control.alerts import watch as looks
from torpor.control.alerts.runs import FailedRun, FlowSchedule
from torpor.control.idleness import Verdict
from torpor.control.money.budgets import OpenBudget
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.providers.provider import Absent, Residue
from torpor.control.rental.records import Rentals
from torpor.control.reports import moment
from torpor.control.store.manifests import snapshot_times
from torpor.control.store_prices import StorePrice
from torpor.control.supervision import LOCK, Supervision, SupervisorEvent
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import (
    InvalidInput,
    MachineUnread,
    NotDelivered,
    ProviderUnavailable,
    StoreUnavailable,
)
from torpor.shared.values import Machine, MachineId

HOUR = 3600.0


class _Runs(PlainRunner):
    """Starts no flow, and keeps the descriptions of tables."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, retries=0, **options)
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.tables: dict[str, str] = {}
        self.rows: dict[str, list[dict[str, str]]] = {}
        self.front = ""

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        self.started.append((flow.name, parameters))
        return "run one"

    def front_page(self, markdown: str) -> None:
        self.front = markdown

    def table(self, key: str, rows: Any, description: str) -> None:
        self.tables[key], self.rows[key] = description, list(rows)


@pytest.fixture
def server() -> AlertMemory:
    return AlertMemory()


def _watch(
    opened: OpenWorkspace, server: AlertMemory, **options: Any
) -> tuple[WatchReport, _Runs, list[tuple[str, str]]]:
    with _Runs(opened, alerts=server) as runs:
        report = watch.fn(**{"dry_run": False, **options})
    return report, runs, server.take()


def _judged(monkeypatch: pytest.MonkeyPatch, kind: Literal["busy", "idle", "unknown"]) -> None:
    """What each look at a machine finds."""
    looked: Future[MachineLook] = Future()
    looked.set_result(MachineLook(Verdict(kind, "nothing ran for 30 minutes"), AutosaveSummary("")))
    look_at = SimpleNamespace(submit=lambda *_: looked)
    monkeypatch.setattr(sys.modules["flows.watch"], "look_at", look_at)


def _failed(flow: str = "hibernate", **changes: Any) -> FailedRun:
    fields: dict[str, Any] = {
        "id": "0199",
        "name": "mini-ammonite",
        "flow": flow,
        "deployment": flow,
        "workspace": "demo",
        "state": "Crashed",
        "message": "Process exited with a general error",
        "ended_unix": time.time() - 60,
        "url": "http://127.0.0.1:4200/runs/flow-run/0199",
    }
    return FailedRun(**{**fields, **changes})


def test_a_run_that_crashed_is_told_once_with_all_that_a_person_needs(
    lab: Lab, server: AlertMemory
) -> None:
    server.failed = [_failed()]
    ((subject, body),) = _watch(lab.opened, server)[2]
    assert subject == "torpor: hibernate for workspace demo crashed"
    for words in (
        "Flow: hibernate",
        "Deployment: hibernate/hibernate",
        "Workspace: demo",
        "Run: mini-ammonite http://127.0.0.1:4200/runs/flow-run/0199",
        "Cause: Process exited with a general error Its process was killed",
        "Next step: its machine was kept and costs money",
    ):
        assert words in body
    assert _watch(lab.opened, server)[2] == []
    server.failed = [_failed(mended=True)]
    ((subject, _),) = _watch(lab.opened, server)[2]
    assert subject == "torpor: over: hibernate for workspace demo crashed"


def test_a_machine_that_cannot_be_judged_is_told_after_half_an_hour(
    lab: Lab, server: AlertMemory
) -> None:
    machine, _ = handed_over(lab.opened)
    assert _watch(lab.opened, server)[2] == []
    server.since(29 * 60)
    assert _watch(lab.opened, server)[2] == []
    server.since(60)
    _, runs, ((subject, body),) = _watch(lab.opened, server)
    assert subject == f"torpor: machine {machine.id} of workspace demo cannot be judged"
    assert "It costs 4.00 $/h." in body and "Next step: it is kept" in body
    assert "custom-webhook/mine 20" in runs.rows["alerts"][0]["told"]
    lab.store.fails = StoreUnavailable("503")
    assert _watch(lab.opened, server)[2] == []  # nobody knows, so it is not over
    lab.store.fails = None
    assert _watch(lab.opened, server)[2] == []


def test_an_idle_machine_that_stays_is_told_after_half_an_hour(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its block or its schedule says report."""
    machine, _ = handed_over(lab.opened)
    _judged(monkeypatch, "idle")
    assert _watch(lab.opened, server, only_report=True)[2] == []
    server.since(1800)
    _, runs, ((subject, body),) = _watch(lab.opened, server, only_report=True)
    assert subject == f"torpor: machine {machine.id} of workspace demo is idle and stays"
    assert "none: watch reports only. It costs 4.00 $/h." in body
    assert "Next step: hibernate workspace demo" in body
    assert runs.started == []
    lab.market.away = ProviderUnavailable("503")
    assert _watch(lab.opened, server, only_report=True)[2] == []  # nobody knows, so it is not over
    lab.market.away = None
    _judged(monkeypatch, "unknown")
    assert _watch(lab.opened, server, only_report=True)[2] == []
    _judged(monkeypatch, "busy")
    ((subject, _),) = _watch(lab.opened, server, only_report=True)[2]
    assert subject.startswith("torpor: over: ")


def test_the_metric_of_an_alert_stays_while_it_lasts(
    lab: Lab, server: AlertMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a dry run, and where nobody can say since when it lasts."""
    handed_over(lab.opened)
    _judged(monkeypatch, "idle")
    metrics = tmp_path / "torpor.prom"
    options = {"only_report": True, "metrics": str(metrics)}
    _watch(lab.opened, server, **options)
    assert "torpor_alert{" not in metrics.read_text()
    server.since(1800)
    for dry_run in (False, True):
        _watch(lab.opened, server, **options, dry_run=dry_run)
        assert 'torpor_alert{kind="machine idle"' in metrics.read_text()

    def away() -> None:
        raise ConnectionError("503")

    monkeypatch.setattr(server, "remembered", away)
    with pytest.raises(ConnectionError):
        _watch(lab.opened, server, **options)
    assert 'torpor_alert{kind="machine idle"' in metrics.read_text()


def test_the_disk_of_a_machine_that_cannot_be_read_is_not_told_as_forgotten(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes it deletes the work."""
    machine, _ = handed_over(lab.opened)
    of: dict[str, Any] = {"provider": machine.provider, "kind": "disk", "label": machine.label}
    monkeypatch.setattr(lab.market, "residue", lambda: [Residue(id="disk-1", **of)])

    def unread() -> list[Machine]:
        raise MachineUnread("a row cannot be read", [])

    monkeypatch.setattr(lab.market, "list_own", unread)
    _watch(lab.opened, server)
    server.since(7300)
    assert not [one for one, _ in _watch(lab.opened, server)[2] if "disk-1" in one]
    monkeypatch.setattr(lab.market, "list_own", list)  # it answers, and does not show the machine
    _watch(lab.opened, server)
    server.since(7300)
    assert not [one for one, _ in _watch(lab.opened, server)[2] if "disk-1" in one]


def test_a_job_with_a_machine_on_which_no_run_works_is_told(lab: Lab, server: AlertMemory) -> None:
    machine, rental = handed_over(lab.opened)
    left_job(lab, attempts=[attempt_on(machine, rental)])
    for minutes in (0, 14):
        server.since(60 * minutes)
        assert not [one for one, _ in _watch(lab.opened, server)[2] if f"job {JOB}" in one]
    server.since(120)
    told = _watch(lab.opened, server)[2]
    ((subject, body),) = [one for one in told if f"job {JOB}" in one[0]]
    assert subject == f"torpor: no flow run works on job {JOB} of workspace demo"
    assert f"Its machine {machine.id} costs money while it is there" in body


def test_a_machine_without_a_rental_is_told_after_two_hours_and_raised_once(
    lab: Lab, server: AlertMemory, tmp_path: Path
) -> None:
    """Another store may have its rental: torpor leaves it alone, and it costs money."""
    machine = lab.rent()
    lab.forget_rentals()
    metrics = tmp_path / "torpor.prom"
    events: list[dict[str, Any]] = []
    for waited, told in ((0, 0), (7000, 0), (200, 1), (120, 0)):
        server.since(waited)
        with _Runs(lab.opened, alerts=server, on_event=events.append):
            watch.fn(dry_run=False, metrics=str(metrics))
        assert len(server.take()) == told
    (raised,) = [one for one in events if one["payload"].get("kind") == "machine forgotten"]
    assert raised["event"] == "torpor.alert.raised"
    assert raised["resource"]["prefect.resource.id"].startswith("torpor.alert.machine-forgotten.")
    assert raised["related"][0]["prefect.resource.id"] == "torpor.workspace.demo"
    assert f"machine {machine.id} at " in raised["payload"]["title"]
    assert 'torpor_alert{kind="machine forgotten"' in metrics.read_text()


def test_a_machine_that_can_neither_be_used_nor_be_ended_is_told_with_what_it_costs(
    lab: Lab, server: AlertMemory
) -> None:
    """A wake and a job rent no other one meanwhile, and nobody may be there to see why."""
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, state="abandoned", why="SSH did not answer")
    _, runs, told = _watch(lab.opened, server)
    assert told == [] and [name for name, _ in runs.started] == ["reconcile"]
    server.since(10 * 60)
    ((subject, body),) = _watch(lab.opened, server)[2]
    assert f"machine {machine.id} of workspace demo can neither be used nor be ended" in subject
    for words in ("SSH did not answer. It costs 4.00 $/h", "`torpor reconcile demo --abandoned`"):
        assert words in body
    lab.market.away = ProviderUnavailable("503")
    assert _watch(lab.opened, server)[2] == [], "nobody knows whether it has ended"
    lab.market.away = None
    destroy_all(lab.market)
    ((subject, _),) = _watch(lab.opened, server)[2]
    assert subject.startswith(f"torpor: over: machine {machine.id}")


@pytest.mark.parametrize("refused", [False, True])
def test_a_machine_that_has_gone_is_told_once_with_the_age_of_what_is_stored(
    lab: Lab, server: AlertMemory, refused: bool
) -> None:
    verified_save(lab.store, put_save(lab.store, 0, []))
    machine, _ = handed_over(lab.opened)
    destroy_all(lab.market)
    if refused:  # the look that sees it reaches nobody, and the next one does not see it
        server.refusing = True
        with pytest.raises(NotDelivered):
            _watch(lab.opened, server)
        server.refusing = False
    ((subject, body),) = _watch(lab.opened, server)[2]
    assert subject == f"torpor: machine {machine.id} of workspace demo has gone"
    assert "The newest snapshot is of 20" in body
    server.since(25 * 3600)
    assert _watch(lab.opened, server)[2] == []


@pytest.mark.parametrize("ended", [True, False])
def test_a_lost_machine_of_a_job_is_told_once_the_job_has_ended(
    lab: Lab, server: AlertMemory, ended: bool
) -> None:
    """An open job rents another one by itself. One that ended may have left it to its user."""
    machine, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, job=JOB)
    left = left_job(lab, attempts=[attempt_on(machine, rental, end="stopped")])
    if ended:
        jobs = lab.opened.jobs
        jobs.end(msgspec.structs.replace(jobs.take(left, "mine"), state="cancelled"))
    destroy_all(lab.market)
    told = [subject for subject, _ in _watch(lab.opened, server)[2]]
    assert told == [f"torpor: machine {machine.id} of workspace demo has gone"] * ended
    assert lab.states() == ["ended"]


def test_a_lost_machine_is_told_with_what_it_saved_by_itself(lab: Lab, server: AlertMemory) -> None:
    kept = put_save(lab.store, 0, [])
    verified_save(lab.store, kept)
    handed_over(lab.opened)
    own = put_save(lab.store, 30, [kept], own_save=1, autosave=1)
    at = moment(snapshot_times(lab.store, lab.opened.spec.name)[own])
    destroy_all(lab.market)
    ((_, body),) = _watch(lab.opened, server)[2]
    assert f", and what was saved last, unverified, of {at}: later work was" in body


@pytest.mark.rule(19)
@pytest.mark.parametrize("closed", [True, False])
def test_a_lost_machine_is_told_by_the_next_look_where_one_is_killed_once_its_rental_is_closed(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    machine, _ = handed_over(lab.opened)
    alive = dict(lab.market.alive)
    destroy_all(lab.market)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*((_Runs, "table") if closed else (Rentals, "change")), killed)
        _watch(lab.opened, server)
    assert lab.states() == ["ended" if closed else "handed over"]
    if not closed:
        lab.market.alive.update(alive)
    told = [subject for subject, _ in _watch(lab.opened, server)[2]]
    assert told == [f"torpor: machine {machine.id} of workspace demo has gone"] * closed
    assert _watch(lab.opened, server)[2] == []
    assert not [alert for alert in server.remembered() if alert.kind == "machine lost"]


@pytest.mark.rule(19)
def test_a_lost_machine_is_told_where_the_answer_to_the_close_of_its_rental_is_lost(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Rentals.change

    def unanswered(*of: Any, **changes: Any) -> Any:
        change(*of, **changes)
        raise StoreUnavailable("timed out")

    machine, _ = handed_over(lab.opened)
    destroy_all(lab.market)
    with monkeypatch.context() as patch:
        patch.setattr(Rentals, "change", unanswered)
        told = [subject for subject, _ in _watch(lab.opened, server)[2]]
    assert lab.states() == ["ended"]
    assert told == [f"torpor: machine {machine.id} of workspace demo has gone"]
    assert _watch(lab.opened, server)[2] == []


@pytest.mark.rule(19)
def test_a_look_between_the_end_of_a_hibernated_machine_and_its_record_tells_of_no_loss(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("some work")
    find, told, states = lab.market.find, list[Any](), list[str]()

    def look_first(wanted: MachineId) -> Machine | Absent:
        found = find(wanted)
        if isinstance(found, Absent) and not states:
            states.extend(lab.states())
            told.extend(_watch(lab.opened, server)[2])
        return found

    monkeypatch.setattr(lab.market, "find", look_first)
    slept = hibernate_plainly(lab.opened)
    assert (states, told, lab.states()) == (["handed over"], [], ["ended"])
    assert _watch(lab.opened, server)[2] == []
    assert f"already asleep in {slept.snapshot}" in run_plainly(lab.opened, hibernate).words


def test_a_machine_whose_own_saves_fail_is_told_after_half_an_hour(
    lab: Lab, server: AlertMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = handed_over(lab.opened)
    failing = MachineLook(
        Verdict("busy", "works"), AutosaveSummary("its own save failed: 403", fail=True)
    )
    looked: Future[MachineLook] = Future()
    looked.set_result(failing)
    look_at = SimpleNamespace(submit=lambda *_: looked)
    monkeypatch.setattr(sys.modules["flows.watch"], "look_at", look_at)
    assert _watch(lab.opened, server)[2] == []
    server.since(30 * 60)
    ((subject, body),) = _watch(lab.opened, server)[2]
    assert subject == f"torpor: machine {machine.id} of workspace demo does not save itself"
    assert "its own save failed: 403" in body


def test_a_provider_block_that_cannot_be_opened_does_not_stop_the_look(
    lab: Lab, server: AlertMemory
) -> None:
    broken = ("vast-provider/new", InvalidInput("two blocks are for one account"))
    opened = replace(lab.opened, each=lambda: [broken])
    report, _, _ = _watch(opened, server)
    assert report.silent == ["vast-provider/new"]


def test_a_machine_that_no_block_reaches_is_told_with_both_ways_out(
    lab: Lab, server: AlertMemory
) -> None:
    machine, rental = handed_over(lab.opened)
    other = replace(lab.opened, providers=(Market("runpod:2"),))
    _watch(other, server)
    server.since(30 * 60)
    ((subject, body),) = _watch(other, server)[2]
    assert subject == f"torpor: machine {machine.id} of workspace demo cannot be judged"
    assert "no provider block is for vast:1" in body
    assert f"name rental {rental.label.rental} in `gone`" in body


@pytest.mark.rule(19)
def test_a_notice_that_was_refused_is_sent_by_the_next_watch(lab: Lab, server: AlertMemory) -> None:
    server.failed, server.refusing = [_failed()], True
    with _Runs(lab.opened, alerts=server) as runs, pytest.raises(NotDelivered):
        watch.fn(dry_run=False)  # a run that completes says that people are told
    assert server.sent == [] and "was not notified" in runs.tables["alerts"]
    assert runs.rows["alerts"][0]["told"] == "nobody yet"
    server.refusing = False
    assert len(_watch(lab.opened, server)[2]) == 1
    assert _watch(lab.opened, server)[2] == []


@pytest.mark.rule(19)
def test_a_kill_between_send_and_record_loses_nothing_and_repeats_one(
    lab: Lab, server: AlertMemory
) -> None:
    server.failed = [_failed(), _failed("wake")]
    server.killed_after_send = True
    with pytest.raises(KeyboardInterrupt):
        _watch(lab.opened, server)
    first = server.take()
    second = _watch(lab.opened, server)[2]
    assert len(first) == 1 and len(second) == 2 and second[0] == first[0]
    assert _watch(lab.opened, server)[2] == []


def test_what_awake_machines_cost_is_told_once_a_day_with_what_they_would_cost_asleep(
    lab: Lab, server: AlertMemory
) -> None:
    machine, _ = handed_over(lab.opened)
    verified_save(lab.store, put_save(lab.store, 0, stored_bytes=730 * 10**9))
    price = StorePrice(0.02, 0.0, "2026-08-03", "https://x")
    opened = replace(lab.opened, store_price=lambda: price)
    server.next_runs = [ComingRun("hibernate", "demo", 1e9), ComingRun("backup", "other", 1.0)]
    _, runs, sent = _watch(opened, server)
    assert sent == []
    assert "# 1 of 1 awake: 4.000 $/h, 96.00 $ a day; asleep 0.48 $ a day" in runs.front
    assert "| demo | awake | 4.000 | 0.00 |" in runs.front
    assert "| `torpor hibernate demo` |" in runs.front
    assert "schedule of watch is off" in runs.front
    server.since(4 * HOUR)
    daily = [notice for notice in _watch(opened, server)[2] if "cost" in notice[0]]
    ((subject, body),) = daily
    assert subject == "torpor: awake machines cost 4.000 $/h, 96.00 $ a day; asleep 0.48 $ a day"
    assert f"demo on {machine.id} at" in body and "hibernate what nobody uses" in body
    server.since(23 * HOUR)
    assert not [notice for notice in _watch(opened, server)[2] if "cost" in notice[0]]
    server.since(HOUR)
    ((again, _),) = [notice for notice in _watch(opened, server)[2] if "cost" in notice[0]]
    assert again.startswith("torpor: still: awake machines cost 4.000 $/h")
    lab.market.alive.clear()
    assert not [notice for notice in _watch(opened, server)[2] if "cost" in notice[0]]


def test_a_workspace_whose_costs_cannot_be_looked_at_holds_up_nothing(
    lab: Lab, server: AlertMemory
) -> None:
    def away() -> None:
        raise ConnectionError("the server of blocks is away")

    handed_over(lab.opened)
    report, runs, _ = _watch(replace(lab.opened, store_price=away), server)
    assert "| it cannot be looked at: the server of blocks is away |" in runs.front
    assert [entry.workspace for entry in report.watched] == ["demo"]


def test_a_dry_run_tells_nobody_and_remembers_nothing(lab: Lab, server: AlertMemory) -> None:
    server.failed = [_failed()]
    assert _watch(lab.opened, server, dry_run=True)[2] == []
    assert server.kept == {}


def test_a_spent_budget_and_one_of_which_most_is_spent_are_told_once(
    lab: Lab, server: AlertMemory
) -> None:
    _, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - 1.2 * HOUR)
    hour = datetime.now(timezone.utc).hour
    zone = "Etc/GMT+12" if hour in (0, 1, 23) else "UTC"  # in which no month begins now
    opened = lab.limited(5.9, timezone=zone)
    sent = [subject for subject, _ in _watch(opened, server)[2]]
    assert sent == ["torpor: 81 % of budget lab are spent"]
    opened = lab.limited(4.7, timezone=zone)
    sent = [subject for subject, _ in _watch(opened, server)[2]]
    assert "torpor: budget lab is spent" in sent
    assert _watch(opened, server)[2] == []


@pytest.mark.rule(19)
def test_a_spent_budget_is_told_by_the_next_look_where_one_is_killed_as_it_ends_the_machine(
    lab: Lab, server: AlertMemory
) -> None:
    class Killed(_Runs):
        def start(self, flow: Any, key: str, **parameters: Any) -> str:
            raise KeyboardInterrupt

    _, rental = handed_over(lab.opened)
    with Killed(lab.limited(0.01), alerts=server), pytest.raises(KeyboardInterrupt):
        watch.fn(dry_run=False)
    assert server.take() == []
    lab.market.alive.clear()  # the hibernation had begun
    lab.opened.rentals.change(rental, state="ended", why="it is stored")
    told = [subject for subject, _ in _watch(lab.limited(0.01), server)[2]]
    assert "torpor: budget lab is spent" in told
    assert _watch(lab.limited(0.01), server)[2] == []


def test_a_spent_budget_that_was_refused_is_told_with_its_cause_where_budgets_cannot_be_read(
    lab: Lab, server: AlertMemory
) -> None:
    def away() -> list[OpenBudget]:
        raise StoreUnavailable("503")

    machine, _ = handed_over(lab.opened)
    server.refusing = True
    with pytest.raises(NotDelivered):
        _watch(lab.limited(0.01), server)
    server.refusing = False
    told = dict(_watch(replace(lab.opened, budgets=away), server)[2])
    assert f"Machine {machine.id}: budget lab is spent" in told["torpor: budget lab is spent"]


@pytest.mark.parametrize("of", ["demo", "all workspaces", ""])
def test_a_backup_that_made_no_snapshot_and_a_schedule_that_stands_still(
    lab: Lab, server: AlertMemory, of: str
) -> None:
    now = time.time()
    _, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, created_unix=now - 30 * HOUR)
    nightly = [now + 21 * HOUR, now + 45 * HOUR]
    due = {of: now - 3 * HOUR}
    server.schedules["backup"] = FlowSchedule(
        deployment="backup", active=True, coming={of: nightly}, due_unix=due, ended_unix=None
    )
    server.schedules["watch"] = FlowSchedule(
        deployment="watch",
        active=True,
        coming={"": [now + 100, now + 220]},
        due_unix={},
        ended_unix=now - 1200,
    )
    report, runs, sent = _watch(lab.opened, server)
    subjects = [subject for subject, _ in sent]
    assert "torpor: workspace demo has missed its backup" in subjects
    assert "torpor: watch does not run by its schedule" in subjects
    assert "workspace demo has missed its backup" in runs.tables["watch"]
    assert report.valid_unix == pytest.approx(report.at_unix + 600)
    assert "if it is later than" in runs.tables["watch"]
    server.schedules["watch"] = msgspec.structs.replace(
        server.schedules["watch"], coming={"": [now - 1500, now + 220]}, ended_unix=now
    )
    server.since(24 * HOUR)
    bodies = [body for subject, body in _watch(lab.opened, server)[2] if "watch" in subject]
    assert "1 of its runs wait" in bodies[0]
    server.schedules.clear()
    assert "no schedule renews it" in _watch(lab.opened, server)[1].tables["watch"]


def test_a_missed_backup_is_told_once_with_the_next_step_and_its_end(
    lab: Lab, server: AlertMemory
) -> None:
    _, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - 30 * HOUR)
    ((subject, body),) = _watch(lab.opened, server, backup_hours=26)[2]
    assert subject == "torpor: workspace demo has missed its backup"
    assert "has no snapshot at all" in body and "Next step: run backup" in body
    assert _watch(lab.opened, server, backup_hours=26)[2] == []
    ((subject, _),) = _watch(lab.opened, server, backup_hours=31)[2]
    assert subject == "torpor: over: workspace demo has missed its backup"


def test_a_workspace_without_a_machine_misses_no_backup(lab: Lab, server: AlertMemory) -> None:
    """It fails each night, and nothing has changed since its newest snapshot."""
    server.failed = [_failed("backup", state="Failed", message="it is on no machine")]
    assert len(_watch(lab.opened, server)[2]) == 1  # it has no snapshot at all


@pytest.mark.rule(19)
def test_watch_acts_while_the_server_does_not_answer(lab: Lab, server: AlertMemory) -> None:
    class Away(AlertMemory):
        def failed_runs(self, since_unix: float) -> list[FailedRun]:
            raise ConnectionError("away")

        def notifiers(self) -> list[str]:
            raise ConnectionError("away")

    _, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - HOUR / 2)
    opened = lab.limited(1.9)
    with _Runs(opened, alerts=Away()) as runs, pytest.raises(ConnectionError, match="away"):
        watch.fn(dry_run=False)
    assert [name for name, _ in runs.started] == ["hibernate"]


@pytest.mark.rule(19)
def test_a_bad_list_of_blocks_keeps_the_memory_and_fails_the_run(
    lab: Lab, server: AlertMemory
) -> None:
    class Bad(AlertMemory):
        def notifiers(self) -> list[str]:
            raise InvalidInput("no list of notification blocks")

    server.failed = [_failed()]
    _watch(lab.opened, server)
    bad = Bad()
    bad.kept, bad.failed = server.kept, [_failed("wake")]
    with _Runs(lab.opened, alerts=bad), pytest.raises(InvalidInput, match="no list"):
        watch.fn(dry_run=False)
    assert sorted(alert.subject for alert in bad.remembered()) == [
        "hibernate/hibernate demo",
        "wake/wake demo",
    ]


@pytest.mark.rule(19)
def test_what_the_supervisor_recorded_and_a_full_disk_are_told_and_shown(
    lab: Lab, server: AlertMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    Supervision(
        os.getpid(),
        "http://127.0.0.1:9/api",
        own=True,
        looked_unix=time.time(),
        troubles={"server": ["cannot be started"], "disk": ["disk full: 3 bytes"]},
        events=[SupervisorEvent(time.time() - 60, "worker", "has ended and was restarted")],
    ).write(tmp_path)
    lock = (tmp_path / LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(looks, "full_disks", lambda folders: ["disk full: / has 3 bytes free"])
    _, runs, sent = _watch(lab.opened, server)
    (full, restarted) = sent
    assert "/ has 3 bytes free" in full[1]
    assert "has ended and was restarted" in restarted[1]
    assert "server is at fault" in runs.tables["watch"]
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert _watch(lab.opened, server)[2] == []  # unknown is not over
    lock.close()
