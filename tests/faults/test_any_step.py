"""A fault before any step of hibernate and wake loses nothing, and the next run completes. Over
machines in memory: what a step makes of a real store, link or machine is tested where it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import Flow

from flows import hibernate, wake
from tasks.machines import open_session
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.trees import Tree, differences, kept, let_settle
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.shared.errors import AgentLost, StoreDenied, TorporError, WorkspaceBusy

FAULTS = [StoreDenied("the bucket refuses"), AgentLost("the link is gone")]
FEWEST = 8
"""Steps, or the test looks at nothing."""


@pytest.fixture
def home(lab: Lab) -> Path:
    home = lab.workspace(lab.rent().id)
    (home / "notes").mkdir(parents=True)
    (home / "notes" / "a.txt").write_text("first\n")
    (home / "weights.bin").write_bytes(bytes(range(256)) * 400)
    lab.opened = lab.wanting(quiesce=["true"])
    return home


def _tree(lab: Lab) -> Tree:
    (machine,) = lab.machines()
    return kept(lab.workspace(machine.id))


def _before(number: int, do: Callable[[], object]) -> tuple[Callable[[str], None], list[str]]:
    """A listener that does that right before the step of this number; and all steps' names."""
    begun: list[str] = []

    def before(step: str) -> None:
        begun.append(step)
        if len(begun) == number:
            do()

    return before, begun


def _fails(lab: Lab, flow: Flow[..., Any], number: int, fault: TorporError) -> bool:
    """Whether the flow met the fault before it had ended, and failed with it."""

    def fail() -> None:
        raise fault

    before, begun = _before(number, fail)
    try:
        with PlainRunner(lab.opened, retries=0, wait_factor=0.001, before=before):
            flow.fn(DEMO)
    except TorporError as error:
        assert type(error) is type(fault), begun
    return len(begun) >= number


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_an_error_before_any_step_of_a_hibernate_loses_nothing(
    lab: Lab, home: Path, fault: TorporError
) -> None:
    for number in itertools.count(1):
        (machine,) = lab.machines()
        (lab.workspace(machine.id) / "count").write_text(f"{number}\n")
        let_settle()
        truth = _tree(lab)
        met = _fails(lab, hibernate, number, fault)
        assert lab.verify_listed() == len(lab.snapshots())
        if lab.machines():  # as it was, and the next run stores it
            assert not differences(truth, _tree(lab))
            assert hibernate_plainly(lab.opened).destroyed
        wake_plainly(lab.opened)
        assert not differences(truth, _tree(lab))
        if not met:
            break
    assert number > FEWEST


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_an_error_before_any_step_of_a_wake_leaves_no_machine(
    lab: Lab, home: Path, fault: TorporError
) -> None:
    truth = kept(home)
    hibernate_plainly(lab.opened)
    for number in itertools.count(1):
        met = _fails(lab, wake, number, fault)
        if not lab.machines():  # the next run wakes it
            wake_plainly(lab.opened)
        assert not differences(truth, _tree(lab))
        assert lab.leaks() == []
        if not met:
            break
        hibernate_plainly(lab.opened)
    assert number > FEWEST


@pytest.mark.parametrize("flow", [hibernate, wake], ids=lambda flow: flow.name)
def test_an_agent_that_is_killed_before_any_step_is_started_again(
    lab: Lab, home: Path, flow: Flow[..., Any]
) -> None:
    truth = kept(home)

    def kill_agents() -> None:
        for near in lab.market.near.values():
            near.restart()

    for number in itertools.count(1):
        if flow is wake:
            hibernate_plainly(lab.opened)
        before, begun = _before(number, kill_agents)
        with PlainRunner(lab.opened, wait_factor=0.001, before=before):
            flow.fn(DEMO)
        if flow is hibernate:
            wake_plainly(lab.opened)
        assert not differences(truth, _tree(lab))
        if len(begun) < number:
            break
    assert number > FEWEST


def test_a_second_run_is_refused_or_waits_for_the_first(lab: Lab, home: Path) -> None:
    (machine,) = lab.machines()
    with PlainRunner(lab.opened):
        session = open_session(lab.opened, machine)
    first = RemoteSnapshot(session, lab.store, lab.opened.spec, lab.opened.key, "another")
    first.begin()
    with pytest.raises(WorkspaceBusy, match=r"on this machine.*wait until"):
        hibernate_plainly(lab.opened, retries=0)
    assert lab.machines() == [machine]
    tries: list[str] = []

    def before(step: str) -> None:
        tries.append(step)
        if step == "begin snapshot" and tries.count(step) == 3:
            first.end(committed=False)

    with PlainRunner(lab.opened, wait_factor=0.001, before=before):
        assert hibernate.fn(DEMO).destroyed
    assert tries.count("begin snapshot") == 3
