"""Flows that are run twice: retried in the UI, or by two people at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flows
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly
from torpor.shared.errors import HookFailed


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
