"""The quiesce hook: a command of the user's, which may fail, hang, chatter or leave a server."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent.hook import run_hook
from torpor.shared.errors import HookFailed, InvalidInput, RunCancelled


def goes_on() -> None:
    """Nobody cancels."""


def test_it_runs_in_the_home_and_its_last_words_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run_hook(["sh", "-c", "pwd; echo to stderr >&2"], PATIENCE_S, goes_on)
    assert done == f"{tmp_path}\nto stderr\n"


def test_the_path_of_its_program_may_begin_at_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pause.sh").write_text("#!/bin/sh\necho paused $1\n")
    (tmp_path / "pause.sh").chmod(0o755)
    assert run_hook(["~/pause.sh", "~/x"], PATIENCE_S, goes_on) == "paused ~/x\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["sh", "-c", "echo no database; exit 3"],
            "'sh' ended with status 3 and printed: no database. Fix it",
        ),
        (["/none/such"], "'/none/such' cannot be started on the machine: No such file"),
        (["/"], "cannot be started on the machine: Permission denied"),
        ([], "is an empty list: give a program and its arguments"),
    ],
)
def test_a_failed_hook_reports_why(argv: list[str], words: str) -> None:
    with pytest.raises(HookFailed if argv else InvalidInput, match=words):
        run_hook(argv, PATIENCE_S, goes_on)


def test_a_slow_hook_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "child"
    clock = SimpleNamespace(monotonic=lambda: 3.0 if said.exists() else 0.0)
    monkeypatch.setattr("torpor.machine.agent.hook.time", clock)
    hook = f"sleep 600 & echo $! > {said}.new; mv {said}.new {said}; wait"
    with pytest.raises(HookFailed, match="took longer than 2 s and was ended: raise its time"):
        run_hook(["sh", "-c", hook], 2.0, goes_on)
    child = int(said.read_text())
    until(lambda: argv_of(child) == [], "the hook's child is gone")


def test_a_run_that_is_cancelled_ends_its_hook() -> None:
    def cancelled() -> None:
        raise RunCancelled("the run was cancelled")

    with pytest.raises(RunCancelled):  # not HookFailed: it does not wait for the hook's time
        run_hook(["sleep", "600"], 600, cancelled)


def test_a_server_that_it_starts_is_not_waited_for_and_may_go_on_talking(tmp_path: Path) -> None:
    """Also when the agent has left."""
    left, said, pid = (tmp_path / name for name in ("left", "said", "pid"))
    waits = f"until [ -e {left} ]; do sleep 0.05; done"
    server = f"({waits}; head -c 1000000 /dev/zero && touch {said}; sleep 600)"

    def agent() -> None:
        pid.write_text(run_hook(["sh", "-c", f"{server} & echo $!"], PATIENCE_S, goes_on))

    assert not killed_in_a_child(agent)
    assert not said.exists()
    left.touch()
    until(said.exists, "the server has talked")
    os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)


@pytest.mark.parametrize("full", [["disk"], ["memory"], ["disk", "memory"]])
def test_hook_output_is_kept_on_disk_or_in_memory(
    monkeypatch: pytest.MonkeyPatch, full: list[str]
) -> None:
    """A machine whose disk is full is put to sleep as well."""
    allocate = os.posix_fallocate

    def where_there_is_room(fd: int, offset: int, size: int) -> None:
        there = os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm")
        if ("memory" if there else "disk") in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", where_there_is_room)
    if len(full) == 2:
        with pytest.raises(HookFailed, match="'echo' was not started: the machine has no room"):
            run_hook(["echo", "paused"], PATIENCE_S, goes_on)
    else:
        assert run_hook(["echo", "paused"], PATIENCE_S, goes_on) == "paused\n"


_TALKS = """
import os, sys, time
for part in range(12):
    for n in range(5_000):
        print("x" * 110, part * 5_000 + n)
    sys.stdout.flush()
    open(f"{sys.argv[1]}/said-{part}", "w").close()
    while part < 11 and not os.path.exists(f"{sys.argv[1]}/go-{part}"):
        time.sleep(0.02)
"""


def test_only_the_end_of_long_hook_output_is_kept(tmp_path: Path) -> None:
    """The hook waits after each part of its output until it was looked at twice: a busy host may
    hold up the looks."""
    before = _unnamed_files()
    held: list[int] = []
    looked: dict[Path, int] = {}

    def looks() -> None:
        held.append(sum(size for file, size in _unnamed_files().items() if file not in before))
        for said in tmp_path.glob("said-*"):
            looked[said] = looked.get(said, 0) + 1
            if looked[said] > 1:
                said.with_name(said.name.replace("said", "go")).touch()

    done = run_hook([sys.executable, "-c", _TALKS, str(tmp_path)], PATIENCE_S, looks)
    assert done.endswith("x 59999\n")
    assert len(done) == 4096
    assert 0 < max(held) < 4 << 20  # of 7 MB


def _unnamed_files() -> dict[tuple[int, int], int]:
    """The size of each file that this process has open and that has no name."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            seen = os.fstat(int(fd))
            if stat.S_ISREG(seen.st_mode) and seen.st_nlink == 0:
                found[seen.st_dev, seen.st_ino] = seen.st_size
    return found
