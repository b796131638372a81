"""job.look and job.stop: what the log holds, piece by piece, and an end that leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.other_account import process_of_another
from tests.fixtures.supervised import JOB, Machine
from tests.fixtures.waiting import until
from torpor.machine.supervisor import log
from torpor.machine.supervisor.processes import MARK, of_job
from torpor.shared.errors import InvalidInput
from torpor.shared.wire.job import JobLook, JobState

WAITS = "while [ ! -e go ]; do sleep 0.02; done"
SLEEPS = [sys.executable, "-I", "-c", "import time; time.sleep(600)"]


def read_whole(path: Path, most_bytes: int) -> str:
    """As a driver does: piece by piece, until no more comes."""
    text, offset = "", 0
    while (piece := log.read(str(path), offset, most_bytes, 0, whole=True)).offset > offset:
        text, offset = text + piece.text, piece.offset
    return text


# -- the log


@given(data=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), most=st.integers(0, 9))
def test_pieces_make_the_whole_text(
    data: bytes, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(data)
    assert read_whole(path, most) == data.decode(errors="replace")


def test_a_character_that_is_half_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("a€".encode()[:-1])
    assert log.read(str(path), 0, 100, 0, whole=False) == ("a", 1)
    assert log.read(str(path), 1, 100, 0, whole=False) == ("", 1)
    assert log.read(str(path), 1, 100, 0, whole=True) == ("\ufffd", 3)


def test_a_log_that_became_shorter_is_read_from_where_the_attempt_began(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\nnew\n")
    assert log.read(str(path), 500, 100, 4, whole=False) == ("new\n", 8)
    assert log.read(str(path), 500, 100, 50, whole=False) == ("old\nnew\n", 8)
    path.unlink()
    assert log.read(str(path), 500, 100, 4, whole=False) == ("", 0)


def test_a_log_that_is_cut_while_it_runs_goes_on(machine: Machine) -> None:
    machine.shell("echo one; touch cut; while [ ! -e go ]; do sleep 0.02; done; echo two")
    until((machine.work / "cut").exists, "it wrote")
    os.truncate(machine.log, 0)
    (machine.work / "go").touch()
    ended = machine.ended()
    assert ended.status == 0
    text = machine.look(offset=10_000).text
    assert text.startswith("two\ntorpor: attempt 1 ended with status 0")


def test_a_log_that_is_moved_away_hinders_nothing(machine: Machine) -> None:
    machine.shell("echo one; touch moved; while [ ! -e go ]; do sleep 0.02; done; echo two")
    until((machine.work / "moved").exists, "it wrote")
    machine.log.rename(machine.work / "old.log")
    assert machine.look(offset=3) == JobLook(machine.state(), "", 0)
    (machine.work / "go").touch()
    assert machine.ended().status == 0
    assert machine.look().text.startswith("torpor: attempt 1 ended")
    assert machine.file("old.log").endswith("one\ntwo\n")


def test_a_log_that_is_removed_is_written_again(machine: Machine) -> None:
    """`git clean -fdx` removes it with its folder, however often."""
    again = f"rm -r {machine.log.parent}; echo two; touch removed; {WAITS}; echo three"
    machine.shell(f"echo one; {again}; rm -r {machine.log.parent}; echo four")
    until((machine.work / "removed").exists, "it is removed")
    until(lambda: "two" in machine.look().text, "it is written again")
    (machine.work / "go").touch()
    ended = machine.ended()
    text = machine.look().text
    said = [line for line in text.splitlines() if not line.startswith("torpor: ")]
    assert (ended.status, said) == (0, ["one", "two", "three", "four"])
    assert text.startswith("torpor: attempt 1 begins")
    assert "torpor: the log was removed: its lines up to here are written again" in text
    assert "torpor: attempt 1 ended with status 0" in text.splitlines()[-1]


def test_a_log_that_was_replaced_by_another_file_gets_what_is_new(machine: Machine) -> None:
    """As editors save."""
    machine.shell(f"echo one; touch up; {WAITS}; echo two")
    until((machine.work / "up").exists, "it wrote")
    until(lambda: machine.look(0, 0).bytes == machine.log.stat().st_size, "it was looked at")
    fresh = machine.work / "fresh"
    fresh.write_text("edited\n")
    fresh.rename(machine.log)
    (machine.work / "go").touch()
    machine.ended()
    assert [line for line in machine.look().text.splitlines() if "torpor" not in line][-1] == "two"


def _file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file of the user\n")


def _loop(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


@pytest.mark.parametrize("become", [_file, _loop], ids=["a file", "a loop"])
def test_the_end_of_a_command_is_known_apart_from_its_log(
    machine: Machine, become: Callable[[Path], None]
) -> None:
    machine.shell(f"{WAITS}; exit 7")
    become(machine.log.parent)
    look = machine.look(offset=5)
    assert (look.state.state, look.text, look.offset) == ("running", "", 5)
    assert look.unread
    assert machine.shell("true").state == "running"
    (machine.work / "go").touch()
    assert machine.ended().status == 7
    assert machine.stop().status == 7
    with pytest.raises(InvalidInput, match="cannot be written on the machine"):
        machine.shell("true", attempt=2)


@pytest.mark.parametrize("folder", [".torpor-jobs", ".torpor-process"])
def test_git_leaves_the_folders_of_logs_out(machine: Machine, folder: str) -> None:
    machine.shell("true", log=str(machine.work / folder / "1.log"))
    machine.ended()
    assert machine.file(f"{folder}/.gitignore") == "*\n"


def test_a_long_log_keeps_its_newest_lines(machine: Machine) -> None:
    most = log.MOST_LOG_BYTES
    machine.shell(f"yes 1234567 | head -c {most + 8}; touch full; {WAITS}; echo last")
    until((machine.work / "full").exists, "it wrote")
    until(lambda: machine.log.stat().st_size <= most, "its supervisor cuts the log")
    (machine.work / "go").touch()
    machine.ended()
    cut, *lines = machine.log.read_text().splitlines()
    assert cut.startswith("torpor: older lines are gone: a log is cut at 64 MiB")
    assert lines[-2] == "last"
    assert {*lines[:-2]} == {"1234567"}
    assert most // 4 < machine.log.stat().st_size


def test_logs_of_earlier_jobs_are_removed_and_nothing_else(machine: Machine) -> None:
    machine.log.parent.mkdir()
    for name in ("aaaaaaaaaaaa.log", "bbbbbbbbbbbb.log", "mine.log"):
        (machine.log.parent / name).touch()
    machine.shell("true", forget=["aaaaaaaaaaaa", "cccccccccccc"])
    kept = {path.name for path in machine.log.parent.iterdir()}
    assert kept == {"bbbbbbbbbbbb.log", "mine.log", machine.log.name}
    machine.ended()
    with pytest.raises(InvalidInput, match="is not a job's id"):
        machine.shell("true", attempt=2, forget=["../mine"])


def test_each_attempt_says_where_its_log_begins(machine: Machine) -> None:
    machine.shell("printf 'no newline'; exit 1")
    assert machine.ended().log_from == 0
    size = machine.log.stat().st_size
    machine.shell("echo again", attempt=2)
    ended = machine.ended()
    assert ended.log_from == size
    text = machine.look(offset=ended.log_from).text
    assert text.startswith("torpor: attempt 2 begins") and "\nagain\n" in text
    assert "no newline\ntorpor: attempt 1 ended with status 1" in machine.look().text


def test_where_nothing_was_started_there_is_nothing(machine: Machine) -> None:
    nothing = JobState(JOB, 0, "none")
    assert machine.look(offset=7) == JobLook(nothing, "", 7)
    assert machine.stop() == nothing
    assert not machine.folder.path.exists()


# -- the end


def test_a_stop_lets_the_command_end_by_itself(machine: Machine) -> None:
    machine.shell("trap 'echo saved > saved; exit 5' TERM; touch up; while :; do sleep 0.02; done")
    until((machine.work / "up").exists, "it runs")
    state = machine.stop()
    assert (state.state, state.status) == ("ended", 5)
    assert machine.file("saved") == "saved\n"
    assert machine.stop() == state
    assert machine.shell("touch again") == state


def test_what_does_not_listen_is_killed_with_all_that_it_began(machine: Machine) -> None:
    machine.shell(
        f"trap '' TERM; {' '.join(SLEEPS[:-1])} '{SLEEPS[-1]}' & echo $! > below; "
        "setsid sh -c 'trap \"\" TERM; echo $$ > apart; while :; do sleep 0.02; done' & wait; wait"
    )
    below, apart = int(machine.file("below")), int(machine.file("apart"))
    assert machine.stop(grace_s=0.2).status == -signal.SIGKILL
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in (below, apart))


def test_a_stopped_process_is_ended_too(machine: Machine) -> None:
    machine.start(*SLEEPS)
    os.kill(machine.kept().command.pid, signal.SIGSTOP)
    assert machine.stop().status == -signal.SIGTERM


def test_a_stop_ends_what_an_ended_command_left_in_the_background(machine: Machine) -> None:
    machine.shell(f"{' '.join(SLEEPS[:-1])} '{SLEEPS[-1]}' & echo $! > below")
    assert machine.ended().status == 0
    below = int(machine.file("below"))
    assert os.path.exists(f"/proc/{below}/exe")
    assert machine.stop().status == 0
    assert not os.path.exists(f"/proc/{below}/exe")


def test_a_stop_needs_no_supervisor(machine: Machine) -> None:
    machine.start(*SLEEPS)
    kept = machine.supervisor_dies()
    assert machine.stop().state == "lost"
    assert not kept.command.lives
    assert machine.stop().state == "lost"


def test_another_jobs_processes_are_left_alone(machine: Machine) -> None:
    machine.start(*SLEEPS)
    other = machine.home / "jobs" / "ffffffffffff"
    with subprocess.Popen(SLEEPS, env={"TORPOR_JOB_FOLDER": str(other)}) as beside:
        machine.stop()
        assert beside.poll() is None
        beside.kill()


@pytest.mark.parametrize("grace_s", [-1.0, 1e6])
def test_a_grace_is_bounded(machine: Machine, grace_s: float) -> None:
    with pytest.raises(InvalidInput):
        machine.stop(grace_s)


@pytest.mark.rule(21)
def test_a_process_of_another_account_is_none_of_a_jobs(tmp_path: Path) -> None:
    """Any account can start one whose environment names the job's folder."""
    with process_of_another({MARK: str(tmp_path)}) as pid:
        until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes(), "it has begun")
        assert pid not in of_job(tmp_path, None, None)
    own = subprocess.Popen(SLEEPS, env={MARK: str(tmp_path)})
    try:
        until(lambda: of_job(tmp_path, None, None) == [own.pid], "its own one counts")
    finally:
        own.kill()
        own.wait()


def test_what_a_log_stands_in_is_made_again_once_its_command_has_ended(tmp_path: Path) -> None:
    """A job may remove its workspace and clone into it; git takes no folder that holds files."""
    path = tmp_path / "workspace" / ".torpor-jobs" / "job.log"
    os.close(log.open_log(str(path)))
    log.say(str(path), "begins")
    output = log.Output(str(path))
    shutil.rmtree(tmp_path / "workspace")
    with pytest.raises(FileNotFoundError):
        output.keep()
    assert not (tmp_path / "workspace").exists()
    output.keep(ended=True)
    assert "begins" in path.read_text()
