"""The demo tells the truth, ends well, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.installation import CHECKOUT, Installation
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.own_server import FOLDER_VARIABLE, choose_server

ARGV = [sys.executable, "-m", "deployments.demo"]


@pytest.fixture
def scratch(needs_server: None) -> Iterator[Path]:
    """Where the demo makes its folder: a short path, for the Unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        yield Path(folder)


def test_a_workspace_wakes_identical_and_nothing_is_left(scratch: Path) -> None:
    home = scratch / "home"
    home.mkdir()
    done = subprocess.run(
        ARGV,
        cwd=CHECKOUT,
        env=_environment(scratch) | {"HOME": str(home)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    beside = f"\n{' ' * 17}"  # a line that goes on
    told = done.stdout.replace(beside, " ")
    last = told.partition("The woken workspace is identical")[2].splitlines()[1:]
    printed = {line[:15].strip(): line[17:] for line in last}
    assert list(printed) == ["files", "bytes", "stored bytes", "hibernate", "wake"]
    plain = int(printed["bytes"].replace(",", ""))
    stored = int(printed["stored bytes"].split(", ratio")[0].replace(",", ""))
    assert 250_000_000 < plain < 350_000_000
    assert stored < plain
    assert re.match(r"\d+\.\d s: prepare .*, scan .*, destroy ", printed["hibernate"])
    assert re.match(r"\d+\.\d s: prepare .*, restore .*, check ", printed["wake"])
    assert "encrypted with AES-256-GCM" in done.stdout
    assert done.stderr == ""
    _nothing_is_left(scratch)
    assert not [name for name in os.listdir(home) if "prefect" in name or "torpor" in name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_half_way_it_clears_up(number: signal.Signals, scratch: Path) -> None:
    running = _half_way(scratch)
    assert _ours(scratch)
    running.send_signal(number)
    _, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert "was stopped by" in errors
    assert "Traceback" not in errors
    _nothing_is_left(scratch)


def test_a_killed_story_is_a_failure_and_is_cleared_up(scratch: Path) -> None:
    running = _half_way(scratch)
    for pid in _ours(scratch):
        if b"deployments.demo_story" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 1
    _nothing_is_left(scratch)


def test_a_full_disk_is_reported_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scratch: Path
) -> None:
    from deployments import demo

    handlers = {number: signal.getsignal(number) for number in demo.SIGNALS}
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    try:
        assert demo.main([]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "set TMPDIR to a folder on a bigger disk" in capsys.readouterr().err
    assert os.listdir(scratch) == []


def test_the_demo_uses_no_server_of_an_installation_that_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deployments.demo import environment

    for name in [*os.environ]:
        if name.startswith("PREFECT_"):
            monkeypatch.delenv(name)
    (tmp_path / "server.port").write_text("4321\n")
    (tmp_path / "login").write_text("torpor:secret\n")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert choose_server() is not None
    env = environment(Installation(tmp_path / "demo"), tmp_path / "tmp", verbose=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert choose_server() is None


def _half_way(scratch: Path) -> subprocess.Popen[str]:
    """The demo, whose store runs and whose Prefect server begins."""
    running = subprocess.Popen(
        ARGV,
        cwd=CHECKOUT,
        env=_environment(scratch),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("object store"):
            break
    return running


def _environment(scratch: Path) -> dict[str, str]:
    """As a user has it who already works with a Prefect server of their own."""
    return {
        **os.environ,
        "TMPDIR": str(scratch),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(scratch / "users-own-prefect"),
    }


def _nothing_is_left(scratch: Path) -> None:
    assert _ours(scratch) == []
    assert [name for name in os.listdir(scratch) if name != "home"] == []


def _ours(scratch: Path) -> list[int]:
    """Processes, but the demo itself, that have the demo's folder in their words or open files."""
    mark = os.fsencode(scratch / "torpor-demo-")
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            words += Path(f"/proc/{name}/environ").read_bytes()
            fds = f"/proc/{name}/fd"
            words += b"".join(os.readlink(os.fsencode(f"{fds}/{fd}")) for fd in os.listdir(fds))
        except OSError:
            continue
        if mark in words:
            found.append(int(name))
    return found
