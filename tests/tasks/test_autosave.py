"""What a machine says of its own saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tasks.autosave import renew_autosave
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import Lab
from torpor.control.remote.seam import Agent
from torpor.shared.wire.request import parse_answer


class _Says(Agent):
    def __init__(self, **state: Any) -> None:
        self.state = state

    def call(self, request: Any, **_: Any) -> Any:
        return parse_answer(type(request), {"lives": True, "left": 99, **self.state})


@pytest.mark.parametrize("unix", [-1.0, 1e10, 2.0**53, 1e300, float("inf")])
def test_a_machine_that_names_no_possible_time_ends_no_watch(lab: Lab, unix: float) -> None:
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    opened = replace(lab.opened, spec=spec)
    machine = lab.rent()
    with PlainRunner(opened):
        said = renew_autosave(opened, _Says(stored_unix=unix, until_unix=9e9), machine)
    assert said.startswith("saved at " if unix in (1e10, 2.0**53) else "its own saves cannot go on")
