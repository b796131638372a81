"""A few rows of the matrix; all of it is ``python -m tests.matrix``."""

from __future__ import annotations

import pytest

from tests.fixtures.world import World
from tests.matrix.matrix import Matrix
from tests.matrix.uses import USES


@pytest.mark.parametrize(
    ("flow", "step", "by"),
    [("wake", "restore part", "ctrl-c"), ("hibernate", "commit", "kill")],
)
def test_a_flow_that_was_stopped_is_completed_by_the_next(
    world: World, flow: str, step: str, by: str
) -> None:
    (use,) = [use for use in USES if use.flow == flow]
    row = Matrix(world, None).stop(use, step, by)
    assert row.stopped == f"{step}, {by}"
    assert row.again.startswith("completed") and row.faults == []


def test_of_two_flows_at_once_none_loses_a_byte(world: World) -> None:
    first, second = (use for use in USES if use.flow in ("hibernate", "backup"))
    row = Matrix(world, None).pair(first, second, awake=True)
    assert row.faults == []
