"""What the supervisor restarts, when, and what it says of it; in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments import parent, supervisor, worker
from deployments.down import down
from deployments.installation import CHECKOUT, Installation
from deployments.processes import LOG_BYTES, begin, running, trim
from deployments.server import Server
from deployments.supervisor import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, Part, Supervisor
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.processes import identify, is_running
from torpor.control.supervision import (
    LOCK,
    Parent,
    Supervision,
    last_parent,
    living_parent,
    told,
)
from torpor.shared.errors import InvalidInput, TorporError


@dataclass
class Process:
    """A child of the supervisor, as far as it looks at one."""

    pid: int
    status: int | None = None
    asked: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        self.status = -9
        return -9


@dataclass
class World:
    """A part whose process begins while nothing ``breaks``, and answers; and a clock."""

    folder: Path
    now: float = 1000.0
    breaks: str = ""
    unseen: str = ""
    lives: bool = True
    answers: bool = True
    started: list[float] = field(default_factory=list)
    begun: list[Process] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)

    def supervisor(self) -> Supervisor:
        part = Part("server", self.begin, self.serves, self.folder / "server.log", 10.0, 300.0)
        part.ask_s = 60.0
        return Supervisor(
            [part],
            [("disk", 60.0, self.check)],
            lambda record: record.write(self.folder),
            working=True,
            monotonic=lambda: self.now,
            unix=lambda: self.now,
        )

    def begin(self) -> Any:
        self.started.append(self.now)
        if self.breaks:
            raise OSError(self.breaks)
        self.begun.append(Process(2**22 + 1, None if self.lives else 1))
        return self.begun[-1]

    def serves(self, _: bytes) -> bool:
        if self.unseen:
            raise OSError(self.unseen)
        return self.answers

    def dies(self, status: int = -9) -> None:
        self.begun[-1].status = status

    def check(self) -> list[str]:
        if self.breaks:
            raise OSError(self.breaks)
        return self.found

    def told(self) -> list[str]:
        return told(self.folder, since_unix=0.0, now_unix=self.now)

    def holds_the_lock(self) -> None:
        self.held.enter_context(Installation(self.folder).locked(LOCK))
        Parent(os.getpid(), "http://127.0.0.1:9/api", own=True).write(self.folder)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.holds_the_lock()
    with made.held:
        yield made


def _looks(world: World, looking: Supervisor, count: int) -> None:
    for _ in range(count):
        looking.look()
        world.now += 1.0


def test_what_ends_is_restarted_at_once_and_then_less_and_less_often(world: World) -> None:
    looking = world.supervisor()
    _looks(world, looking, 2)
    assert (world.started, world.told()) == ([1000.0], [])
    assert looking.record.running == {"server": 2**22 + 1}
    (world.folder / "server.log").write_text("Traceback\nMemoryError\n")
    world.dies()
    _looks(world, looking, 2)
    assert world.started == [1000.0, 1002.0]
    ended, restarted = world.told()
    assert ended.startswith(
        "server 1970-01-01 00:16:42 UTC: process 4194305 has ended by signal 9;"
    )
    assert ended.endswith("server.log: MemoryError")
    assert "restarted as process 4194305" in restarted
    world.breaks = "the disk is gone"
    world.dies()
    while len(world.started) < 13:
        _looks(world, looking, 1)
    tries = world.started[2:]
    waits = [b - a for a, b in pairwise(tries)]
    assert tries[0] - 1004.0 == FIRST_WAIT_S
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S
    assert "server: cannot be started; next try in 300 s: the disk is gone" in world.told()
    world.breaks = ""
    world.now += LONGEST_WAIT_S
    _looks(world, looking, 2)
    assert not any(line.startswith("server: ") for line in world.told())
    world.now += STEADY_S + 1
    world.dies()
    looking.look()
    assert world.started[-1] == world.now  # it ran well for long enough: at once again


def test_up_tries_at_once_again_what_failed_often(world: World) -> None:
    looking = world.supervisor()
    world.breaks = "the disk is gone"
    _looks(world, looking, 300)
    world.breaks = ""
    looking.work()
    _looks(world, looking, 2)
    assert looking.record.running == {"server": 2**22 + 1}


def test_what_ends_right_after_each_start_is_not_started_without_pause(world: World) -> None:
    world.lives = world.answers = False
    (world.folder / "server.log").write_text("no such module\n")
    looking = world.supervisor()
    _looks(world, looking, 100)
    assert 3 < len(world.started) < 8
    (said,) = [line for line in world.told() if line.startswith("server: ")]
    assert "cannot be started; next try in" in said
    assert "has ended with status 1" in said
    assert "no such module" in said


def test_a_child_that_never_does_its_work_is_ended_and_started_again(world: World) -> None:
    looking = world.supervisor()
    world.answers = False
    _looks(world, looking, 305)
    assert world.begun[0].asked == ["terminate", "kill"]
    assert "did not begin its work within 300 s" in world.told()[0]
    assert len(world.begun) == 2


def test_a_worker_is_killed_as_one_that_is_asked_to_end_would_end_its_flow_runs(
    tmp_path: Path, world: World
) -> None:
    used = Server("http://127.0.0.1:9/api", own=True)
    stop_s = {
        part.role: part.stop_s
        for part in supervisor.parts_of(Installation(tmp_path), used, lambda: True)
    }
    assert [role for role, polite_s in stop_s.items() if not polite_s] == [*worker.ROLES]
    looking = world.supervisor()
    looking.parts[0].stop_s, world.answers = 0.0, False
    _looks(world, looking, 305)
    assert world.begun[0].asked == ["kill"]


def test_a_check_that_fails_is_told_and_the_others_go_on(world: World) -> None:
    world.found = ["disk full"]
    looking = world.supervisor()
    looking.look()
    assert world.told()[0] == "disk: disk full"
    world.found, world.now = [], world.now + 59.0
    looking.look()
    assert world.told()[0] == "disk: disk full"  # it was not due
    world.breaks, world.now = "statvfs failed", world.now + 1.0
    looking.look()
    assert world.told()[0] == "disk: could not be checked: statvfs failed"
    world.breaks, world.now = "", world.now + 60.0
    looking.look()
    assert all("UTC" in line for line in world.told())  # what was, and nothing that is


def test_nothing_is_checked_before_everything_is_registered(world: World) -> None:
    world.found = ["disk full"]
    looking = world.supervisor()
    looking.working = False
    looking.look()
    assert world.told() == []


def test_a_part_that_cannot_be_looked_at_is_told_and_the_others_go_on(world: World) -> None:
    looking = world.supervisor()
    looking.look()
    world.unseen = "too many open files"
    looking.look()
    assert (len(world.begun), world.begun[0].asked) == (1, [])
    world.unseen = ""
    looking.look()
    world.unseen, world.found, world.now = "too many open files", ["disk full"], world.now + 60.0
    looking.look()
    assert world.told()[:2] == [
        "server: could not be looked at: too many open files",
        "disk: disk full",
    ]
    world.unseen, world.now = "", world.now + 60.0
    looking.look()
    assert world.told()[0] == "disk: disk full"
    assert len(world.begun) == 1


def test_a_server_that_hangs_is_ended_and_one_that_is_slow_once_is_not(world: World) -> None:
    looking = world.supervisor()
    _looks(world, looking, 2)

    def minutes(*answers: bool) -> None:
        for world.answers in answers:
            world.now += 60.0
            looking.look()

    minutes(*[False] * 4, True, *[False] * 4)
    assert world.begun[0].asked == []
    minutes(False)
    assert world.begun[0].asked == ["terminate", "kill"]
    world.answers = True
    _looks(world, looking, 2)
    assert len(world.begun) == 2
    assert any("did not answer, 5 times in a row: it was ended" in line for line in world.told())


def test_a_supervisor_that_has_gone_is_told(world: World) -> None:
    assert "has no supervisor: run `make up`" in world.told()[0]
    looking = world.supervisor()
    looking.look()
    assert world.told() == []
    world.now += 2000.0
    assert "has looked at nothing for 2000 s" in world.told()[0]
    world.held.close()  # as the kernel does when it dies
    assert living_parent(world.folder) is None
    assert f"(process {os.getpid()}) has ended: run `make up`" in world.told()[0]
    down(Installation(world.folder))
    assert last_parent(world.folder) is None
    assert "has no supervisor: run `make up`" in world.told()[0]


def test_a_second_supervisor_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(world.folder))
    monkeypatch.setattr(supervisor, "LOCK_S", 0.0)
    monkeypatch.setattr(supervisor.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["supervisor"])
    with pytest.raises(InvalidInput, match="another supervisor looks after"):
        supervisor.main()


ELSEWHERE = Server("http://127.0.0.1:9/api", own=False)
"""Its supervisor has no server, and no workers before everything is registered."""


@pytest.fixture
def alone(needs_server: None, tmp_path: Path) -> Iterator[Installation]:
    """An installation whose supervisor is a process."""
    made = Installation(tmp_path)
    yield made
    down(made)
    assert not running(made, LOCK, *worker.ROLES)


def _parent(made: Installation) -> int:
    found = living_parent(made.folder)
    assert found
    return found.pid


def test_a_supervisor_stays_as_long_as_what_it_serves_and_is_made_of_is_the_same(
    alone: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parent.start(alone, ELSEWHERE)
    first = _parent(alone)
    assert not parent.start(alone, ELSEWHERE)
    assert _parent(alone) == first
    assert parent.start(alone, Server("http://127.0.0.1:10/api", own=False))
    second = _parent(alone)
    assert (identify(first), second != first) == (None, True)
    monkeypatch.setattr(parent, "made_of", lambda *_: "of a new version")
    assert parent.start(alone, Server("http://127.0.0.1:10/api", own=False))
    assert identify(second) is None


def test_only_what_asks_it_to_end_ends_it_on_purpose(alone: Installation) -> None:
    """Else systemd's process would not start it again. `make up` replaces it, too."""
    for how in (signal.SIGKILL, parent.LEAVE):
        parent.start(alone, ELSEWHERE)
        os.kill(_parent(alone), how)
        until(lambda: not parent.lives(alone), "it has ended", every_s=0.05)
        assert last_parent(alone.folder) is not None
    parent.start(alone, ELSEWHERE)
    os.kill(_parent(alone), signal.SIGTERM)
    until(lambda: not parent.lives(alone), "it has ended", every_s=0.05)
    assert last_parent(alone.folder) is None
    assert parent.wait(alone)


def test_a_supervisor_that_is_halted_is_killed(
    alone: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent.start(alone, ELSEWHERE)
    os.kill(_parent(alone), signal.SIGSTOP)
    monkeypatch.setattr(parent, "GONE_S", 0.5)
    down(alone)
    assert not parent.lives(alone)


def test_a_worker_that_does_not_start_is_told_to_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, role = Installation(world.folder), worker.POOLS[0].role
    Supervision(0.0, {role: ["of an hour ago"]}).write(world.folder)
    asked = signal.signal(parent.WORK, lambda *_: None)  # the lock is ours
    steps = [
        Supervision(0.0, {role: ["of an hour ago"]}),
        Supervision(0.0, {}),
        Supervision(0.0, {role: ["cannot be started; next try in 2 s"]}),
    ]
    monkeypatch.setattr(parent.time, "sleep", lambda _: steps.pop(0).write(world.folder))
    with pytest.raises(TorporError, match=r"the worker cannot be started; next try in 2 s"):
        parent.work(made)
    running = dict.fromkeys(worker.ROLES, 1)
    steps.append(Supervision(0.0, running=running))
    parent.work(made)
    signal.signal(parent.WORK, asked)
    assert steps == []


@pytest.mark.parametrize("how", [parent.LEAVE, signal.SIGKILL, signal.SIGTERM])
def test_only_down_ends_flow_runs(alone: Installation, how: signal.Signals) -> None:
    """They outlive their worker, and so their parent's parent."""
    role = worker.POOLS[0].role
    env = {"PREFECT__FLOW_RUN_ID": "1"}
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    run = begin(alone, role, waits, env, apart=True)
    parent.start(alone, ELSEWHERE)
    os.kill(_parent(alone), how)
    until(lambda: not parent.lives(alone), "it has ended", every_s=0.05)
    assert (identify(run.pid) is None) == (how == signal.SIGTERM)
    parent.start(alone, ELSEWHERE)
    assert (identify(run.pid) is None) == (how == signal.SIGTERM)
    down(alone)
    assert identify(run.pid) is None


_PARENT = """if True:
    import sys, time
    from pathlib import Path
    from deployments.installation import Installation
    from deployments.processes import begin
    child = "import subprocess, sys, time;"
    child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    child += " start_new_session=True); time.sleep(600)"
    begun = begin(Installation(Path(sys.argv[1])), "x", [sys.executable, "-c", child], {})
    print(begun.pid, flush=True)
    time.sleep(600)
"""


def test_a_child_ends_with_its_parent_and_what_it_began_goes_on(tmp_path: Path) -> None:
    """A worker, its supervisor that is killed, and a flow run."""
    argv = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout
        child = psutil.Process(int(killed.stdout.readline()))
        until(child.children, "the run has begun", every_s=0.05)
        (run,) = child.children()
        killed.kill()
    until(lambda: not is_running(child), "the child has ended", every_s=0.05)
    assert is_running(run)
    run.kill()


def test_a_child_of_a_parent_that_waits_for_signals_gets_its_own(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        waits = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = begin(Installation(tmp_path), "x", waits, {})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child.terminate()
    assert child.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_run_goes_on_when_its_worker_was_killed() -> None:
    """Its console is a pipe to the worker."""
    script = """if True:
        import logging, sys
        from deployments.run_console import RunConsole
        logging.getLogger().addHandler(RunConsole())
        sys.stdin.read()
        logging.warning("to nobody")
        print("to nobody either", flush=True)
        sys.exit(7)
    """
    argv = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=CHECKOUT, stdin=pipe, stdout=pipe, stderr=pipe) as run:
        assert run.stdin and run.stdout and run.stderr
        run.stdout.close()
        run.stderr.close()
        run.stdin.close()
        assert run.wait() == 7


def test_the_log_of_a_crash_is_kept(tmp_path: Path) -> None:
    """What starts again appends; a log that is too big is moved, and what appends goes on."""
    made = Installation(tmp_path)
    made.log("x").write_text("the crash\n")
    begin(made, "x", ["echo", "again"], {}).wait()
    assert made.log("x").read_text() == "the crash\nagain\n"
    with made.log("x").open("ab") as log:
        log.truncate(LOG_BYTES + 1)
        trim(made.log("x"))
        log.write(b"after")
    assert made.log("x").read_bytes() == b"after"
    kept = tmp_path / "x.log.1"
    assert kept.read_bytes().startswith(b"the crash\nagain\n")
    assert kept.stat().st_mode & 0o777 == made.log("x").stat().st_mode & 0o777
