"""Every call that a driver waits for has a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tasks.jobs import GRACE_S, look_at_command, start_command, stop_command
from tasks.plain_runner import PlainRunner
from tasks.standing_by import stand_by
from tasks.watch import check_idle
from tests.fixtures.lab import Lab
from torpor.shared.errors import AgentLost
from torpor.shared.values import Machine, MachineId
from torpor.shared.wire.job import StartJob
from torpor.shared.wire.protocol import Hello
from torpor.shared.wire.request import Request

_MINE = Machine(MachineId("own"), "own", None, "running", None)


class _Hangs:
    """An agent that never answers; it notes what limit each request has."""

    hello = Hello(1, "agent", "machine", 0.0, False)

    def __init__(self) -> None:
        self.limits: dict[str, float | None] = {}

    def call(
        self,
        request: Request[Any],
        *,
        request_id: str,
        on_event: object = None,
        within_s: float | None = None,
    ) -> Any:
        self.limits[request.op] = within_s
        raise AgentLost("it hangs")

    def cancel(self, request_id: str) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(
    ("op", "ask", "least_s"),
    [
        ("job.look", lambda lab, agent: look_at_command(agent, "j", 0, 0), 30.0),
        ("job.stop", lambda lab, agent: stop_command(agent, "j"), 2 * GRACE_S),
        (
            "job.start",
            lambda lab, agent: start_command(agent, StartJob("j", 1, ["true"], "~/w", "~/l", [])),
            120.0,
        ),
        ("autosave", lambda lab, agent: stand_by(lab.opened, agent, lab.rent(), "j", None), 120.0),
        ("activity", lambda lab, agent: check_idle(lab.opened, _MINE, agent, None), 30.0),
    ],
)
def test_a_call_to_an_agent_that_hangs_has_a_limit(
    lab: Lab, op: str, ask: Callable[[Lab, _Hangs], Any], least_s: float
) -> None:
    agent = _Hangs()
    with PlainRunner(lab.opened, retries=0), pytest.raises(AgentLost):
        ask(lab, agent)
    limit = agent.limits[op]
    assert limit is not None and least_s < limit <= 300.0
