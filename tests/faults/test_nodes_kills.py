"""A job on several machines whose run is killed at each of its steps: the next run ends it right,
and nothing is left. Store and market are in memory; the commands are real."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from flows import job
from tasks.jobs import nodes_of
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.supervised import end_all_of
from tests.fixtures.waiting import until
from torpor.control.jobs.records import Stop
from torpor.shared.values import MachineId

pytestmark = [pytest.mark.usefixtures("needs_server"), pytest.mark.rule(5)]

_STEPS = 54
"""Of a job on two machines: the runner's, and what its market makes and ends. A run that looks less
often has one or two less, and completes where the last ones are to kill it."""
_COMMAND = ["bash", "-c", "echo $TORPOR_NODE_RANK of $TORPOR_NODES >> ran"]


class Killed(BaseException):
    """As SIGKILL: nothing that the run still tries has an effect."""


class Life:
    """Ends at the ``step``-th step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._steps = itertools.count(1)
        self.dead = False

    def live_on(self, *_: Any) -> None:
        self.dead = self.dead or next(self._steps) == self._step
        self.check()

    def check(self) -> None:
        if self.dead:
            raise Killed


class Interrupted(Life):
    """Somebody presses Ctrl-C at the ``step``-th step; what the run does about it has effect."""

    def live_on(self, *_: Any) -> None:
        if next(self._steps) == self._step:
            raise KeyboardInterrupt


class Mortal:
    """What a run uses of ``outside``; a call of one of ``steps`` is a step of its life."""

    def __init__(self, life: Life, outside: Any, steps: tuple[str, ...] = ()) -> None:
        self._life, self._outside, self._steps = life, outside, steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._outside, name)
        return self._of(name, found) if callable(found) else found

    def _of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **options: Any) -> Any:
            self._life.check()
            result = call(*given, **options)
            if name in self._steps:
                self._life.live_on()
            self._life.check()
            return result

        return called


@pytest.fixture
def asleep(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "work").write_text("work")
    hibernate_plainly(lab.opened)
    lab.market.orders.clear()
    monkeypatch.setattr(threading, "excepthook", lambda told: None)  # a dead run's threads
    with hurried():
        yield lab
    end_all_of(lab.folder)


def _run(lab: Lab, life: Life, command: list[str], continued: str = "") -> None:
    market, store = Mortal(life, lab.market, ("create", "destroy")), Mortal(life, lab.store)

    def log_in(*given: Any, **options: Any) -> Any:
        life.check()
        return lab.market.log_in(*given, **options)

    of: Any = {"providers": (market,), "store": store, "log_in": log_in}
    opened = replace(lab.opened, **of)
    with PlainRunner(opened, wait_factor=0.01, before=life.live_on):
        job.fn(DEMO, command, nodes=2, job=continued)


@pytest.mark.parametrize("step", range(1, _STEPS + 1, 2))
def test_a_run_that_is_killed_leaves_no_node_behind_and_no_work_undone(
    asleep: Lab, step: int
) -> None:
    with suppress(Killed):
        _run(asleep, Life(step), _COMMAND)
    for machine in asleep.market.near.values():
        machine.restart()  # an agent ends what a run has begun there that is gone
    jobs, nodes = asleep.opened.jobs, nodes_of(asleep.opened).rentals
    for left in jobs.open():
        until(lambda: not jobs.open()[0].driven, "its driver counts as gone")
        _run(asleep, Life(0), [], left.id)
    for ended in jobs.ended():
        assert ended.state == "succeeded"
        place = asleep.workspace(MachineId(wake_plainly(asleep.opened).machine))
        assert set((place / "ran").read_text().splitlines()) == {"0 of 2"}
        assert (place / "work").read_text() == "work"
        hibernate_plainly(asleep.opened)
    assert asleep.machines() == [] and jobs.open() == []
    assert asleep.opened.rentals.open() == [] == nodes.open()


@pytest.mark.parametrize("step", range(2, _STEPS + 1, 4))
def test_ctrl_c_ends_the_nodes_that_run_no_command_and_a_cancel_all(asleep: Lab, step: int) -> None:
    with suppress(KeyboardInterrupt):
        _run(asleep, Interrupted(step), ["sleep", "2"])
    jobs, nodes = asleep.opened.jobs, nodes_of(asleep.opened).rentals
    for left in jobs.open():
        if left.attempt is None and not left.rented:
            assert asleep.machines() == []
        jobs.ask_stop(left.id, Stop("cancelled", "hibernate", "enough", time.time()))
        _run(asleep, Life(0), [], left.id)
    assert asleep.machines() == [] and jobs.open() == []
    assert asleep.opened.rentals.open() == [] == nodes.open()
