"""The machine of a killed wake: who works on it, who is told, and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

import tasks.watch
from flows import watch
from flows.procedures.watch import leftovers, rows
from flows.procedures.watch.leftovers import judge_left
from tasks.alert_server import LiveRun
from tasks.plain_runner import PlainRunner
from tasks.watch import LeftLook
from tasks.workspace import OpenWorkspace
from tests.fixtures.activity import sampled
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.lab import Lab
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.rentals import not_handed_over, standing
from torpor.control.rental.records import Rental
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import MachineInUse
from torpor.shared.values import (
    RESERVED,
    Endpoint,
    Label,
    Machine,
    MachineId,
    WorkspaceName,
    reserved_name,
)
from torpor.shared.wire.activity import PERSON

DEMO = WorkspaceName("demo")
LABEL = Label("me", DEMO, "0123")
MACHINE = Machine(
    MachineId("m-1"), "vast:1", LABEL, "running", Endpoint("127.0.0.1", 22, "root"), 4.0
)
RENTAL = Rental(label=LABEL, provider="vast:1", state="standing", created_unix=1.0)
WAKE = LiveRun("wake-demo", "wake", "demo", time.time())
DEPLOY = LiveRun("deploy-demo", "deploy", "demo", time.time())
SILENT = LeftLook(None, error="no connection")


@pytest.mark.rule(5)
@pytest.mark.parametrize(
    ("look", "live", "killed", "words"),
    [
        (LeftLook(True), [WAKE], False, "run wake-demo works on it now"),
        (LeftLook(True), [], False, "A run works on it now"),
        (LeftLook(False), [], True, "the one that rented it was killed"),
        (LeftLook(False), [DEPLOY], False, "run deploy-demo has not ended"),
        (LeftLook(False), None, False, "the server does not say which runs there are"),
        (SILENT, [WAKE], False, "run wake-demo has not ended"),
        (SILENT, [], True, "no run of its workspace goes on"),
        (SILENT, None, False, "the server does not say which runs there are"),
        (None, [], False, "its run may still begin on it"),
    ],
)
def test_a_machine_is_left_if_no_run_works_on_it_or_may_hand_it_over(
    look: LeftLook | None, live: list[LiveRun] | None, killed: bool, words: str
) -> None:
    rental = msgspec.structs.replace(RENTAL, created_unix=time.time() - 3600)
    found = judge_left(DEMO, MACHINE, rental, look, live, "end", False)
    assert found.killed == killed and words in found.who
    assert found.act == ("end" if killed and look == LeftLook(False) else "")


@pytest.mark.parametrize("look", [LeftLook(False), SILENT])
def test_a_run_that_hands_nothing_over_for_hours_is_told_of_and_ends_nothing(
    look: LeftLook,
) -> None:
    """One from a shell that was killed stays Running on the server for ever."""
    found = judge_left(DEMO, MACHINE, RENTAL, look, [WAKE], "end", False)
    assert found.killed and found.act == "" and "cancel it in the UI" in found.next_step


@pytest.mark.rule(5)
@pytest.mark.parametrize(
    ("rule", "used", "has_job", "act"),
    [
        ("end", False, False, "end"),
        ("end", True, False, "continue"),  # a person is there
        ("continue", False, False, "continue"),
        ("report", False, False, ""),
        ("end", False, True, ""),  # its job continues with it
    ],
)
def test_what_becomes_of_it_is_its_blocks_rule(
    rule: Literal["end", "continue", "report"], used: bool, has_job: bool, act: str
) -> None:
    look = LeftLook(False, "a server runs on it" if used else "")
    assert judge_left(DEMO, MACHINE, RENTAL, look, [], rule, has_job).act == act
    assert judge_left(DEMO, MACHINE, RENTAL, SILENT, [], rule, has_job).act == ""


@pytest.mark.parametrize("prefix", RESERVED)
@pytest.mark.parametrize("rule", ["end", "continue", "report"])
def test_what_a_killed_run_left_beside_a_workspace_is_ended_also_where_it_is_silent(
    rule: Literal["end", "continue", "report"], prefix: str
) -> None:
    label = msgspec.structs.replace(LABEL, workspace=reserved_name(prefix, DEMO))
    rental = msgspec.structs.replace(RENTAL, label=label)
    act = "" if rule == "report" else "end"
    for look in (LeftLook(False), SILENT):
        assert judge_left(DEMO, MACHINE, rental, look, [], rule, False).act == act
        assert judge_left(DEMO, MACHINE, rental, look, [WAKE], rule, False).act == ""
        assert judge_left(DEMO, MACHINE, rental, look, [], rule, True).act == ""
    assert judge_left(DEMO, MACHINE, rental, LeftLook(True), [], rule, False).act == ""


@pytest.mark.rule(5)
@pytest.mark.parametrize("prefix", RESERVED)
def test_the_machine_of_a_killed_benchmark_drill_or_node_ends(lab: Lab, prefix: str) -> None:
    server = AlertMemory()
    under = lab.opened.under(reserved_name(prefix, lab.opened.spec.name))
    _, rental = standing(under)
    under.rentals.change(rental, created_unix=time.time() - 1800)
    assert _look(lab, server)[1] == [] and len(lab.machines()) == 1
    server.since(600)
    report, ((subject, _),) = _look(lab, server)
    assert subject == f"torpor: machine {rental.machine} of workspace demo is worked on by no run"
    assert report.left[0].next_step == "it was ended"
    assert lab.machines() == [] and under.rentals.open() == []


def _left_by_a_kill(lab: Lab, *, whole: bool) -> MachineId:
    """Half an hour ago."""
    if whole:
        wake_plainly(lab.opened)
        (rental,) = lab.opened.rentals.open()
    else:
        rental = standing(lab.opened)[1]
    not_handed_over(lab.opened, rental, created_unix=time.time() - 1800)
    machine = rental.machine or MachineId("")
    sampled(lab.market.near[machine].home)
    return machine


def _look(lab: Lab, server: AlertMemory, **spec: Any) -> tuple[WatchReport, list[tuple[str, str]]]:
    opened: OpenWorkspace = lab.opened
    if spec:
        opened = replace(opened, spec=msgspec.structs.replace(opened.spec, **spec))
    with PlainRunner(opened, wait_factor=0.1, alerts=server):
        report: WatchReport = watch.fn(dry_run=False)
    return report, server.take()


@pytest.mark.rule(5)
@pytest.mark.parametrize("whole", [False, True])
def test_the_machine_of_a_killed_wake_is_told_of_and_ended_or_hibernated(
    stored: Lab, whole: bool
) -> None:
    server = AlertMemory()
    machine = _left_by_a_kill(stored, whole=whole)
    report, sent = _look(stored, server)
    assert sent == [] and [machine.id for machine in stored.machines()] == [machine]
    assert "the one that rented it was killed" in str(report.rows())
    server.since(600)
    report, ((subject, body),) = _look(stored, server)
    assert subject == f"torpor: machine {machine} of workspace demo is worked on by no run"
    assert "It costs 4.00 $/h." in body and "a run of reconcile ends it" in body
    assert report.left[0].next_step == "it was ended, or hibernated"
    assert stored.machines() == [] and stored.opened.rentals.open() == []
    assert len(stored.snapshots()) == (2 if whole else 1)
    ((subject, _),) = _look(stored, server)[1]
    assert subject.startswith("torpor: over: ")


def _left_for_a_first_job(lab: Lab) -> Machine:
    """Half an hour ago."""
    machine, rental = standing(lab.opened)
    then_unix = time.time() - 1800
    not_handed_over(lab.opened, rental, created_unix=then_unix, job="3f2a9c81d04e")
    sampled(lab.market.near[machine.id].home)
    return machine


@pytest.mark.parametrize("rule", ["end", "continue"])
@pytest.mark.parametrize("holds", ["nothing", "a file"])
def test_what_a_killed_run_rented_for_the_first_job_of_a_workspace_is_stored_and_ended(
    lab: Lab, holds: str, rule: Literal["end", "continue"]
) -> None:
    """Nothing was restored there. A person may have written something all the same."""
    server = AlertMemory()
    machine = _left_for_a_first_job(lab)
    sampled(lab.market.near[machine.id].home)
    names = ["a.txt"] if holds == "a file" else []
    for name in names:
        lab.workspace(machine.id).mkdir()
        (lab.workspace(machine.id) / name).write_text("kept")
    assert _look(lab, server, when_left=rule)[1] == [] and len(lab.machines()) == 1
    server.since(600)
    (left,) = _look(lab, server, when_left=rule)[0].left
    assert left.next_step == "it was ended, or hibernated"
    assert lab.machines() == [] and lab.opened.rentals.open() == []
    woken = lab.workspace(MachineId(wake_plainly(lab.opened).machine))
    assert [path.name for path in woken.iterdir()] == names


def test_what_a_killed_run_rented_for_a_first_job_and_a_person_uses_is_only_handed_over(
    lab: Lab,
) -> None:
    server = AlertMemory()
    machine = _left_for_a_first_job(lab).id
    sampled(lab.market.near[machine].home, flags=PERSON)
    steps = []
    for _ in range(2):
        steps += [one.next_step for one in _look(lab, server)[0].left]
        server.since(600)
    assert steps[-1] == (
        "it was handed over, and not hibernated: somebody uses it, or nobody can say so. `torpor "
        f"hibernate demo --machine {machine}` stores and ends it"
    )
    (rental,) = lab.opened.rentals.open()
    assert (rental.machine, rental.state) == (machine, "handed over")
    assert rental.job == "3f2a9c81d04e"  # `watch` hibernates it once nobody uses it
    assert lab.snapshots() == []


def test_what_a_killed_create_rented_for_a_person_is_only_reported(lab: Lab) -> None:
    server = AlertMemory()
    _, rental = standing(lab.opened)
    not_handed_over(lab.opened, rental, created_unix=time.time() - 1800)
    assert _look(lab, server)[1] == []
    server.since(600)
    assert "reconcile with it in `left`" in _look(lab, server)[0].left[0].next_step
    assert len(lab.machines()) == 1


@pytest.mark.rule(5)
@pytest.mark.parametrize("rule", ["end", "continue"])
def test_a_whole_restore_of_an_older_snapshot_is_hibernated_or_handed_over(
    stored: Lab, rule: Literal["end", "continue"]
) -> None:
    """A wake of a named snapshot was killed right before it handed its machine over."""
    (older,) = stored.snapshots()
    (stored.workspace(MachineId(wake_plainly(stored.opened).machine)) / "later").touch()
    newest = hibernate_plainly(stored.opened).snapshot
    wake_plainly(stored.opened, snapshot=older.snapshot)
    (rental,) = stored.opened.rentals.open()
    not_handed_over(stored.opened, rental, created_unix=time.time() - 1800)
    sampled(stored.market.near[rental.machine or MachineId("")].home)
    server = AlertMemory()
    for _ in range(2):
        _look(stored, server, when_left=rule)
        server.since(600)
    kept = [found.snapshot for found in stored.snapshots()]
    assert {older.snapshot, newest} <= {*kept}
    if rule == "end":
        assert stored.machines() == [] and len(kept) == 3
    else:
        (rental,) = stored.opened.rentals.open()
        assert rental.state == "handed over" and rental.machine is not None
        assert not (stored.workspace(rental.machine) / "later").exists()


@pytest.mark.rule("H17")
@pytest.mark.parametrize("shows", ["somebody was logged in", "it saves itself", "nothing"])
def test_a_machine_in_use_whose_older_record_was_put_back_is_handed_over_again(
    stored: Lab, monkeypatch: pytest.MonkeyPatch, shows: str
) -> None:
    """Before, it was stored and ended, with its user's programs, once nobody was logged in."""
    machine = _left_by_a_kill(stored, whole=True)
    (stored.workspace(machine) / "late").touch()
    if shows == "somebody was logged in":
        sampled(stored.market.near[machine].home, flags=PERSON)
    held = tasks.watch.held_and_saving
    monkeypatch.setattr(
        tasks.watch,
        "held_and_saving",
        lambda *of: (held(*of)[0], shows == "it saves itself"),
    )
    server = AlertMemory()
    for _ in range(2):
        report, _ = _look(stored, server)
        server.since(600)
    if shows == "nothing":
        assert stored.machines() == [] and len(stored.snapshots()) == 2
        return
    (rental,) = stored.opened.rentals.open()
    assert (rental.machine, rental.state) == (machine, "handed over")
    assert (stored.workspace(machine) / "late").exists() and len(stored.snapshots()) == 1
    assert report.left[0].next_step == "it was woken"


@pytest.mark.rule(5)
def test_the_machine_of_a_live_deploy_stays(stored: Lab) -> None:
    """It gave the agent back when its restore ended, and hands the machine over at its end."""
    server = AlertMemory()
    machine = _left_by_a_kill(stored, whole=False)
    server.live = [DEPLOY]
    for _ in range(2):
        report, sent = _look(stored, server)
        assert sent == [] and not report.left[0].killed
        server.since(600)
    assert [machine.id for machine in stored.machines()] == [machine]


def test_a_block_may_have_the_wake_continued(stored: Lab) -> None:
    server = AlertMemory()
    machine = _left_by_a_kill(stored, whole=False)
    _look(stored, server, when_left="continue")
    server.since(600)
    _look(stored, server, when_left="continue")
    (rental,) = stored.opened.rentals.open()
    assert (rental.machine, rental.state) == (machine, "handed over")
    assert (stored.workspace(machine) / "work").read_bytes() == b"mine" * 1000


class _TwoBlocks(PlainRunner):
    """Blocks ``one`` and ``two`` are for workspace demo. It starts no flow."""

    def __init__(self, one: OpenWorkspace, two: OpenWorkspace) -> None:
        super().__init__(one, retries=0, alerts=AlertMemory())
        self._blocks = {"one": one, "two": two}
        self.started: list[dict[str, Any]] = []

    def workspaces(self) -> list[str]:
        return [*self._blocks]

    def open(self, workspace: Any) -> OpenWorkspace:
        return self._blocks[workspace]

    def start(self, flow: Any, key: str, *, queue: str = "", **parameters: Any) -> str:
        self.started.append(parameters)
        return "run one"


@pytest.mark.rule(5)
@pytest.mark.parametrize(
    ("changes", "act", "words"),
    [
        ({"parts": 8}, "end", ""),
        ({"when_left": "continue"}, "", "differ in when_left"),
        ({"paths": ["~/data"]}, "", "what killed runs left is only reported"),
    ],
)
def test_where_the_blocks_of_its_workspace_differ_it_is_only_reported(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], act: str, words: str
) -> None:
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - 1800)
    look = SimpleNamespace(result=lambda: LeftLook(False))
    monkeypatch.setattr(leftovers, "look_at_left", SimpleNamespace(submit=lambda *_: look))
    newest = SimpleNamespace(submit=lambda _: SimpleNamespace(result=lambda: 1.0))
    monkeypatch.setattr(rows, "newest_made_unix", newest)
    other = replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, **changes))
    with _TwoBlocks(lab.opened, other):
        report = watch.fn(dry_run=False)
    (left,) = report.left
    assert (left.machine, left.act) == (machine.id, act)
    assert words in str(report.rows()) and any(
        "choose between" in alert for alert in report.alerts
    ) == (words != "")


class _Elsewhere(MemoryStore):
    address = "memory://elsewhere"  # type: ignore[assignment]


@pytest.mark.parametrize("same", [True, False])
def test_a_failed_attempt_is_ended_where_the_blocks_have_one_store(lab: Lab, same: bool) -> None:
    _, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, state="abandoned", why="its answer was lost")
    other = replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, paths=["~/data"]))
    if not same:
        other = replace(other, store=_Elsewhere())
    with _TwoBlocks(lab.opened, other) as runs:
        report = watch.fn(dry_run=False)
    assert [finding.kind for finding in report.findings] == ["abandoned"]
    assert [one["workspace"] for one in runs.started] == (["one"] if same else [])


@pytest.mark.parametrize(("ago_s", "act"), [(60.0, ""), (30 * 86400.0, "end")])
def test_a_run_from_weeks_ago_does_not_stand_for_one_that_was_killed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, ago_s: float, act: str
) -> None:
    standing(lab.opened)
    monkeypatch.setattr(leftovers, "LEFT_S", 0.0)
    look = SimpleNamespace(result=lambda: LeftLook(False))
    monkeypatch.setattr(leftovers, "look_at_left", SimpleNamespace(submit=lambda *_: look))
    newest = SimpleNamespace(submit=lambda _: SimpleNamespace(result=lambda: 1.0))
    monkeypatch.setattr(rows, "newest_made_unix", newest)
    server = AlertMemory()
    server.live = [msgspec.structs.replace(WAKE, began_unix=time.time() - ago_s)]
    with PlainRunner(lab.opened, alerts=server):
        (left,) = watch.fn(dry_run=True).left
    assert left.act == act


@pytest.mark.parametrize(
    ("look", "live", "is_stored", "step"),
    [
        (None, [], True, "none: wait for the run that has just asked for it"),
        (LeftLook(False), None, True, "none: the next watch asks the server again"),
        (LeftLook(True), None, True, "none: wait for that run"),
        (LeftLook(False), [], True, "wake its workspace, which continues with it"),
        (LeftLook(False), [], False, "run reconcile with it in `left`, which hands it over"),
    ],
)
def test_the_next_step_of_a_machine_that_is_only_reported_can_be_taken(
    look: LeftLook | None, live: list[LiveRun] | None, is_stored: bool, step: str
) -> None:
    """A workspace without a snapshot cannot be woken."""
    found = judge_left(DEMO, MACHINE, RENTAL, look, live, "report", False, is_stored=is_stored)
    assert found.next_step.startswith(step)


def test_a_run_that_ends_what_was_left_is_named_with_what_it_does(
    stored: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = AlertMemory()
    machine = _left_by_a_kill(stored, whole=True)
    _look(stored, server)
    server.since(600)
    monkeypatch.setattr(PlainRunner, "start", lambda *_, **__: "run one")
    assert _look(stored, server)[0].left[0].next_step == (
        "run one ends it, and stores it before where its restore is whole, unless it is in use"
    )

    def fails(*_: object, **__: object) -> str:
        stored.opened.rentals.change(stored.opened.rentals.open()[0], state="handed over")
        raise MachineInUse("somebody has logged in")

    monkeypatch.setattr(PlainRunner, "start", fails)
    server.since(600)
    with PlainRunner(stored.opened, alerts=server), pytest.raises(MachineInUse):
        watch.fn(dry_run=False)
    assert f"machine {machine} was handed over, and not hibernated: somebody" in caplog.text
    assert "stays as it was left" not in caplog.text
