"""The examples of Ray and PyTorch on two machines, one of which is lost: part of ``make oracles``.

They run in an environment of their own, that of torchrun only where pip found PyTorch for the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile, is_zipfile

import pytest

from deployments.installation import CHECKOUT
from flows import job
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.lab import DEMO
from tests.fixtures.nodes import is_over, other_nodes, sleeping_with
from tests.fixtures.plain_flows import wake_plainly
from tests.fixtures.waiting import background, until
from tests.fixtures.world import World, kill
from torpor.control.jobs.report import JobReport
from torpor.control.ports import free_ports
from torpor.shared.values import MachineId

pytestmark = [pytest.mark.oracle, pytest.mark.together("frameworks")]

NODES = CHECKOUT / "examples" / "two-nodes"
FRAMEWORKS = CHECKOUT / ".venv" / "frameworks" / "bin"
ENVIRONMENT = {
    "PATH": f"{FRAMEWORKS}:{os.environ['PATH']}",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
}
STEPS = 40


class Example(NamedTuple):
    """``state``: the file that it keeps."""

    program: str
    state: str
    command: str

    def line(self) -> str:
        (port,) = free_ports(1)
        return self.command.replace("PORT", str(port))


def _of_the_page(program: str, begins: str) -> str:
    """The line of the examples' page that runs the program, which takes ``STEPS`` steps."""
    (line,) = re.findall(rf"{begins} .*?{program} {STEPS} \d+", (NODES / "README.md").read_text())
    return f"exec {line}".replace("29500", "PORT")


RAY = Example(
    "ray_nodes.py", "state.json", f"RAY_PORT=PORT {_of_the_page('ray_nodes.py', 'python')}"
)
TORCH = Example("torch_nodes.py", "state.pt", _of_the_page("torch_nodes.py", "torchrun"))


@pytest.mark.parametrize(
    "example",
    [RAY, *([TORCH] if (FRAMEWORKS / "torchrun").exists() else [])],
    ids=lambda example: example.program,
)
def test_a_lost_machine_of_two_changes_no_result(
    world: World, short_agent: None, tmp_path: Path, example: Example
) -> None:
    program = NODES / example.program
    sleeping_with(world, program)

    def run() -> JobReport:
        env = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        with PlainRunner(world.opened, wait_factor=0.1):
            report: JobReport = job.fn(DEMO, ["bash", "-c", example.line()], nodes=2, env=env)
        return report

    with hurried(), background(run) as ended:
        until(lambda: _steps(world) > STEPS // 4, "they work")
        (lost,) = other_nodes(world)
        assert kill([process.pid for process in world.processes(lost.id)])
        report = ended()
    assert report.job.state == "succeeded"
    assert [one.end for one in report.job.attempts] == ["machine lost", "command ended"]
    is_over(world)
    place = world.workspace(MachineId(wake_plainly(world.opened).machine))
    begun = re.findall(r"go(?:es)? on from step (\d+)", _log(place))
    assert begun[0] == "0" and STEPS // 4 < int(begun[1]) < STEPS
    assert _values(place / example.state) == _undisturbed(example, program, tmp_path)


def _undisturbed(example: Example, program: Path, folder: Path) -> dict[str, bytes]:
    """The state that the program leaves on rank 0, on two nodes without torpor."""
    line, ran = example.line(), []
    for rank in range(2):
        place = folder / str(rank)
        place.mkdir()
        (place / program.name).write_text(program.read_text())
        node = {"NODES": "2", "NODE_RANK": str(rank), "MASTER": "127.0.0.1"}
        node |= {"NODE_IPS": "127.0.0.1,127.0.0.1"}
        told = {f"TORPOR_{name}": value for name, value in node.items()}
        argv = ["bash", "-c", line]
        ran.append(subprocess.Popen(argv, cwd=place, env={**os.environ, **ENVIRONMENT, **told}))
    try:
        assert ran[0].wait(300) == 0
    finally:
        for process in ran:
            process.terminate()
            process.wait()
    return _values(folder / "0" / example.state)


def _values(state: Path) -> dict[str, bytes]:
    """What the file holds: of PyTorch's, the tensors."""
    if not is_zipfile(state):
        return {"": state.read_bytes()}
    with ZipFile(state) as file:
        return {name: file.read(name) for name in file.namelist() if "/data/" in name}


def _steps(world: World) -> int:
    """How many steps rank 0 has logged."""
    own = [one for one in world.machines() if one.label and one.label.workspace == DEMO]
    found = re.findall(
        r"^step (\d+)", _log(world.workspace(own[0].id)) if own else "", re.MULTILINE
    )
    return int(found[-1]) if found else 0


def _log(place: Path) -> str:
    return "".join(file.read_text() for file in place.glob(".torpor-jobs/*.log"))
