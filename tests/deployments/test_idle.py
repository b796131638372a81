"""Who ends idle machines, as the schedule of `watch` says."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import idle


@pytest.mark.parametrize(
    ("parameters", "active", "of_schedule", "ends"),
    [
        ({"dry_run": False, "only_report": False}, True, {}, True),
        ({"dry_run": False}, True, {}, True),
        ({"dry_run": False}, False, {}, False),
        ({"dry_run": False, "only_report": True}, True, {}, False),
        ({"dry_run": False, "only_report": True}, True, {"only_report": False}, True),
        ({"dry_run": False}, True, {"dry_run": True}, False),
        ({}, True, {}, False),  # a dry run is what the flow does by itself
    ],
)
def test_idle_machines_end_by_a_schedule_that_is_on_and_acts(
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, Any],
    active: bool,
    of_schedule: dict[str, Any],
    ends: bool,
) -> None:
    schedules = [
        SimpleNamespace(active=False, parameters={"dry_run": False}),
        SimpleNamespace(active=active, parameters=of_schedule),
    ]
    watch = SimpleNamespace(parameters=parameters, schedules=schedules)
    monkeypatch.setattr(idle, "get_client", lambda sync_client: nullcontext())
    monkeypatch.setattr(idle, "read_own", lambda client, name: watch)
    assert idle.ends_machines() is ends
