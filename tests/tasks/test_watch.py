"""A hibernation of an idle machine asks whether it is idle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tasks import watch
from tasks.machines import own_machine
from tasks.plain_runner import PlainRunner
from tasks.watch import check_idle
from tests.fixtures.activity import activity, quiet
from tests.fixtures.lab import Lab
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.remote.agent import Agent
from torpor.shared.errors import MachineInUse


class _Backed(Agent):
    """A quiet machine on which torpor's own run ends before the third look, or never."""

    def __init__(self, *, ends: bool) -> None:
        self.looks = itertools.count(1)
        self.ends = ends

    def call(self, request: Any, **_: Any) -> Any:
        return activity(quiet(3600), runs=not (self.ends and next(self.looks) > 2))


@pytest.mark.parametrize("ends", [True, False])
def test_a_backup_that_runs_on_an_idle_machine_is_waited_for(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(watch, "OWN_WORK_POLL_S", 0.01)
    monkeypatch.setattr(watch, "OWN_WORK_S", PATIENCE_S if ends else 0.1)
    machine = own_machine("me@192.0.2.1")
    with PlainRunner(lab.opened):
        if ends:
            check_idle(lab.opened, machine, _Backed(ends=True), None)
        else:
            with pytest.raises(MachineInUse, match="torpor works on it"):
                check_idle(lab.opened, machine, _Backed(ends=False), None)
