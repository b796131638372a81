"""The ready-made stacks against servers of the documented shapes: health, request and answer. The
servers themselves are not run here; llama.cpp is, in tests/benchmarks/test_deploy.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.stacks import ready_made
from flows import deploy
from tests.fixtures.plain_flows import run_plainly
from tests.fixtures.world import World
from torpor.control.deploy.report import DeployReport
from torpor.control.ports import free_ports

SERVER = str(Path(__file__).parents[1] / "fixtures" / "fake_server.py")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_text("a word")
    return path


@pytest.mark.parametrize("name", sorted(ready_made()))
def test_its_health_request_and_answer_fit_together(name: str, world: World, model: Path) -> None:
    stack = ready_made()[name]
    stack.setup = ["mkdir", "-p", "{environment}/bin"]
    stack.fetch = []
    stack.server = ["python3", SERVER, "{port}", str(model)]
    stack.port = free_ports(1)[0]
    report: DeployReport = run_plainly(world.opened, deploy, stack)
    assert report.server_port == stack.port and "completion" in report.seconds
