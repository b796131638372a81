"""The decorator of flows."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)
from pydantic import Field

from tasks.flow import flow
from tasks.phases import phase, seconds_by_phase

Parts = Annotated[int, Field(ge=1, le=64)]


@flow("measure")
def measure(workspace: str, parts: Parts = 8) -> dict[str, float]:
    """Measure parts."""
    with phase(f"{parts} parts of {workspace}"):
        pass
    return seconds_by_phase()


def test_parameters_are_validated_by_types_of_the_flow_s_own_module() -> None:
    assert measure.validate_parameters({"workspace": "mine", "parts": "4"})["parts"] == 4
    with pytest.raises(ParameterTypeError, match="less than or equal to 64"):
        measure.validate_parameters({"workspace": "mine", "parts": 65})


def test_each_run_measures_its_own_phases() -> None:
    with phase("another run's"):
        assert [*measure.fn("mine", 1)] == ["1 parts of mine"]
        assert [*measure.fn("mine", 2)] == ["2 parts of mine"]
    assert seconds_by_phase() == {}


def test_a_call_waits_for_no_heartbeats_unless_the_user_has_set_how_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(**_: Any) -> int | None:
        return get_current_settings().flows.heartbeat_frequency

    monkeypatch.setattr("prefect.flow_engine.run_flow", engine)
    before = get_current_settings().flows.heartbeat_frequency
    assert before and measure("mine") is None
    assert get_current_settings().flows.heartbeat_frequency == before
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 60}):
        assert measure("mine") == 60
