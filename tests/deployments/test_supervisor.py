"""What the supervisor restarts, when, and what it says of it; in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deployments import supervisor
from deployments.down import down
from deployments.installation import CHECKOUT, Installation
from deployments.processes import LOG_BYTES, launch, trim
from deployments.server import Server
from deployments.supervisor import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, Part, Supervisor
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.processes import ProcessRecord, boot_id, identify
from torpor.control.supervision import Supervision, read_supervision, told


@dataclass
class World:
    """A part that runs while ``alive``, and a clock."""

    folder: Path
    now: float = 1000.0
    alive: bool = True
    breaks: str = ""
    unseen: str = ""
    lives: bool = True
    started: list[float] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    def supervisor(self) -> Supervisor:
        own = identify(os.getpid())
        assert own
        return Supervisor(
            [Part("server", self.find, self.start, self.folder / "server.log")],
            [("disk", 60.0, self.check)],
            lambda record: record.write(self.folder),
            Supervision(own, boot_id(), 0.0),
            monotonic=lambda: self.now,
            unix=lambda: self.now,
        )

    def find(self) -> ProcessRecord | None:
        if self.unseen:
            raise OSError(self.unseen)
        return ProcessRecord(2**22 + 1, 1) if self.alive else None  # no pid is so high

    def start(self) -> None:
        self.started.append(self.now)
        if self.breaks:
            raise OSError(self.breaks)
        self.alive = self.lives

    def check(self) -> list[str]:
        if self.breaks:
            raise OSError(self.breaks)
        return self.found

    def told(self) -> list[str]:
        return told(self.folder, since_unix=0.0, now_unix=self.now)


def test_what_ends_is_restarted_at_once_and_then_less_and_less_often(tmp_path: Path) -> None:
    world = World(tmp_path)
    supervisor = world.supervisor()
    supervisor.look()
    assert (world.started, world.told()) == ([], [])
    (tmp_path / "server.log").write_text("Traceback\nMemoryError\n")
    world.alive = False
    supervisor.look()
    assert world.started == [1000.0]
    ended, restarted = world.told()
    assert ended.startswith("server 1970-01-01 00:16:40 UTC: process 4194305 has ended; the last")
    assert ended.endswith("server.log: MemoryError")
    assert "restarted" in restarted
    world.breaks, world.alive = "the disk is gone", False
    while len(world.started) < 12:
        supervisor.look()
        world.now += 1.0
    waits = [b - a for a, b in zip(world.started, world.started[1:], strict=False)]
    assert waits[0] == FIRST_WAIT_S
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S
    assert "server: cannot be started; next try in 300 s: the disk is gone" in world.told()
    world.breaks = ""
    world.now += LONGEST_WAIT_S
    supervisor.look()
    assert not any(line.startswith("server: ") for line in world.told())
    world.now += STEADY_S + 1
    world.alive = False
    supervisor.look()
    assert world.started[-1] == world.now  # it ran well for long enough: at once again


def test_what_ends_right_after_each_start_is_not_started_without_pause(tmp_path: Path) -> None:
    world = World(tmp_path, alive=False, lives=False)
    supervisor = world.supervisor()
    for _ in range(100):
        supervisor.look()
        world.now += 1.0
    assert len(world.started) < 8


def test_a_check_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, found=["disk full"])
    supervisor = world.supervisor()
    supervisor.look()
    assert world.told()[0] == "disk: disk full"
    world.found, world.now = [], world.now + 59.0
    supervisor.look()
    assert world.told()[0] == "disk: disk full"  # it was not due
    world.breaks, world.now = "statvfs failed", world.now + 1.0
    supervisor.look()
    assert world.told()[0] == "disk: could not be checked: statvfs failed"
    world.breaks, world.now = "", world.now + 60.0
    supervisor.look()
    assert all("UTC" in line for line in world.told())  # what was, and nothing that is


def test_a_part_that_cannot_be_looked_at_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, unseen="too many open files", found=["disk full"])
    looking = world.supervisor()
    looking.look()
    assert world.told()[:2] == [
        "server: could not be looked at: too many open files",
        "disk: disk full",
    ]
    world.unseen = ""
    looking.look()
    assert world.told()[0] == "disk: disk full"


@pytest.mark.parametrize("how", [MemoryError, SystemExit], ids=["crash", "SIGTERM"])
def test_only_make_down_ends_a_supervisor_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: type[BaseException]
) -> None:
    """Else systemd would not start it again. `make up` sends SIGTERM, too."""

    def end(_: float) -> None:
        raise how

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(supervisor, "parts_of", lambda *_: [])
    monkeypatch.setattr(supervisor, "CHECKS", ())
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(supervisor.time, "sleep", end)
    with pytest.raises(how):
        supervisor.main()
    monkeypatch.undo()
    seen = read_supervision(tmp_path)
    assert seen and not seen.ended
    down(Installation(tmp_path))
    seen = read_supervision(tmp_path)
    assert seen and seen.ended


def test_a_server_that_hangs_is_ended_and_one_that_is_slow_once_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    ended: list[Installation] = []
    lives = [True]
    own = Server("http://127.0.0.1:9/api", own=True)
    monkeypatch.setattr(supervisor.server, "answers", lambda _: answers.pop(0))
    monkeypatch.setattr(supervisor.server, "stop", ended.append)
    monkeypatch.setattr(supervisor, "started_process", lambda *_: lives[0] or None)
    check, made = supervisor.Answers(), Installation(tmp_path)
    answers += [False] * 4 + [True] + [False] * 4
    assert [check.look(made, own) for _ in range(9)] == [[]] * 9
    answers += [False] * 10
    assert "did not answer, 5 times in a row" in check.look(made, own)[0]
    lives[0] = False  # its part starts it again
    assert [check.look(made, own) for _ in range(9)] == [[]] * 9
    assert ended == [made]


def test_a_supervisor_that_has_gone_is_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert "has no supervisor: run `make up`" in world.told()[0]
    supervisor = world.supervisor()
    supervisor.look()
    assert world.told() == []
    world.now += 2000.0
    assert "has looked at nothing for 2000 s" in world.told()[0]
    seen = read_supervision(tmp_path)
    assert seen
    Supervision(ProcessRecord(seen.process.pid, 1), seen.boot, world.now).write(tmp_path)
    assert "has ended: run `make up`" in world.told()[0]
    down(Installation(tmp_path))
    assert "has no supervisor: run `make up`" in world.told()[0]


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
    pid = launch(made, "x", ["echo", "again"], {}).pid
    os.waitpid(pid, 0)
    assert made.log("x").read_text() == "the crash\nagain\n"
    with made.log("x").open("ab") as log:
        log.truncate(LOG_BYTES + 1)
        trim(made.log("x"))
        log.write(b"after")
    assert made.log("x").read_bytes() == b"after"
    kept = tmp_path / "x.log.1"
    assert kept.read_bytes().startswith(b"the crash\nagain\n")
    assert kept.stat().st_mode & 0o777 == made.log("x").stat().st_mode & 0o777
