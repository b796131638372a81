"""The quiesce hook: a command of the user's, which may fail, hang, chatter or leave a server."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fixtures.sshd import until
from torpor.agent import hook
from torpor.agent.hook import run_hook
from torpor.errors import HookFailed, InvalidInput, RunCancelled


def goes_on() -> None:
    """Nobody cancels."""


def test_it_runs_in_the_home_and_its_last_words_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run_hook(["sh", "-c", "pwd; echo to stderr >&2"], 10, goes_on)
    assert (done["exit"], done["tail"]) == (0, f"{tmp_path}\nto stderr\n")
    assert 0 <= done["seconds"] < 10


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["sh", "-c", "echo no database; exit 3"],
            "'sh' ended with status 3, having said: no database. Mend it",
        ),
        (["/none/such"], "'/none/such' cannot be started on the machine: No such file"),
        (["/"], "cannot be started on the machine: Permission denied"),
    ],
)
def test_a_hook_that_fails_says_how(argv: list[str], words: str) -> None:
    with pytest.raises(HookFailed, match=words):
        run_hook(argv, 10, goes_on)


def test_an_empty_hook_is_refused() -> None:
    with pytest.raises(InvalidInput, match="give a program and its arguments"):
        run_hook([], 10, goes_on)


def test_one_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = f"(sleep 2; touch {tmp_path}/late) & sleep 60"
    with pytest.raises(HookFailed, match="took longer than 0 s and was ended: raise its time"):
        run_hook(["sh", "-c", child], 0.1, goes_on)
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_a_run_that_is_cancelled_ends_its_hook() -> None:
    started = time.monotonic()

    def cancelled() -> None:
        raise RunCancelled("the run was cancelled")

    with pytest.raises(RunCancelled):
        run_hook(["sleep", "60"], 60, cancelled)
    assert time.monotonic() - started < 10


def test_a_server_that_it_starts_is_not_waited_for_and_may_go_on_talking(tmp_path: Path) -> None:
    said = tmp_path / "said"
    server = f"(sleep 2; head -c 1000000 /dev/zero && touch {said}; sleep 20)"
    started = time.monotonic()
    done = run_hook(["sh", "-c", f"{server} & echo $!"], 10, goes_on)
    assert done["seconds"] < 2
    assert time.monotonic() - started < 10
    pid = int(done["tail"])
    assert Path(f"/proc/{pid}").exists()
    until(said.exists, "the server has talked")
    os.killpg(os.getpgid(pid), signal.SIGKILL)


@pytest.mark.parametrize("gone", ["the disk", "the memory", "both"])
def test_its_words_lie_in_memory_or_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    """A machine whose disk is full is put to sleep as well."""
    if gone != "the memory":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if gone != "the disk":
        monkeypatch.setattr(hook, "_IN_MEMORY", str(tmp_path / "none"))
    if gone == "both":
        with pytest.raises(HookFailed, match="'echo' was not started: there is no room"):
            run_hook(["echo", "paused"], 10, goes_on)
    else:
        assert run_hook(["echo", "paused"], 10, goes_on)["tail"] == "paused\n"


def test_one_that_says_much_is_cut_to_its_end() -> None:
    talks = "import time\nfor n in range(600_000): print('line', n); n % 50_000 or time.sleep(0.3)"
    held: list[int] = []

    def looks() -> None:
        held.append(sum(size for size in map(_unnamed_bytes, os.listdir("/proc/self/fd"))))

    done = run_hook([sys.executable, "-c", talks], 60, looks)
    assert done["tail"].endswith("line 599999\n")
    assert len(done["tail"]) == 4096
    assert 0 < max(held) < 3 << 20


def _unnamed_bytes(fd: str) -> int:
    """The size of an open file that has no name any more."""
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)"):
            return os.fstat(int(fd)).st_size
    return 0
