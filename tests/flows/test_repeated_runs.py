"""Flows that are run twice: retried in the UI, or by two people at once."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import flows
from tasks.plain_runner import PlainRunner
from tests.fixtures.errors import raises
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.small_stack import small_stack
from torpor.control.providers.provider import Absent
from torpor.control.rental.records import Rentals
from torpor.control.reports import HibernateReport
from torpor.control.store.receipts import withdraw_receipt
from torpor.shared.errors import HookFailed, InvalidInput, LacksWork, WorkspaceAsleep
from torpor.shared.values import Machine, MachineId


@pytest.fixture
def place(lab: Lab) -> Path:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("some work")
    return place


@pytest.mark.parametrize(
    ("flow", "options", "at"),
    [
        (flows.hibernate, {}, "commit"),
        (flows.backup, {}, "verify"),
        (flows.sync, {"save_first": True}, "finish sync"),
    ],
    ids=["hibernate", "backup", "sync"],
)
def test_a_retry_of_a_flow_run_does_the_work(
    lab: Lab, place: Path, flow: Any, options: dict[str, Any], at: str
) -> None:
    hibernate_plainly(lab.opened, destroy=False)
    (place / "notes").write_text("more work")
    left = [HookFailed("something that the user mends before the retry")]

    def fail_once(step: str) -> None:
        if step == at and left:
            raise left.pop()

    # Prefect gives a retry the id of its flow run.
    with PlainRunner(lab.opened, before=fail_once) as first, pytest.raises(HookFailed):
        flow.fn(DEMO, **options)
    with PlainRunner(lab.opened) as again:
        again.run = first.run
        flow.fn(DEMO, **options)
    assert (flow is flows.hibernate) == (not lab.machines())
    lab.verify_listed()


@pytest.mark.parametrize("flow", [flows.hibernate, flows.backup], ids=["hibernate", "backup"])
@pytest.mark.parametrize("at", ["open session", "begin snapshot"])
def test_the_second_of_two_says_as_what_the_first_has_hibernated(
    lab: Lab, place: Path, flow: Any, at: str
) -> None:
    first: list[HibernateReport] = []
    tried: list[str] = []

    def before(step: str) -> None:
        tried.append(step)
        if step == at and not first:
            first.append(hibernate_plainly(lab.opened))

    with PlainRunner(lab.opened, before=before, wait_factor=0.001):
        report = flow.fn(DEMO)
    (slept,) = first
    assert report.snapshot == slept.snapshot
    assert report.words == (
        f"another run hibernated machine {slept.machine} as snapshot {slept.snapshot}"
    )
    assert tried.count(at) == 1, "it was tried again"


@pytest.mark.rule(5)
def test_the_sweep_is_a_step_of_a_wake_and_not_on_the_way_of_a_hibernation(
    lab: Lab, place: Path
) -> None:
    steps: list[str] = []
    with PlainRunner(lab.opened, before=steps.append):
        flows.backup.fn(DEMO)
        flows.hibernate.fn(DEMO)
        assert "end abandoned machines" not in steps
        del steps[:]
        flows.wake.fn(DEMO)
    sweep = steps.index("end abandoned machines")
    assert sweep < steps.index("find what was left") < steps.index("create machine")


@pytest.mark.rule(6)
def test_a_wake_that_a_hibernation_overtakes_brings_no_older_state(lab: Lab, place: Path) -> None:
    run_plainly(lab.opened, flows.backup)
    (place / "later").write_text("later work")
    slept: list[HibernateReport] = []

    def before(step: str) -> None:
        if step == "find what was left" and not slept:
            slept.append(hibernate_plainly(lab.opened))

    with (
        PlainRunner(lab.opened, before=before, wait_factor=0.001),
        pytest.raises(LacksWork, match="start it again"),
    ):
        flows.wake.fn(DEMO)
    assert lab.machines() == []
    assert wake_plainly(lab.opened).snapshot == slept[0].snapshot


@pytest.mark.rule(6)
def test_a_deploy_that_a_hibernation_overtakes_brings_no_older_state(lab: Lab, place: Path) -> None:
    hibernate_plainly(lab.opened)
    slept: list[HibernateReport | None] = []

    def before(step: str) -> None:
        if step == "find what was left" and not slept:
            slept.append(None)
            woken = wake_plainly(lab.opened)
            (lab.workspace(MachineId(woken.machine)) / "later").write_text("later work")
            slept.append(hibernate_plainly(lab.opened))

    with (
        PlainRunner(lab.opened, before=before, wait_factor=0.001),
        pytest.raises(LacksWork, match="start it again"),
    ):
        flows.deploy.fn(DEMO, small_stack())
    assert slept[1] is not None and lab.machines() == []


@pytest.mark.parametrize("flow", [flows.hibernate, flows.backup], ids=["hibernate", "backup"])
def test_a_sleeping_workspace_is_said_to_sleep(lab: Lab, place: Path, flow: Any) -> None:
    slept = hibernate_plainly(lab.opened)
    for machine in ("", slept.machine):
        report = run_plainly(lab.opened, flow, machine=machine)
        assert report.snapshot == slept.snapshot
        assert f"already asleep in {slept.snapshot}" in report.words
    with pytest.raises(
        InvalidInput, match=r"is on no machine at .* called another: `torpor status`"
    ):
        run_plainly(lab.opened, flow, machine="another")
    with pytest.raises(WorkspaceAsleep, match="already asleep"):
        run_plainly(lab.opened, flows.sync)


def test_a_workspace_that_was_never_anywhere_is_an_error(lab: Lab) -> None:
    with pytest.raises(
        InvalidInput, match=r"is on no machine at vast:1: .*`torpor wake \S+` or `torpor create"
    ):
        hibernate_plainly(lab.opened)


@pytest.mark.rule(3)
def test_only_a_closed_rental_with_a_verified_snapshot_is_sleep(lab: Lab, place: Path) -> None:
    hibernate_plainly(lab.opened)
    woken = wake_plainly(lab.opened)
    newest = lab.snapshots()[0].snapshot
    lab.market.hidden = 10**6  # it lives, and its market does not show it
    lab.market.proofs = False
    with raises(InvalidInput, "no machine that vast:1 shows", woken.machine, newest, "reconcile"):
        hibernate_plainly(lab.opened)
    lab.market.hidden, lab.market.proofs = 0, True
    lab.lose_machines()  # with what was done there since
    with raises(InvalidInput, woken.machine, "was gone", "no record says", newest):
        hibernate_plainly(lab.opened)

    slept = wake_plainly(lab.opened) and hibernate_plainly(lab.opened)
    withdraw_receipt(lab.store, DEMO, slept.snapshot)
    with raises(InvalidInput, slept.machine, "no record says"):
        hibernate_plainly(lab.opened)


def test_a_lost_machine_is_the_last_one_where_a_hibernated_one_ended_slowly(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hibernate_plainly(lab.opened)
    woken = wake_plainly(lab.opened)
    lab.lose_machines()
    with raises(InvalidInput, woken.machine, "no record says"):
        hibernate_plainly(lab.opened)
    known = [
        replace(rental, ended_unix=time.time() + 60) if rental.snapshot else rental
        for rental in lab.opened.rentals.history()
    ]
    monkeypatch.setattr(Rentals, "history", lambda _: known)
    with raises(InvalidInput, woken.machine, "no record says"):
        hibernate_plainly(lab.opened)


def test_an_interrupted_destroy_says_what_is_left_and_the_next_hibernation_that_it_sleeps(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torpor.plain")
    (machine,), (rental,) = lab.machines(), lab.opened.rentals.open()
    lab.market.slow = True  # it accepts the end, and the machine still shows

    find = lab.market.find

    def interrupted(wanted: MachineId) -> Machine | Absent:
        found = find(wanted)
        if isinstance(found, Machine) and found.state == "stopping":
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(lab.market, "find", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        hibernate_plainly(lab.opened)
    (stored,) = lab.snapshots()
    last = [text for text in caplog.messages if machine.id in text][-2:]
    assert f"snapshot {stored.snapshot} is verified" in last[0]
    for left in (machine.id, rental.label.rental, stored.snapshot, "Hibernate again"):
        assert left in last[1]
    assert "hibernate was interrupted" in caught.value.__notes__[0]

    monkeypatch.undo()
    lab.market.slow = False
    lab.lose_machines()
    report = run_plainly(lab.opened, flows.hibernate)
    assert f"already asleep in {stored.snapshot}" in report.words


def test_a_destroy_that_was_interrupted_before_its_answer_waits_for_no_agent(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine,) = lab.machines()
    near, asked = lab.market.near[machine.id], []
    destroy = lab.market.destroy

    def interrupted(*of: Any) -> None:
        destroy(*of)
        monkeypatch.setattr(near, "call", lambda request, **_: asked.append(request))
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.market, "destroy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hibernate_plainly(lab.opened)
    assert asked == []
    (stored,) = lab.snapshots()
    with raises(InvalidInput, "is on no machine", machine.id, "no record", stored.snapshot):
        hibernate_plainly(lab.opened)


def test_a_flow_that_was_interrupted_is_shown_by_one_line(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(step: str) -> None:
        raise KeyboardInterrupt

    with PlainRunner(lab.opened, before=interrupt), pytest.raises(KeyboardInterrupt) as caught:
        flows.wake.fn(DEMO)
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == (
        "torpor: wake was interrupted; its log says what it has left\n"
    )
