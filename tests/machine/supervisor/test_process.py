"""The supervisor's process: one command at a time, whoever dies, and how it ended."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import torpor
from tests.fixtures.kill_points import killed_at
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.short_agent import copy_agent
from tests.fixtures.supervised import JOB, Machine, end_all_of, listens
from tests.fixtures.waiting import until
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.agent.operations import operations
from torpor.machine.checkpoint.tree import mark
from torpor.machine.supervisor.marker import MARKER
from torpor.machine.supervisor.processes import identify
from torpor.shared.errors import AgentLost, InvalidInput
from torpor.shared.values import PROGRAMS, SnapshotId
from torpor.shared.wire.snapshot import IMAGE_FILES

WAITS = "while [ ! -e go ]; do sleep 0.02; done"


def test_a_command_runs_to_its_end_and_its_output_is_in_the_log(machine: Machine) -> None:
    state = machine.shell("echo hello; echo oops >&2; exit 3")
    assert (state.job, state.attempt) == (JOB, 1)
    ended = machine.ended()
    assert (ended.state, ended.status) == ("ended", 3)
    assert ended.ended_unix is not None and ended.started_unix <= ended.ended_unix
    first, *said, last = machine.log.read_text().splitlines()
    assert first.startswith("torpor: attempt 1 begins")
    assert said == ["hello", "oops"]
    assert last.startswith("torpor: attempt 1 ended with status 3")
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")


def test_a_signal_is_a_negative_status(machine: Machine) -> None:
    machine.shell("kill -9 $$")
    assert machine.ended().status == -9
    assert "ended by signal 9 (SIGKILL)" in machine.log.read_text()


def test_the_command_has_a_session_the_folder_and_a_clean_environment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_AGENT", "yes")
    machine.shell(
        "env > env; grep SigIgn /proc/self/status > ignored; ls /proc/self/fd > files; cat > stdin;"
        "pwd > folder; echo $$ > pid; cut -d' ' -f6 /proc/$$/stat > session"
    )
    machine.ended()
    pid = machine.kept().command.pid
    assert [int(machine.file(name)) for name in ("pid", "session")] == [pid, pid]
    assert machine.file("folder").strip() == str(machine.work)
    of_the_c_library = 0b11 << 31  # signals 32 and 33, which no program may set
    assert int(machine.file("ignored").split()[1], 16) & ~of_the_c_library == 0
    assert machine.file("files").split() == ["0", "1", "2", "3"]  # the last one is the folder's
    assert (machine.work / "stdin").read_text() == ""
    environment = dict(line.split("=", 1) for line in machine.file("env").splitlines())
    assert (environment["TORPOR_JOB"], environment["TORPOR_ATTEMPT"]) == (JOB, "1")
    assert environment["OF_THE_AGENT"] == "yes"
    assert {n for n in environment if n.startswith("PYTHON")} == {
        n for n in os.environ if n.startswith("PYTHON")
    }


def test_what_is_written_is_for_us_alone(machine: Machine) -> None:
    machine.shell(WAITS)
    modes = {
        path.name: stat.S_IMODE(path.lstat().st_mode)
        for path in [machine.home / "jobs", *(machine.home / "jobs").rglob("*")]
    }
    assert modes == {
        "jobs": 0o700, JOB: 0o700, "alive": 0o600, "state": 0o600, "socket": 0o600, "log": 0o600
    }  # fmt: skip
    assert stat.S_IMODE(machine.log.stat().st_mode) == 0o600


def test_it_outlives_the_agent_and_is_none_of_its_runs(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.agent.restart()
    assert not machine.agent.hello.busy
    assert machine.state().state == "running"
    kept = machine.kept()
    assert os.getsid(kept.supervisor.pid) == kept.supervisor.pid != kept.command.pid
    assert os.readlink(f"/proc/{kept.supervisor.pid}/fd/0") == os.devnull
    (machine.work / "go").touch()
    assert machine.ended().status == 0


def test_an_attempt_is_started_once_however_often_it_is_asked_for(machine: Machine) -> None:
    counts = f"echo 1 >> count; {WAITS}"
    machine.shell(counts)
    pid = machine.kept().command.pid
    assert [machine.shell(counts, attempt).attempt for attempt in (1, 1, 2)] == [1, 1, 1]
    assert machine.kept().command.pid == pid
    (machine.work / "go").touch()
    machine.ended()
    assert machine.shell(counts).state == "ended"
    machine.shell(counts, attempt=2)
    assert machine.ended().attempt == 2
    assert machine.shell(counts, attempt=1).attempt == 2
    assert (machine.work / "count").read_text() == "1\n1\n"


def test_many_starts_at_once_start_one(machine: Machine) -> None:
    script = f"echo 1 >> count; {WAITS}"
    with ThreadPoolExecutor(6) as pool:
        states = list(pool.map(lambda attempt: machine.shell(script, attempt), [1, 1, 1, 2, 2, 2]))
    assert {state.state for state in states} == {"running"}
    assert len({state.attempt for state in states}) == 1
    assert machine.file("count") == "1\n"


@pytest.mark.parametrize(
    ("argv", "folder", "status", "words"),
    [
        (["no-such-program"], "", 127, f"No such file or directory. PATH is {os.environ['PATH']}:"),
        (["./a-file"], "", 126, "'./a-file': Permission denied"),
        (["true"], "missing", 127, "No such file or directory"),
    ],
)
def test_what_cannot_be_started_ends_with_the_reason(
    machine: Machine, argv: list[str], folder: str, status: int, words: str
) -> None:
    (machine.work / "a-file").write_text("no program")
    machine.start(*argv, folder=str(machine.work / folder))
    ended = machine.ended()
    assert (ended.state, ended.status) == ("ended", status)
    assert words in ended.error
    assert f"attempt 1 could not start {ended.error}" in machine.log.read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": []},
        {"argv": ["a\0b"]},
        {"folder": "work"},
        {"log": "job.log"},
        {"log": "/proc/version/job.log"},
        {"log": "/dev/null"},
        {"job": "../../etc"},
        {"attempt": 0},
    ],
)
def test_what_can_never_be_started_is_refused(machine: Machine, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        machine.start("true", **wrong)
    assert machine.state().state == "none"


def test_paths_may_begin_at_the_users_home(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(machine.work))
    machine.shell("pwd", folder="~/", log="~/deep/er/job.log")
    machine.ended()
    assert str(machine.work) in (machine.work / "deep/er/job.log").read_text()


def test_while_its_command_is_frozen_the_log_stays_and_its_end_is_not_taken_for_a_failure(
    machine: Machine,
) -> None:
    """Whoever freezes it holds the lock of its log; it goes on with the log as it is."""
    machine.shell(f"echo one; {WAITS}")
    until(lambda: "one" in machine.look().text, "it writes")
    lock = until(machine.folder.take_log, "its supervisor does not look")
    assert lock is not None
    machine.log.unlink()
    os.kill(machine.kept().command.pid, 9)
    machine.folder.path.joinpath("socket").unlink()
    until(lambda: listens(machine.folder), "it has looked since")
    assert not machine.log.exists()
    assert machine.state().state == "running"
    os.close(lock)
    assert machine.ended().status == -9
    assert "one" in machine.log.read_text()


def test_a_frozen_command_that_nobody_lets_go_on_or_stops_keeps_its_machine_for_half_a_day(
    machine: Machine, tmp_path: Path
) -> None:
    """While its supervisor lives, nothing else is stored there: the machine could not be ended with
    proof for ever. Its job may have ended without a word to the machine."""
    changed = ("torpor/machine/supervisor/process.py", "FROZEN_S: Final = 12 * 3600.0", _NO_TIME)
    source = copy_agent(tmp_path / "soon", changed)
    (source / "__main__.py").write_text(_MAIN)
    argv = [sys.executable, str(source), "supervise", "--home", str(machine.home)]
    machine.agent.table = operations(machine.agent.runs, argv, *machine.agent.argv[1:])
    images, snapshot = machine.work / PROGRAMS / JOB, SnapshotId("20261120T000000Z-00000000")
    machine.shell(WAITS, images=str(images), criu=str(tmp_path), freezes=True)
    images.mkdir(parents=True)
    for name in IMAGE_FILES:
        (images / name).write_text("{}")
    mark(images, snapshot)
    os.kill(machine.kept().command.pid, 9)
    assert machine.ended().frozen == snapshot
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")
    machine.agent.snapshot([machine.work])
    assert not images.exists()


_NO_TIME = "FROZEN_S: Final = 0.0"
_MAIN = "import sys\nfrom torpor.machine.agent.__main__ import main\nsys.exit(main(sys.argv))\n"


# -- lost supervisors


@pytest.mark.rule(16)
def test_a_lost_supervisors_command_is_ended_before_the_next_one_starts(machine: Machine) -> None:
    alone = f"{_ALONE}{WAITS}"
    machine.shell(alone)
    until((machine.work / "alone").exists, "it runs")
    kept = machine.supervisor_dies()
    assert machine.state().state == "lost"
    assert kept.command.lives
    assert machine.shell(alone).state == "lost"  # the same attempt is not started again
    assert kept.command.lives
    assert machine.shell(alone, attempt=2).state == "running"
    assert not kept.command.lives
    until((machine.work / "alone").exists, "the second runs")
    assert not (machine.work / "two-at-once").exists()


@pytest.mark.rule(16)
def test_what_it_left_in_the_background_goes_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.machine.agent.jobs.LEFT_GRACE_S", 0.1)
    sleeps = f"{sys.executable} -I -c 'import time; time.sleep(600)'"
    script = (
        f"setsid {sleeps} & echo $! >> pids; env -i {sleeps} & echo $! >> pids; "
        f"trap '' TERM; {WAITS}"
    )
    machine.shell(script)
    until(lambda: len(machine.file("pids").split()) == 2, "all have begun")
    pids = [int(pid) for pid in machine.file("pids").split()]
    machine.supervisor_dies()
    machine.start("true", attempt=2)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")] == []


_ORPHAN = "sh -c 'env -i setsid sleep 600 & echo $! > pid.new; mv pid.new pid'"
"""It has neither the command's session nor its environment, and its parent has ended."""


def test_a_stop_ends_what_left_the_session_and_cleared_its_environment(machine: Machine) -> None:
    machine.shell(f"{_ORPHAN}; {WAITS}")
    orphan = identify(int(machine.file("pid")))
    machine.stop()
    assert not orphan.lives


@pytest.mark.parametrize("then", ["it is stopped", "another attempt"])
def test_an_orphan_outlives_its_command_and_not_what_comes_next(
    machine: Machine, then: str
) -> None:
    machine.shell(_ORPHAN)
    machine.ended()
    orphan, supervisor = identify(int(machine.file("pid"))), machine.kept().supervisor
    assert orphan.lives and supervisor.lives
    if then == "it is stopped":
        machine.stop()
    else:
        machine.shell("true", attempt=2)
    assert not orphan.lives
    until(lambda: not supervisor.lives, "the supervisor leaves")


@pytest.mark.rule(16)
def test_after_a_boot_no_process_is_taken_for_the_commands(machine: Machine) -> None:
    """Of an earlier boot, and of a pid that another process has by now."""
    machine.shell(WAITS)
    kept = machine.supervisor_dies()
    machine.stop(grace_s=0)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        for change in ({"boot": "0" * 32}, {"ticks": 1}):
            stranger = msgspec.structs.replace(
                msgspec.structs.replace(kept.command, pid=other.pid), **change
            )
            machine.folder.write(msgspec.structs.replace(kept, command=stranger))
            assert machine.state().state == "lost"
            machine.stop(grace_s=0)
            assert other.poll() is None
        other.kill()


# -- torpor's folder, removed


@pytest.mark.rule(16)
@pytest.mark.parametrize("removed", ["", "/.t*", "/jobs", "/jobs/*/*", "/jobs/*/alive"])
def test_what_a_command_removes_of_torpors_folder_is_made_again(
    machine: Machine, removed: str
) -> None:
    script = f"echo 1 >> count; rm -rf {machine.home}{removed}; touch removed; {WAITS}; exit 7"
    machine.shell(script)
    until((machine.work / "removed").exists, "it is removed")
    until(machine.home.exists, "it is made again")
    assert [machine.shell(script, attempt).attempt for attempt in (1, 2)] == [1, 1]
    (machine.work / "go").touch()
    ended = machine.ended()
    assert (ended.attempt, ended.state, ended.status) == (1, "ended", 7)
    assert machine.file("count") == "1\n"
    until(lambda: (machine.home / MARKER).exists(), "the folder is torpor's")
    until(lambda: not machine.kept().supervisor.lives, "its supervisor leaves")
    assert machine.shell("true", attempt=2).attempt == 2


@pytest.mark.rule(16)
def test_a_stop_ends_a_command_of_which_its_machine_knows_nothing(machine: Machine) -> None:
    machine.shell(WAITS)
    command = machine.supervisor_dies().command
    shutil.rmtree(machine.home)
    assert machine.stop().state == "none"
    assert not command.lives


def test_no_supervisor_stays_where_the_place_of_torpors_folder_is_gone(
    needs_server: None, memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    machine = Machine(memory_store, inner)
    log = str(tmp_path / "job.log")
    machine.shell(f"{_ORPHAN}; {WAITS}", log=log, folder=str(tmp_path))
    supervisor = machine.kept().supervisor
    shutil.rmtree(inner)
    (tmp_path / "go").touch()
    until(lambda: not supervisor.lives, "the supervisor leaves")
    assert not inner.exists()
    end_all_of(tmp_path)


# -- killed at each step

_ALONE = "trap 'trap \"\" TERM; rmdir alone; exit 1' TERM; mkdir alone || touch two-at-once; "
"""Whoever ends the command asks each of its new processes to end: rmdir must not listen. The trap
comes first: a command that is ended right behind its mkdir would leave the folder."""

_STEPS = {
    "it listens": "KILL; self._requests = Requests(",
    "its log is open": "KILL; output = log.open_log(request.log)",
    "the child waits": "KILL; os.close(output)",
    "the child is on record": "KILL; error = self._command.go()",
    "the command runs": "error = self._command.go(); KILL",
    "the command has ended": "KILL; how = f",
}
"""Where the supervisor is killed."""


@pytest.mark.rule(16)
@pytest.mark.parametrize("step", _STEPS)
def test_killed_at_any_step_it_leaves_one_command_at_most(
    machine: Machine, step: str, tmp_path: Path
) -> None:
    own = machine.agent.table
    killed = _killed_at(_STEPS[step], machine, tmp_path)
    machine.agent.table = operations(machine.agent.runs, killed, *machine.agent.argv[1:])
    script = f"{_ALONE}echo $TORPOR_ATTEMPT >> ran; {WAITS}; rmdir alone"
    recorded = list(_STEPS).index(step) >= 3
    if step == "the command has ended":
        (machine.work / "go").touch()
    try:
        machine.shell(script)
    except AgentLost:
        assert not recorded
    until(lambda: machine.state().state == ("lost" if recorded else "none"), "it has died")
    if step in ("the command runs", "the command has ended"):
        machine.file("ran")
    machine.agent.table = own
    (machine.work / "go").unlink(missing_ok=True)
    assert machine.shell(script, attempt=2).state == "running"
    until(lambda: "2" in machine.file("ran"), "the second runs")
    (machine.work / "go").touch()
    assert machine.ended().status == 0
    assert not (machine.work / "two-at-once").exists()
    first = ["1"] if step in ("the command runs", "the command has ended") else []
    assert machine.file("ran").split() == [*first, "2"]


def _killed_at(line: str, machine: Machine, folder: Path) -> list[str]:
    """The argv of a supervisor that dies before that line."""
    source = folder / "killed"
    shutil.copytree(Path(torpor.__file__).parent, source / "torpor")
    path = source / "torpor/machine/supervisor/process.py"
    text = path.read_text()
    was = line.replace("KILL; ", "").replace("; KILL", "")
    assert text.count(was) == 1
    path.write_text(text.replace(was, line.replace("KILL", "os.kill(os.getpid(), 9)")))
    (source / "__main__.py").write_text(_MAIN)
    return [sys.executable, str(source), "supervise", "--home", str(machine.home)]


# -- killed agents


@pytest.mark.rule(16)
def test_an_agent_killed_at_any_step_of_a_start_may_be_asked_again(machine: Machine) -> None:
    script = f"mkdir alone || touch two-at-once; echo $TORPOR_ATTEMPT >> ran; {WAITS}; rmdir alone"
    steps = 0
    for attempt in range(1, 100):
        (machine.work / "go").unlink(missing_ok=True)
        killed = killed_at(attempt, lambda attempt=attempt: machine.shell(script, attempt))  # type: ignore[misc]
        state = machine.shell(script, attempt)
        assert (state.state, state.attempt) == ("running", attempt)
        (machine.work / "go").touch()
        assert machine.ended().status == 0
        steps += killed
        if not killed:
            break
    assert steps >= 5
    assert machine.file("ran").split() == [str(number + 1) for number in range(steps + 1)]
    assert not (machine.work / "two-at-once").exists()


def test_a_log_that_became_a_folder_hinders_no_end(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.log.unlink()
    machine.log.mkdir()
    (machine.work / "go").touch()
    assert machine.ended().status == 0


def test_an_end_that_cannot_be_written_is_written_later(machine: Machine) -> None:
    machine.shell(f"{WAITS}; exit 7")
    hinder = machine.folder.path / ".state"
    hinder.mkdir()
    (machine.work / "go").touch()
    noted = machine.home / LOG_FILE
    until(lambda: b"cannot be written" in noted.read_bytes(), "the supervisor has tried")
    assert machine.state().state == "running"
    hinder.rmdir()
    assert machine.ended().status == 7


def test_a_program_whose_first_thread_has_ended_is_ended_too(machine: Machine) -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "open('up', 'w').write('1')\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    machine.start(sys.executable, "-I", "-c", program)
    machine.file("up")
    command = machine.kept().command
    stat_of = Path(f"/proc/{command.pid}/stat")
    until(lambda: stat_of.read_text().rpartition(")")[2].split()[0] == "Z", "its thread has ended")
    assert command.lives
    machine.supervisor_dies()
    machine.stop()
    assert not command.lives
