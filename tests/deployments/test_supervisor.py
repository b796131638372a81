"""What the supervisor restarts, when, and what it says of it; in memory."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from deployments import installation, parent, server, supervisor, unit, worker
from deployments.down import down, runs, served
from deployments.installation import CHECKOUT, Installation, code_digest
from deployments.processes import LOG_BYTES, begin, printed_since, running, trim
from deployments.server import Server, server_of
from deployments.supervisor import (
    EVENT_CHARACTERS,
    MOST_PAUSE_S,
    MOST_TOLD,
    PAUSE_S,
    STEADY_S,
    Check,
    Part,
    Supervisor,
)
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.ports import free_ports
from torpor.control.processes import is_running
from torpor.control.supervision import (
    LOCK,
    RECORD,
    Supervision,
    is_held,
    living,
    read_supervision,
    told,
)
from torpor.shared.errors import InvalidInput, TorporError

ELSEWHERE = Server("http://127.0.0.1:9/api", own=False)
"""Its supervisor has no server, and no workers before everything is registered."""
OWN = Server("http://127.0.0.1:9/api", own=True, login="torpor:secret")


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
            [Check("runs", 60.0, self.runs, asks=True), Check("disk", 60.0, self.check)],
            lambda record: record.write(self.folder),
            Supervision(os.getpid(), OWN.api_url, own=True),
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

    def runs(self) -> list[str]:
        assert self.answers, "the server is asked before it answers"
        return []

    def told(self) -> list[str]:
        return told(self.folder, since_unix=0.0, now_unix=self.now)

    def holds_the_lock(self) -> None:
        self.held.enter_context(Installation(self.folder).locked(LOCK))


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


@pytest.mark.rule(20)
def test_what_ran_well_is_restarted_at_once_and_what_ended_soon_after_a_pause(
    world: World,
) -> None:
    looking = world.supervisor()
    _looks(world, looking, 2)
    assert (world.started, world.told()) == ([1000.0], [])
    assert looking.record.running == {"server": 2**22 + 1}
    (world.folder / "server.log").write_text("Traceback\nMemoryError\n")
    world.dies()
    _looks(world, looking, 12)
    assert world.started == [1000.0, 1002.0 + PAUSE_S]
    ended, restarted = world.told()
    assert ended.startswith(
        "server 1970-01-01 00:16:42 UTC: process 4194305 has ended by signal 9;"
    )
    assert ended.endswith("server.log: MemoryError")
    assert "restarted as process 4194305" in restarted
    world.now += STEADY_S + 1
    world.dies()
    looking.look()
    assert world.started[-1] == world.now
    world.breaks = "the disk is gone"
    world.dies()
    _looks(world, looking, 100)
    assert "server: cannot be started; next try in 80 s: the disk is gone" in world.told()
    assert world.started[-1] - world.started[3] == 20.0 + 40.0
    world.breaks = ""
    _looks(world, looking, 82)
    assert not any(line.startswith("server: ") for line in world.told())


@pytest.mark.rule(20)
def test_what_ends_right_after_each_start_is_started_less_and_less_often(world: World) -> None:
    """For a night, and what else has happened stays in the record, which stays small."""
    world.lives = world.answers = False
    (world.folder / "server.log").write_text("x" * 3000 + "no such module\n")
    looking = world.supervisor()
    looking.say("worker", "process 1 has ended: " + "x" * 3000)
    _looks(world, looking, 36_000)
    pauses = [later - before for before, later in itertools.pairwise(world.started)]
    first = [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, MOST_PAUSE_S]
    # It is seen to have ended by the look after its start.
    assert [round(pause_s - 1.0) for pause_s in pauses[:5]] == first
    assert max(pauses) == MOST_PAUSE_S + 1.0
    events = looking.record.events
    assert [event.who for event in events] == ["worker", "server"]
    assert all(len(event.what) <= EVENT_CHARACTERS for event in events)
    (said,) = [line for line in world.told() if line.startswith("server: ")]
    assert "cannot be started; next try in" in said
    assert "has ended with status 1" in said
    assert "no such module" in said


def test_a_child_that_never_does_its_work_is_ended_and_started_again(world: World) -> None:
    looking = world.supervisor()
    world.answers = False
    _looks(world, looking, 315)
    assert world.begun[0].asked == ["terminate", "kill"]
    assert "did not begin its work within 300 s" in world.told()[0]
    assert len(world.begun) == 2


@pytest.mark.rule(20)
def test_a_worker_is_killed_as_one_that_is_asked_to_end_would_end_its_flow_runs(
    tmp_path: Path, world: World
) -> None:
    parts = supervisor.parts_of(Installation(tmp_path), OWN, lambda: True)
    stop_s = {part.role: part.stop_s for part in parts}
    assert [role for role, polite_s in stop_s.items() if not polite_s] == [*worker.ROLES]
    looking = world.supervisor()
    looking.parts[0].stop_s, world.answers = 0.0, False
    _looks(world, looking, 305)
    assert world.begun[0].asked == ["kill"]


@pytest.mark.rule(20)
def test_a_check_that_fails_is_told_and_the_others_go_on(world: World) -> None:
    world.found = ["disk full"]
    looking = world.supervisor()
    _looks(world, looking, 2)
    assert world.told()[0] == "disk: disk full"
    world.found, world.now = [], world.now + 57.0
    looking.look()
    assert world.told()[0] == "disk: disk full"  # it was not due
    world.breaks, world.now = "statvfs failed", world.now + 1.0
    looking.look()
    assert world.told()[0] == "disk: could not be checked: statvfs failed"
    world.breaks, world.now = "", world.now + 60.0
    looking.look()
    assert all("UTC" in line for line in world.told())  # what was, and nothing that is


@pytest.mark.rule(20)
def test_what_needs_no_server_is_checked_and_kept_running_while_none_answers(
    world: World,
) -> None:
    """A full disk may be why it does not. Lost runs are asked for once it does."""
    world.found, world.answers = ["disk full"], False
    looking = world.supervisor()
    begun: list[Process] = []

    def begin() -> Any:
        begun.append(Process(7))
        return begun[-1]

    log = world.folder / "embedded.log"
    looking.parts = [*looking.parts, Part("store", begin, lambda _: True, log, 10.0)]
    _looks(world, looking, 3)
    assert (world.told()[0], looking.has_checked) == ("disk: disk full", False)
    begun[0].status = 1
    _looks(world, looking, 12)
    assert (len(begun), looking.record.running) == (2, {"store": 7})
    world.answers = True
    looking.look()
    assert looking.has_checked


def test_many_troubles_of_one_check_are_counted_in_the_record(world: World) -> None:
    world.found = [f"run {number} crashed" for number in range(1000)]
    looking = world.supervisor()
    looking.look()
    troubles = looking.record.troubles["disk"]
    assert (len(troubles), troubles[-1]) == (MOST_TOLD + 1, f"and {1000 - MOST_TOLD} more")


def test_a_record_that_cannot_be_written_ends_nothing(world: World) -> None:
    looking = world.supervisor()

    def surrogate(_: Supervision) -> None:
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    looking.write = surrogate
    looking.look()
    assert looking.record.running == {} and len(world.begun) == 1


@pytest.mark.rule(20)
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


@pytest.mark.rule(20)
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


@pytest.mark.rule(20)
def test_a_supervisor_that_has_gone_or_is_halted_is_told(world: World) -> None:
    assert "has no supervisor: run `torpor up`" in world.told()[0]
    looking = world.supervisor()
    looking.look()
    assert world.told() == []
    world.now += 2000.0
    assert "has looked at nothing for 2000 s" in world.told()[0]
    world.held.close()  # as the kernel does when it dies
    assert living(world.folder) is None
    assert "has no supervisor: run `torpor up`" in world.told()[0]


@pytest.mark.rule(20)
@pytest.mark.parametrize("held", [LOCK, parent.DOWN])
def test_a_supervisor_is_refused_where_another_lives_or_down_runs(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    monkeypatch.setattr(supervisor, "LOCK_S", 0.0)
    monkeypatch.setattr(supervisor.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["supervisor"])
    with Installation(tmp_path).locked(held):
        assert supervisor.main() == unit.REFUSED
    words = {LOCK: "another supervisor looks after", parent.DOWN: "`torpor down` ends what runs"}
    assert words[held] in capsys.readouterr().err


@pytest.mark.rule(20)
@pytest.mark.parametrize("other", ["server", "version", "login"])
def test_what_runs_with_another_server_version_or_login_is_left_alone(
    world: World, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Installation(world.folder)
    parent.described(OWN).write(world.folder)
    parent.see_that_nothing_else_runs(made, OWN)
    wanted = OWN
    if other == "server":
        wanted = Server("http://127.0.0.1:10/api", own=True, login=OWN.login)
    if other == "login":
        wanted = Server(OWN.api_url, own=True, login="torpor:another")
    if other == "version":
        monkeypatch.setattr(parent, "version_here", lambda: "99")
    with pytest.raises(InvalidInput, match=r"is up at http://127.0.0.1:9.*`torpor down` first"):
        parent.see_that_nothing_else_runs(made, wanted)


def test_another_code_of_the_same_number_is_another_version(tmp_path: Path) -> None:
    """After a `git pull`, `up` names `torpor down`: what runs was started by the code before."""
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments" / "server.py").write_text("PORT = 1")
    before = code_digest(tmp_path)
    (tmp_path / "deployments" / ".#server.py").symlink_to("me@host.1")  # an editor's lock
    assert code_digest(tmp_path) == before
    (tmp_path / "deployments" / "server.py").write_text("PORT = 2")
    assert code_digest(tmp_path) != before
    assert code_digest(CHECKOUT)[:12] in parent.version_here()


@pytest.mark.rule(20)
def test_a_full_disk_at_the_start_is_named_and_empties_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemd tries again, so its status is not the one that systemd leaves alone."""
    made = Installation(tmp_path)
    made.login()
    made.port_file.write_text("9\n")
    made.note_registered(OWN.api_url)
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(supervisor.signal, "pthread_sigmask", lambda *_: None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuses(*_: object) -> None:
        raise full

    for argv, name in ((["--port", "10"], made.port_file.name), ([], RECORD)):
        monkeypatch.setattr("sys.argv", ["supervisor", *argv])
        with monkeypatch.context() as patch:
            patch.setattr(installation.os, "fsync", refuses)
            patch.setattr(Supervision, "write", refuses)
            assert supervisor.main() == 1
        said = capsys.readouterr().err
        assert f"{tmp_path / name} cannot be written: No space left on device. Make room" in said
    with monkeypatch.context() as patch, pytest.raises(TorporError, match="registered cannot be"):
        patch.setattr(installation.os, "fsync", refuses)
        made.note_registered("http://127.0.0.1:10/api")
    assert (made.port_file.read_text(), made.is_registered(OWN.api_url)) == ("9\n", True)
    assert not running(made, LOCK, server.ROLE, *worker.ROLES)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    made = Installation(tmp_path / "home" / "state")
    told = rf"{made.folder} cannot be written: .*TORPOR_STATE"
    with pytest.raises(InvalidInput, match=told), made.locked():
        raise AssertionError("it is locked in no folder")


@pytest.mark.rule(20)
def test_what_an_earlier_version_has_started_is_named_by_up_and_ended_by_down_the_server_last(
    tmp_path: Path,
) -> None:
    """It outlives its supervisor, whose record this version cannot read."""
    made, seen = Installation(tmp_path), tmp_path / "seen"
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    writes = f"""if True:
        import os, signal, sys, time
        def ends(*_):
            open({str(seen)!r}, "w").write(str(os.path.exists("/proc/" + sys.argv[1] + "/exe")))
            sys.exit()
        signal.signal(signal.SIGTERM, ends)
        open({str(seen)!r}, "w").write("begun")
        time.sleep(600)
    """
    with begin(made, server.ROLE, waits, {}, apart=True) as serving:
        argv = [sys.executable, "-c", writes, str(serving.pid)]
        env = {"PREFECT__FLOW_RUN_ID": "1"}
        with begin(made, worker.POOLS[0].role, argv, env, apart=True) as run:
            until(seen.exists, "the run has begun", every_s=0.05)
            with pytest.raises(InvalidInput, match=r"by an earlier version .* `torpor down` first"):
                parent.see_that_nothing_else_runs(made, OWN)
            # `torpor down` asks this one which machines are rented.
            made.port_file.write_text("9\n")
            assert (runs(made), served(made)) == (True, OWN.api_url)
            down(made)
            assert run.wait(PATIENCE_S) == 0 and seen.read_text() == "True"
            assert serving.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.rule(20)
def test_down_says_where_a_supervisor_of_another_host_is_to_be_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts with one home: the lock is there, and the pid is another process's here."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as neighbour:
        Supervision(neighbour.pid, OWN.api_url, own=True).write(world.folder)
        monkeypatch.setattr(parent, "KILLED_S", 0.0)
        with pytest.raises(TorporError, match=r"none of .* is a process of this host"):
            down(Installation(world.folder))
        assert neighbour.poll() is None
        neighbour.kill()


@pytest.fixture
def alone(needs_server: None, tmp_path: Path) -> Iterator[Installation]:
    """An installation whose supervisor is a process."""
    made = Installation(tmp_path)
    yield made
    down(made)
    assert not running(made, LOCK, *worker.ROLES)


def _pid(made: Installation) -> int:
    found = living(made.folder)
    assert found
    return found.pid


def _has_ended(made: Installation) -> None:
    until(lambda: not is_held(made.folder / LOCK), "it has ended", every_s=0.05)


def test_a_supervisor_that_lives_is_kept(alone: Installation) -> None:
    assert parent.start(alone, ELSEWHERE)
    first = _pid(alone)
    assert parent.start(alone, ELSEWHERE) is None
    with pytest.raises(InvalidInput, match="run `torpor down` first"):
        parent.start(alone, Server("http://127.0.0.1:10/api", own=False))
    assert _pid(alone) == first


@pytest.mark.rule(20)
def test_a_start_that_is_broken_off_leaves_no_supervisor(
    alone: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parent, "living", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            parent.start(alone, ELSEWHERE)
    assert not running(alone, LOCK)
    assert parent.start(alone, ELSEWHERE)


@pytest.mark.rule(20)
def test_a_supervisor_that_was_killed_is_told_by_the_next_and_one_that_ended_is_not(
    alone: Installation,
) -> None:
    parent.start(alone, ELSEWHERE)
    os.kill(_pid(alone), signal.SIGKILL)
    _has_ended(alone)
    structs.replace(record_of(alone), running={"worker": 1}).write(alone.folder)
    parent.start(alone, ELSEWHERE)

    def words() -> list[str]:
        return [one.what for one in record_of(alone).events]

    until(lambda: "nothing was watched since" in "".join(words()), "it is told", every_s=0.05)
    down(alone)
    parent.start(alone, ELSEWHERE)
    assert len(words()) == 1


def record_of(made: Installation) -> Supervision:
    found = read_supervision(made.folder)
    assert found
    return found


@pytest.mark.rule(20)
def test_a_supervisor_that_is_halted_is_killed(
    alone: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent.start(alone, ELSEWHERE)
    os.kill(_pid(alone), signal.SIGSTOP)
    monkeypatch.setattr(parent, "GONE_S", 0.5)
    down(alone)
    assert living(alone.folder) is None


@pytest.mark.rule(20)
@pytest.mark.parametrize("answers", [True, False], ids=["asked", "no bus"])
def test_systemd_starts_nothing_after_down_that_it_waited_to_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: bool,
) -> None:
    """Nothing runs while it waits. A supervisor that it starts before `down` has asked it to stop
    is refused, and where it cannot be asked, `down` holds its lock for longer than it waits."""
    made, said = Installation(tmp_path), tmp_path / "said"
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path / "units")
    monkeypatch.setattr(unit, "RUNS_SYSTEMD", tmp_path)
    unit.write_unit(made, tmp_path / "units", root=os.geteuid() == 0)
    script = f"""#!{sys.executable}
import fcntl, sys
held = False
try:
    fcntl.flock(open({str(tmp_path / parent.DOWN)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    held = True
open({str(said)!r}, "a").write(f"{{held}} {{sys.argv[1:]}}\\n")
sys.exit({"0" if answers else "'Failed to connect to bus'"})
"""
    (tmp_path / "systemctl").write_text(script)
    (tmp_path / "systemctl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    waited: list[bool] = []

    def sleeps(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        if seconds == parent.RESTART_S:
            waited.append(is_held(made.folder / parent.DOWN))
        else:
            sleep(seconds)

    monkeypatch.setattr(parent.time, "sleep", sleeps)
    down(made)
    (asked,) = said.read_text().splitlines()
    assert asked.startswith("True") and asked.endswith(f"'stop', '{unit.NAME}']")
    printed = capsys.readouterr().out
    if answers:
        assert (waited, printed) == ([], "torpor was not up.\n")
    else:
        assert waited == [True] and parent.RESTART_S > unit.MOST_PAUSE_S
        assert "(Failed to connect to bus): run `systemctl " in printed
    said.unlink()

    def outlives(look: object, polite_s: float) -> Any:
        raise TorporError("a flow run outlives SIGKILL")

    with monkeypatch.context() as patch, pytest.raises(TorporError, match="outlives"):
        patch.setattr(parent, "end_processes", outlives)
        parent.end(made)
    assert said.read_text().count("'stop'") == 1  # also where something else has failed
    said.unlink()
    down(Installation(tmp_path / "another"))  # the unit is not its
    assert not said.exists()


@pytest.mark.rule(20)
def test_the_unit_of_an_earlier_version_starts_this_one_and_does_not_loop(
    alone: Installation,
) -> None:
    """It starts again whatever ends with another status than 0, for ever."""
    env = {**os.environ, "TORPOR_STATE": str(alone.folder), "PREFECT_API_URL": ELSEWHERE.api_url}
    argv = [sys.executable, "-m", "deployments.up"]
    pipe, log = subprocess.PIPE, alone.log(LOCK)
    with subprocess.Popen([*argv, "--stay"], cwd=CHECKOUT, env=env, stderr=pipe) as it:
        until(lambda: living(alone.folder), "it lives", every_s=0.05)
        assert _pid(alone) == it.pid
        assert (
            subprocess.run([*argv, "--started"], cwd=CHECKOUT, env=env, check=False).returncode == 0
        )
        # Its own `up` finds no server of the user's. All of it is in the log that messages name.
        until(lambda: "no Prefect server answers" in log.read_text(), "it registers", every_s=0.05)
        down(alone)
        assert it.wait(PATIENCE_S) == 0
        assert it.stderr and f"prints to {log}" in it.stderr.read().decode()


def test_up_goes_on_with_a_supervisor_that_was_faster(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's, at the boot: the one that `up` has started is refused."""
    made = Installation(world.folder)
    world.held.close()

    def begin(*_: object, **__: object) -> Process:
        world.holds_the_lock()
        parent.described(ELSEWHERE).write(world.folder)
        return Process(2**22 + 1, unit.REFUSED)

    monkeypatch.setattr(parent, "begin", begin)
    monkeypatch.setattr(parent.time, "sleep", lambda _: None)
    assert parent.start(made, ELSEWHERE) is None


@pytest.mark.rule(20)
def test_systemd_is_told_of_a_supervisor_once_everybody_can_find_it(
    alone: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the unit's `up` begins: it must neither start another, nor choose another port."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)  # of the tests' own server
    port = free_ports(1)[0]
    env = {**os.environ, "TORPOR_STATE": str(alone.folder), "NOTIFY_SOCKET": f"@torpor-{port}"}
    argv = [sys.executable, "-m", unit.SUPERVISOR, "--port", str(port)]
    alone.port_file.write_text(f"{port}\n")
    os.utime(alone.port_file, (1.0, 1.0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0torpor-{port}")
        systemd.settimeout(PATIENCE_S)
        with subprocess.Popen(argv, cwd=CHECKOUT, env=env) as started:
            try:
                assert systemd.recv(100) == b"READY=1"
                assert _pid(alone) == started.pid
                assert server_of(alone).port == port
                # It was not written: a full disk would leave an empty file.
                assert alone.port_file.stat().st_mtime == 1.0
            finally:
                started.kill()


@pytest.mark.rule(20)
@pytest.mark.parametrize("by_down", [True, False], ids=["down", "a stray signal"])
def test_systemd_starts_no_supervisor_again_that_down_has_ended(
    alone: Installation, by_down: bool
) -> None:
    """By its status: one that something else has asked to end is started again."""
    env = {**os.environ, "TORPOR_STATE": str(alone.folder), "PREFECT_API_URL": ELSEWHERE.api_url}
    with subprocess.Popen([sys.executable, "-m", unit.SUPERVISOR], cwd=CHECKOUT, env=env) as it:
        until(lambda: living(alone.folder), "it lives", every_s=0.05)
        if by_down:
            down(alone)
        else:
            it.terminate()
        assert it.wait(PATIENCE_S) == (unit.REFUSED if by_down else 0)


@pytest.mark.rule(20)
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGKILL, None], ids=["asked", "killed", "down"]
)
def test_only_down_ends_flow_runs(alone: Installation, how: signal.Signals | None) -> None:
    """They outlive their worker, and so their parent's parent, also one that systemd ends."""
    env = {"PREFECT__FLOW_RUN_ID": "1"}
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    with begin(alone, worker.POOLS[0].role, waits, env, apart=True) as run:
        parent.start(alone, ELSEWHERE)
        if how is not None:
            os.kill(_pid(alone), how)
            _has_ended(alone)
            assert run.poll() is None
            parent.start(alone, ELSEWHERE)
        assert run.poll() is None
        down(alone)
        assert run.wait(PATIENCE_S) == -signal.SIGTERM


def test_workers_begin_once_everything_is_registered_at_this_server(tmp_path: Path) -> None:
    made = Installation(tmp_path)
    assert not made.is_registered(OWN.api_url)
    made.registered_file.write_text(OWN.api_url)
    assert made.is_registered(OWN.api_url)
    assert not made.is_registered("http://127.0.0.1:10/api")


@pytest.mark.rule(20)
def test_an_up_ends_with_the_supervisor_that_it_waits_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd starts no other one while the `up` beside the first goes on."""

    def ends(_: float) -> None:
        world.held.close()

    monkeypatch.setattr(parent.time, "sleep", ends)
    with pytest.raises(TorporError, match="the supervisor has ended"):
        parent.start(Installation(world.folder), OWN)


def test_a_worker_that_does_not_begin_is_told_to_up(world: World) -> None:
    made, role = Installation(world.folder), worker.POOLS[0].role
    record = Supervision(1, OWN.api_url, own=True, troubles={role: ["cannot be started"]})
    record.write(world.folder)
    with pytest.raises(TorporError, match=r"did not begin within .*: cannot be started"):
        parent.see_that_they_run(made, worker.ROLES, -1.0)
    structs.replace(record, running=dict.fromkeys(worker.ROLES, 1)).write(world.folder)
    parent.see_that_they_run(made, worker.ROLES, -1.0)
    world.held.close()
    with pytest.raises(TorporError, match="the supervisor has ended"):
        parent.see_that_they_run(made, worker.ROLES, -1.0)


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


@pytest.mark.rule(20)
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


@pytest.mark.rule(20)
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


@pytest.mark.rule(20)
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
    assert printed_since(LOG_BYTES, made.log("x")) == b"after"
    kept = tmp_path / "x.log.1"
    assert kept.read_bytes().startswith(b"the crash\nagain\n")
    assert kept.stat().st_mode & 0o777 == made.log("x").stat().st_mode & 0o777
