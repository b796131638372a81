"""Supervisors and agents: a job outlives them, keeps its bundle, and keeps HOME from removal."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import torpor
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.sshd import argv_of
from tests.fixtures.supervised import JOB, Machine, end_all_of
from tests.fixtures.waiting import PATIENCE_S, until
from tests.machine.agent.test_attach import Attached, agent_of, make_bundle
from tests.machine.agent.test_daemon import agent_in
from tests.machine.supervisor.test_autosave import book as one_book
from torpor.machine.sampler.ring import boot_clock_s
from torpor.machine.supervisor.folder import AutosaveFolder, JobFolder
from torpor.shared.wire.activity import ReadActivity

WAITS = "while [ ! -e go ]; do sleep 0.02; done"


def test_a_machine_says_what_runs_on_it_also_without_its_supervisor(machine: Machine) -> None:
    """A job or a server, never both."""

    def runs() -> tuple[bool, bool]:
        activity = machine.agent.call(ReadActivity(60))
        return activity.job_s is not None, activity.served_s is not None

    assert runs() == (False, False)
    before_s = boot_clock_s()
    machine.shell(WAITS, serves=True)
    activity = machine.agent.call(ReadActivity(60))
    assert activity.served_s is not None  # a tick of the kernel's clock is 0.01 s
    assert 0 <= activity.served_s <= activity.now_s - before_s + 0.02
    assert runs() == (False, True)
    machine.supervisor_dies()
    assert runs() == (False, True)
    machine.shell(WAITS, attempt=2)
    assert runs() == (True, False)
    machine.supervisor_dies()
    assert runs() == (True, False)
    machine.stop(grace_s=0)
    assert runs() == (False, False)


@pytest.mark.rule(16)
def test_home_is_not_removed_under_a_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.machine.agent.jobs.LEAVE_S", PATIENCE_S)  # of a busy host
    machine.shell(WAITS)
    with agent_in(machine.home) as agent:
        peer = agent.attach()
        refused = peer.ask("f", "forget")["error"]
        assert refused["type"] == "WorkspaceBusy" and JOB in refused["message"]
        assert machine.state().state == "running"
        (machine.work / "go").touch()
        machine.ended()
        assert peer.ask("f2", "forget")["result"] == {}
        assert agent.left()
    assert not machine.home.exists()


# -- bundles


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    pid = agent_of(tmp_path / "home")
    if pid:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not argv_of(pid), "the agent is gone")
    end_all_of(tmp_path)


def _bundle(home: Path, number: int) -> Path:
    source = home.parent / "source"
    if not source.exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(torpor.__file__).parent, source / "torpor", ignore=ignored)
    return make_bundle(source, home / "bundles" / str(number), str(number) * 64)


@pytest.mark.rule(16)
@pytest.mark.usefixtures("needs_server")
def test_a_job_outlives_a_new_version_of_the_agent_and_keeps_its_own_bundle(home: Path) -> None:
    work = home.parent / "work"
    work.mkdir()
    first = _bundle(home, 1)
    peer = Attached(first, home)
    job: dict[str, Any] = {
        "job": JOB,
        "attempt": 1,
        "argv": ["/bin/sh", "-c", f"{WAITS}; exit 4"],
        "folder": str(work),
        "log": str(work / "job.log"),
        "notices": [],
        "workspace": WORKSPACE,
    }
    assert peer.ask("s", "job.start", **job)["result"]["state"] == "running"
    peer.close()
    second = Attached(_bundle(home, 2), home)
    assert second.first["hello"]["agent"] == "2" * 64
    assert second.ask("s", "job.start", **job)["result"]["state"] == "running"
    assert (first / "__main__.py").exists()
    saves = AutosaveFolder(home, WORKSPACE)
    assert saves.bundle() == str(first)
    book = msgspec.to_builtins(msgspec.structs.replace(one_book(600.0), job=JOB))
    assert second.ask("b", "autosave", book=book, notices=[])["result"] == {}
    assert saves.bundle() == str(home / "bundles" / "2")  # its saves are the new code's
    assert saves.read().attempt == 1
    (work / "go").touch()
    look = {"job": JOB, "offset": 0, "most_bytes": 1000}

    def state() -> dict[str, Any]:
        found: dict[str, Any] = second.ask(os.urandom(4).hex(), "job.look", **look)["result"]
        return found["state"]  # type: ignore[no-any-return]

    until(lambda: state()["state"] == "ended", "it has ended")
    assert state()["status"] == 4
    assert second.ask("e", "autosave.end", workspace=WORKSPACE)["result"] == {}
    second.close()
    kept = JobFolder(home, JOB).read()
    assert kept is not None and kept.bundle == str(first)
    until(lambda: not kept.supervisor.lives, "the supervisor leaves")
    Attached(_bundle(home, 3), home).close()
    assert [found.name for found in (home / "bundles").iterdir()] == ["3"]
