"""The agent's look for what a snapshot lacks: since when, in which process, and for how long."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.agent import losses
from torpor.machine.agent.call import Call
from torpor.machine.agent.home import OwnHome, hold_life_lock
from torpor.machine.agent.losses import LookBehind, first_start_ns, machine_began_ns
from torpor.machine.supervisor.folder import JobFolder
from torpor.machine.supervisor.marker import MARKER
from torpor.shared.format.packages import Packages
from torpor.shared.wire.activity import MACHINE_VARIABLE
from torpor.shared.wire.losses import LookAtHomes, LookForLosses

BEGIN = LookForLosses("run", ["~/fine"], True, True, 0.0, [])
END = LookForLosses("run", ["~/fine"], True, True, PATIENCE_S, [])
HOMES = LookAtHomes("run", ["~/fine"], True, [])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine that shares its host, with a workspace and some data."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(MACHINE_VARIABLE, "m-0")
    for path in (f".torpor/{MARKER}", "workspace/a", "data/b", "fine/c"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("" if MARKER in path else "xyz")
    return tmp_path


@pytest.fixture
def look(home: Path) -> Iterator[LookBehind]:
    looks = LookBehind(home / ".torpor", [os.fsencode(home / "workspace")])
    yield looks
    looks.close()


def _call(home: Path) -> Call:
    return Call("1", home, lambda event: None)


def test_what_a_wake_never_installs_does_not_count_as_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Packages({"jq": "1.6", "nvidia-driver-535": "1", "walinuxagent": "1"})
    monkeypatch.setattr(losses, "packages_to_record", lambda home, system: recorded)
    assert LookBehind(home / ".torpor", []).where(END).kept_apt == ["jq"]


def test_one_process_looks_beside_the_run_at_what_is_the_machines(
    look: LookBehind, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def counted(*argv: Any, **options: Any) -> Any:
        started.append(start(*argv, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", counted)
    for _ in range(2):
        assert look.losses(BEGIN, None, _call(home)).complete is False
    for _ in range(2):  # a lost answer is asked for again
        losses = look.losses(END, [], _call(home))
        assert [folder.path for folder in losses.folders] == [f"{home}/data"]
        assert (losses.complete, losses.total.files, losses.unseen) == (True, 1, [])
    assert [process.returncode for process in started] == [0]


def test_what_a_user_writes_while_the_process_looks_is_known(
    look: LookBehind, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(*argv: Any, **options: Any) -> Any:
        started = start(*argv, **options)
        communicate = started.communicate

        def then_written(*waits: Any, **timeout: Any) -> Any:
            said = communicate(*waits, **timeout)
            (home / "data" / "b").rename(home / "workspace" / "b")
            (home / "late").write_text("xyz")
            return said

        started.communicate = then_written
        return started

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", looked)
    look.losses(BEGIN, None, _call(home))
    losses = look.losses(END, [], _call(home))
    assert [one.path for one in losses.user_files] == [f"{home}/late"]
    again = look.homes(HOMES, _call(home))
    assert (again.user_files, again.user_mark) == (losses.user_files, losses.user_mark)
    assert (again.user_unseen, again.folders, again.links) == ([], [], [])
    (home / "late").write_text("longer")
    assert look.homes(HOMES, _call(home)).user_mark == losses.user_mark
    (home / "late").rename(home / "later")
    assert look.homes(HOMES, _call(home)).user_mark != losses.user_mark


def test_a_process_that_hangs_is_not_waited_for(
    look: LookBehind, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
            "print('up', flush=True); time.sleep(60)"]  # fmt: skip
    start = subprocess.Popen
    started: list[Any] = []

    def hangs(_: Any, **options: Any) -> Any:
        started.append(start(argv, **options))
        assert started[0].stdout.readline() == b"up\n"
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", hangs)
    losses = look.losses(LookForLosses("run", [], True, True, 0.1, []), [], _call(home))
    assert not losses.complete
    assert "as on a disk that hangs" in losses.unseen[0]
    assert {one.path for one in losses.user_files} == {f"{home}/data", f"{home}/fine"}
    assert losses.user_unseen == []  # the homes were looked at by themselves
    homes = look.homes(LookAtHomes("run", [], True, []), _call(home))
    assert homes.user_mark == losses.user_mark
    assert started[0].returncode == -signal.SIGKILL


def test_how_far_a_look_at_the_homes_came_that_was_cut_changes_no_mark(
    look: LookBehind, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = look.homes(HOMES, _call(home))
    at_s = itertools.cycle([0.0, 0.0, 1.0])  # it is cut after the first directory
    clock = SimpleNamespace(monotonic=lambda: next(at_s))
    monkeypatch.setattr("torpor.machine.agent.losses.HOMES_S", 0.0)
    monkeypatch.setattr("torpor.machine.agent.losses.time", clock)
    cut = look.homes(HOMES, _call(home))
    assert cut.user_unseen == ["the look at the homes did not come to its end"]
    (home / "late").write_text("xyz")
    again = look.homes(HOMES, _call(home))
    assert (len(cut.user_files), len(again.user_files)) == (0, 1)
    assert again.user_mark == cut.user_mark != whole.user_mark


def test_the_machine_began_when_the_agents_folder_was_made_or_when_it_started(home: Path) -> None:
    marker = home / ".torpor" / MARKER
    began_ns = machine_began_ns(home / ".torpor")
    started_ns = machine_began_ns(home)  # without a marker: the start of this host
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert began_ns in (marker.stat().st_ctime_ns, pytest.approx(started_ns, abs=30 * 10**9))
    assert time.time() - up_s - 60 < started_ns / 1e9 <= time.time()


@pytest.mark.parametrize("makes_again", ["the agent", "a job's supervisor"])
@pytest.mark.parametrize("start", ["hidden", "a minute ago"])
def test_what_came_before_the_marker_was_made_again_is_the_users(
    home: Path, monkeypatch: pytest.MonkeyPatch, makes_again: str, start: str
) -> None:
    torpors = home / ".torpor"
    marked_ns = (torpors / MARKER).stat().st_ctime_ns
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 60) * os.sysconf("SC_CLK_TCK"))
    stat = b"" if start == "hidden" else b"1 (init)" + b" 0" * 19 + b" %d" % ticks
    real = open

    def answer(path: Any, *args: Any, **options: Any) -> Any:
        return io.BytesIO(stat) if path == "/proc/1/stat" else real(path, *args, **options)

    monkeypatch.setattr(builtins, "open", answer)
    assert machine_began_ns(torpors) == marked_ns
    lock = hold_life_lock(torpors)
    assert lock is not None
    own = OwnHome(torpors)
    folder = JobFolder(torpors, "0" * 12)
    folder.make()
    taken = folder.take()
    assert taken is not None
    (torpors / MARKER).unlink()
    if makes_again == "the agent":
        own.mark()
    else:
        assert folder.make_again(taken) == taken
    assert (torpors / MARKER).exists()
    started_ns = 0 if start == "hidden" else marked_ns - 60 * 10**9
    assert machine_began_ns(torpors) == pytest.approx(started_ns, abs=50 * 10**9)
    os.close(lock)
    os.close(taken)


def test_on_a_machine_of_its_user_what_came_before_the_agent_and_before_a_restart_counts(
    home: Path, tmp_path: Path
) -> None:
    key = tmp_path / "ssh_host_ed25519_key"
    key.touch()
    first_ns = 1_700_000_000 * 10**9
    os.utime(key, ns=(first_ns, first_ns))
    began_ns = machine_began_ns(home / ".torpor")
    assert first_start_ns(began_ns, tmp_path) == first_ns < began_ns
    assert first_start_ns(began_ns, tmp_path / "nothing") <= began_ns
