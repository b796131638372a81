"""The counterpart of the quiesce hook: it runs whenever the machine is kept, whoever was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.waiting import until
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.machine.agent.resume import PendingResume, Resumption
from torpor.machine.agent.state import WorkspaceState
from torpor.shared.errors import HookFailed
from torpor.shared.wire.snapshot import Program


def _began(engine: Engine, was: Path, said: Path, **spec: list[str]) -> RemoteSnapshot:
    run = engine.begin([was])
    commands = {
        "quiesce": ["sh", "-c", f"echo paused >> {said}"],
        "resume": ["sh", "-c", f"echo resumed >> {said}"],
        **spec,
    }
    run.spec = msgspec.structs.replace(run.spec, **commands)
    return run


def test_the_end_of_a_run_resumes_what_its_hook_paused(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    run = _began(engine, was, said)
    run.quiesce()
    run.quiesce()  # the connection was lost
    assert run.end(committed=False) == ""
    assert said.read_text() == "paused\npaused\nresumed\n"
    assert _began(engine, was, said).end(committed=False) == ""
    assert said.read_text() == "paused\npaused\nresumed\n"  # nothing was paused since


def test_a_hook_that_fails_may_have_paused_something(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    run = _began(engine, was, tmp_path / "said", quiesce=["false"])
    with pytest.raises(HookFailed):
        run.quiesce()
    run.end(committed=False)
    assert (tmp_path / "said").read_text() == "resumed\n"


def test_a_machine_that_ends_resumes_nothing(engine: Engine, was: Path, tmp_path: Path) -> None:
    run = _began(engine, was, tmp_path / "said")
    run.quiesce()
    run.end(committed=True, kept=False)
    assert (tmp_path / "said").read_text() == "paused\n"


def test_a_resume_command_that_fails_is_said_and_raises_nothing(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    run = _began(engine, was, tmp_path / "said", resume=["sh", "-c", "echo no database; exit 3"])
    run.quiesce()
    assert "the resume command 'sh' ended with status 3 and printed: no database" in run.end(
        committed=False
    )


def test_an_agent_that_was_started_again_knows_what_is_paused(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    run = _began(engine, was, said)
    run.quiesce()
    engine.restart()
    run.begin()
    assert said.read_text() == "paused\n"
    run.end(committed=False)
    assert said.read_text() == "paused\nresumed\n"


PAUSES = """
import json, sys, time
from pathlib import Path
from torpor.machine.agent.resume import Resumption
Resumption(Path(sys.argv[1])).add_pending(json.loads(sys.argv[2]), 10.0, grace_s=0.1)
print("paused", flush=True)
time.sleep(600)
"""


def test_a_killed_agent_leaves_nobody_paused(tmp_path: Path) -> None:
    """Nor does a control side that is gone, without which the agent ends the run."""
    state = WorkspaceState(tmp_path / "home", WORKSPACE)
    resume = ["sh", "-c", f"echo resumed >> {tmp_path}/said"]
    agent = subprocess.Popen(
        [sys.executable, "-c", PAUSES, str(state.folder), json.dumps(resume)],
        stdout=subprocess.PIPE,
    )
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"paused\n"
        os.kill(agent.pid, signal.SIGKILL)
    until(lambda: not (state.folder / "resume").exists(), "what was owed is settled")
    assert (tmp_path / "said").read_text() == "resumed\n"


def test_a_command_that_was_frozen_and_ended_leaves_the_resume_command_owed(
    tmp_path: Path,
) -> None:
    """The market may withdraw its notice, and what else was paused runs on."""
    state = WorkspaceState(tmp_path / "home", WORKSPACE)
    resumption = Resumption(state.folder)
    program = Program("0" * 12, str(tmp_path / "images"))
    resumption.add_pending([], 10.0, programs=[program])
    resumption.add_pending(["touch", f"{tmp_path}/said"], 10.0)
    resumption.end_programs()
    owed = msgspec.json.decode((state.folder / "resume").read_bytes(), type=PendingResume)
    assert (owed.argv[0], owed.programs) == ("touch", [])
    assert resumption.settle() == ""
    assert (tmp_path / "said").exists()
    resumption.add_pending([], 10.0, programs=[program])
    resumption.end_programs()
    assert not (state.folder / "resume").exists()


def test_after_a_start_of_the_machine_nothing_is_owed(tmp_path: Path) -> None:
    """What it paused is started by the machine, or by nobody."""
    state = WorkspaceState(tmp_path / "home", WORKSPACE)
    owed = PendingResume(["touch", f"{tmp_path}/said"], 10.0, boot="0" * 32)
    (state.folder / "resume").write_bytes(msgspec.json.encode(owed))
    resumption = Resumption(state.folder)
    resumption.take_up()
    assert resumption.settle() == ""
    assert not (tmp_path / "said").exists()
    assert not (state.folder / "resume").exists()


def test_what_a_killed_run_owes_is_owed_with_what_the_next_one_freezes(tmp_path: Path) -> None:
    state = WorkspaceState(tmp_path / "home", WORKSPACE)
    first, second = Resumption(state.folder), Resumption(state.folder)
    first.add_pending(["touch", f"{tmp_path}/said"], 10.0)
    first.leave()  # as the kernel does for one that is killed
    second.take_up()
    program = Program("0" * 12, str(tmp_path / "images"))
    second.add_pending([], 10.0, programs=[program])
    owed = msgspec.json.decode((state.folder / "resume").read_bytes(), type=PendingResume)
    assert (owed.argv[0], owed.programs) == ("touch", [program])
    second.drop()
