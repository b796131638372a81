"""Jobs whose wake, machine or hibernation fails: store and market in memory."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from flows import job
from flows.procedures.job import driver
from tasks.machines import left_unfinished
from tasks.machines import renting as renting_of
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB, JOB_FLOW, Story, attempt_on, drive_job, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.rentals import handed_over, standing
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Stop
from torpor.shared.errors import (
    AgentLost,
    EndUnproven,
    InvalidInput,
    LacksWork,
    MachineUnreachable,
    StoreAway,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from torpor.shared.values import SnapshotId


@pytest.mark.parametrize("by_hand", [False, True], ids=["by the job", "by hand"])
def test_an_error_leaves_the_hibernation_to_the_next_run(
    lab: Lab, story: Story, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StoreDenied("the key was revoked")

    machine, rental = handed_over(lab.opened)
    with monkeypatch.context() as broken:
        broken.setattr(JOB_FLOW, "hibernate_machine", refuse)
        with pytest.raises(StoreDenied, match="the key was revoked"):
            drive_job(lab, left_job(lab, rented=machine.id))
    (left,) = lab.opened.jobs.open()
    assert (left.state, left.why, left.driven) == ("hibernating", "the key was revoked", False)
    if by_hand:
        del lab.market.alive[machine.id]
        lab.opened.rentals.change(rental, state="ended", snapshot=SnapshotId("s-1"))
    ended = drive_job(lab, left)
    assert (ended.state, len(ended.attempts)) == ("succeeded", 1)
    assert ended.final == (SnapshotId("s-1") if by_hand else None)
    stored = [] if by_hand else [f"hibernate {machine.id}"]
    assert story.did == [f"start on {machine.id}", *stored]


def test_a_job_waits_while_a_machine_that_cannot_be_ended_keeps_its_wake_from_renting(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: each look tries to end that machine, and `watch` tells a person."""
    said: list[str] = []
    words = "m1 at vast:1 could neither be used nor be ended. It costs 4.000 $/h"

    def wake(*_: Any, **__: Any) -> Any:
        (now,) = lab.opened.jobs.open()
        said.append(now.why)
        if len(said) <= driver.MOST_FAILURES + 1:
            raise EndUnproven(words)
        machine, _ = handed_over(lab.opened)
        return SimpleNamespace(machine=machine.id, snapshot=SnapshotId("s-1"))

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    monkeypatch.setattr(Driven, "nap", lambda driven, seconds: driven.check())
    assert drive_job(lab, left_job(lab)).state == "succeeded"
    assert all(why.startswith(words) for why in said[1:])


def test_wakes_that_fail_again_and_again_end_the_job(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(time.monotonic())
        raise AgentLost("the agent was killed, for want of memory")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", fail)
    monkeypatch.setattr(driver, "MOST_FAILURES", 3)
    ended = drive_job(lab, left_job(lab))
    assert (ended.state, len(tries)) == ("failed", 2)  # the run that left it failed too
    assert "could not be woken: the agent was killed" in ended.why


@pytest.mark.parametrize("error", [StoreAway("given up after 30 min"), StoreFull("it is full")])
def test_a_store_that_is_away_or_full_during_a_wake_ends_the_run_and_not_the_job(
    error: StoreUnavailable, lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(JOB_FLOW, "wake_workspace", refuse)
        with pytest.raises(type(error), match=str(error)):
            drive_job(lab, left_job(lab))
    (left,) = lab.opened.jobs.open()
    assert left.why == str(error)
    machine, _ = handed_over(lab.opened)
    woken = SimpleNamespace(machine=machine.id, snapshot=SnapshotId("s-1"))
    monkeypatch.setattr(JOB_FLOW, "wake_workspace", lambda *_, **__: woken)
    assert drive_job(lab, left).state == "succeeded"


def test_a_wake_that_a_hibernation_overtakes_is_tried_again(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[str] = []

    def wake(*_: Any, **__: Any) -> Any:
        if not wakes:
            wakes.append("overtaken")
            raise LacksWork("workspace demo was stored after this run had picked its snapshot")
        return SimpleNamespace(machine=handed_over(lab.opened)[0].id, snapshot="s-2")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    ended = drive_job(lab, left_job(lab))
    assert (ended.state, ended.newest, wakes) == ("succeeded", "s-2", ["overtaken"])


def test_a_job_needs_a_command(lab: Lab) -> None:
    with PlainRunner(lab.opened):
        for command in ([], [""]):
            with pytest.raises(InvalidInput, match="the job has no command"):
                job.fn(DEMO, command)
    assert lab.opened.jobs.open() == []


def test_a_machine_that_does_not_answer_is_kept_and_the_job_says_so(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any) -> None:
        raise MachineUnreachable("no SSH")

    monkeypatch.setattr(driver, "session_with", silent)
    machine, rental = handed_over(lab.opened)
    left = left_job(lab, attempts=[attempt_on(machine, rental)])
    lab.opened.jobs.ask_stop(JOB, Stop("cancelled", "keep", "enough", 2.0))
    ended = drive_job(lab, left)
    assert ended.state == "cancelled"
    assert ended.why.startswith(f"enough. Its command may still run on machine {machine.id}")
    assert list(lab.market.alive) == [machine.id]


def test_a_job_fails_where_a_machine_of_its_workspace_has_no_rental(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for ever: another look would find the same."""

    monkeypatch.setattr(
        JOB_FLOW,
        "wake_workspace",
        lambda opened, *_, **__: left_unfinished(opened, renting_of(opened), alone=True),
    )
    machine, rental = standing(lab.opened)
    lab.store.delete([lab.opened.rentals.key(rental.label)])
    ended = drive_job(lab, left_job(lab))
    assert ended.state == "failed"
    assert f"machine {machine.id}" in ended.why
    assert "has no rental for it" in ended.why
    assert list(lab.market.alive) == [machine.id]
