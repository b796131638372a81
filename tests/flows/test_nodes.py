"""Jobs on several machines, which are folders of one market in memory; their commands are real."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import job
from tasks.jobs import nodes_of
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.supervised import end_all_of
from tests.fixtures.waiting import until
from tests.jobs import two_nodes
from torpor.control.jobs.records import Job, Stop
from torpor.control.jobs.report import JobReport
from torpor.control.ports import free_ports
from torpor.shared.errors import InvalidInput, JobFailed, NoCapacity, TorporError
from torpor.shared.values import Machine, MachineId

pytestmark = pytest.mark.usefixtures("needs_server")

_STEPS = 20
_SHOWS = "env | grep ^TORPOR_NODE | sort; env | grep ^TORPOR_MASTER"


@pytest.fixture
def nodes(lab: Lab) -> Iterator[Lab]:
    """The workspace sleeps, with the training program."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "two_nodes.py").write_text(Path(two_nodes.__file__).read_text())
    hibernate_plainly(lab.opened)
    lab.market.abilities = msgspec.structs.replace(lab.market.abilities, private_network=True)
    lab.market.orders.clear()
    with hurried():
        yield lab
    end_all_of(lab.folder)


def _training(step_s: float = 0.0) -> list[str]:
    (port,) = free_ports(1)
    return ["python3", "two_nodes.py", str(_STEPS), str(step_s), str(port)]


def _run(lab: Lab, command: list[str], count: int = 2, **options: Any) -> JobReport:
    with PlainRunner(lab.opened, wait_factor=0.1):
        report: JobReport = job.fn(DEMO, command, nodes=count, **options)
    return report


@contextmanager
def _running(lab: Lab, command: list[str], **options: Any) -> Iterator[Callable[[], JobReport]]:
    """The job in a thread; what is yielded waits for its end."""
    told: list[JobReport | BaseException] = []

    def run() -> None:
        try:
            told.append(_run(lab, command, **options))
        except BaseException as error:  # noqa: BLE001 - raised below
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> JobReport:
        until(lambda: told, "the job has ended")
        if isinstance(told[0], BaseException):
            raise told[0]
        return told[0]

    yield ended
    thread.join()


def _open(lab: Lab) -> Job:
    """The job, once its command was started."""
    return until(
        lambda: next((one for one in lab.opened.jobs.open() if one.attempt is not None), None),
        "the command was started",
    )


def _others(lab: Lab) -> list[Machine]:
    """The machines of the other nodes."""
    name = nodes_of(lab.opened).spec.name
    return [one for one in lab.machines() if one.label and one.label.workspace == name]


def _step(lab: Lab) -> int:
    own = [one for one in lab.machines() if one.label and one.label.workspace == DEMO]
    try:
        return int(json.loads((lab.workspace(own[0].id) / "state.json").read_text())["n"])
    except (OSError, ValueError, IndexError):
        return 0


def _result(lab: Lab) -> Any:
    machine = wake_plainly(lab.opened).machine
    return json.loads((lab.workspace(MachineId(machine)) / "state.json").read_text())


def _is_over(lab: Lab) -> None:
    """Nothing of the job is left anywhere."""
    assert lab.machines() == [] and lab.opened.jobs.open() == []
    assert lab.opened.rentals.open() == [] == nodes_of(lab.opened).rentals.open()


def test_the_nodes_find_each_other_and_only_the_firsts_work_is_stored(nodes: Lab) -> None:
    report = _run(nodes, _training())
    assert report.job.state == "succeeded"
    (attempt,) = report.job.attempts
    assert len(attempt.others) == 1 and len(nodes.market.orders) == 2
    _is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 2)


def test_a_lost_node_ends_the_attempt_and_the_next_one_has_all_again(nodes: Lab) -> None:
    with _running(nodes, _training(0.1)) as ended:
        until(lambda: _step(nodes) > 4, "they work")
        (lost,) = _others(nodes)
        del nodes.market.alive[lost.id]
        nodes.market.sweep()
        report = ended()
    assert report.job.state == "succeeded"
    first, second = report.job.attempts
    assert (first.end, second.end) == ("machine lost", "command ended")
    assert "node 1" in first.error or "gone" in first.error
    machines = {first.machine, second.machine, *(one.machine for one in first.others)}
    assert len(machines | {one.machine for one in second.others}) == 4
    _is_over(nodes)
    assert _result(nodes) == two_nodes.uninterrupted(_STEPS, 2)
