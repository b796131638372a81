"""The command line from a clean home: a newcomer's first hour."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.newcomer import USERS, Newcomer, outside_of, processes_of
from tests.fixtures.waiting import until
from torpor.control.ports import free_ports

LOCAL = ("--store", "default", "--market", "local", "--path", "~/workspace", "--gpu", "")


def test_a_newcomer_with_the_wheel_finds_the_files_after_a_wake(
    wheel_newcomer: Newcomer, request: pytest.FixtureRequest
) -> None:
    newcomer = wheel_newcomer
    # What is refused, and what the next days bring, does not depend on who the newcomer is.
    everything = request.node.callspec.params["wheel_newcomer"] == USERS[0]
    if everything:
        no_server = newcomer.torpor("status")
        assert no_server.returncode == 2
        assert "run `torpor up`" in no_server.stderr

    up = _done(newcomer, "up", "--port", str(free_ports(1)[0]))
    assert "idle      nobody looks at machines" in up
    assert "scratch object" in _done(newcomer, "init", "first", *LOCAL)
    if everything:
        _see_that_mistakes_are_explained(newcomer)

    assert "log in: torpor ssh first" in _done(newcomer, "create", "first", "--yes")
    assert _done(newcomer, "ssh", "first", "--", "hostname") == f"{socket.gethostname()}\n"
    _done(newcomer, "ssh", "first", "--", "mkdir -p workspace && echo kept > workspace/a.txt")
    assert _status(newcomer)["state"] == "awake"
    hibernated = newcomer.torpor("hibernate", "first")
    assert hibernated.returncode == 0, hibernated.stderr
    assert _begun(hibernated.stderr, "connecting to", "storing first, pass 1", "ending machine")
    if everything:
        _see_that_it_is_asleep(newcomer)
        _see_that_a_terminal_of_80_columns_folds_no_word(newcomer)

    assert "includes" in _done(newcomer, "ssh", "--setup")
    woken = newcomer.torpor("wake", "first", "--yes")
    assert "log in: ssh first" in woken.stdout, woken.stderr
    assert _begun(woken.stderr, "asking the markets", "machine ", "reading the manifest", "restor")
    config = newcomer.home / ".ssh" / "config"
    assert _by_openssh(newcomer, config, "ssh", "first", "cat workspace/a.txt") == "kept\n"
    _copy_both_ways(newcomer, config, "b.txt")
    if everything:
        _see_the_next_days(newcomer, config)

    said = _done(newcomer, "down", "--machines")  # a run of a schedule may be going on
    assert re.search("ended workers(, flow runs)?, store, Prefect server", said), said
    assert processes_of(newcomer) == []
    down = newcomer.torpor("status")
    assert down.returncode == 1
    assert "does not answer" in down.stderr
    ours = {str(config), str(config.parent), str(newcomer.home / "copied")}
    assert [path for path in outside_of(newcomer) if path not in ours] == []


def _see_that_mistakes_are_explained(newcomer: Newcomer) -> None:
    again = newcomer.torpor("init", "first", *LOCAL)
    assert again.returncode == 2
    assert "workspace/first already" in again.stderr
    for wrong in (("status", "frist"), ("job", "list", "frist"), ("wake", "frist", "--yes")):
        typo = newcomer.torpor(*wrong)
        assert typo.returncode == 2
        assert "(saved: first" in typo.stderr
        assert "Traceback" not in typo.stderr
    assert "1 offer fits workspace first" in _done(newcomer, "offers", "first")


def _see_that_it_is_asleep(newcomer: Newcomer) -> None:
    assert _status(newcomer)["state"] == "asleep"
    asleep = newcomer.torpor("ssh", "first", "--", "true")
    assert asleep.returncode == 2
    assert "workspace first is asleep: `torpor wake first`" in asleep.stderr
    unanswered = newcomer.torpor("wake", "first")
    assert unanswered.returncode == 2
    assert "add --yes" in unanswered.stderr


def _see_that_a_terminal_of_80_columns_folds_no_word(newcomer: Newcomer) -> None:
    for arguments in (("status",), ("offers", "first"), ("job", "list"), ("status", "frist")):
        lines = newcomer.on_a_terminal(*arguments)
        assert any("first" in line or "Open jobs" in line for line in lines), lines
        assert [line for line in lines if len(line.rstrip()) > 80] == []


def _see_the_next_days(newcomer: Newcomer, config: Path) -> None:
    twice = newcomer.torpor("wake", "first", "--yes")
    assert twice.returncode == 3
    assert "already on machine" in twice.stderr
    assert "Traceback" not in twice.stderr

    _done(newcomer, "hibernate", "first")
    _done(newcomer, "wake", "first", "--yes")  # at another address
    assert _by_openssh(newcomer, config, "ssh", "first", "cat workspace/b.txt") == "copied\n"
    _copy_both_ways(newcomer, config, "c.txt")
    machine = str(_status(newcomer)["machines"]).partition("'")[2]
    (key,) = newcomer.state.glob(f"machines/{machine[:14]}/host_key")  # `up` made another one
    newcomer.run("sh", "-c", f"rm {key} && ssh-keygen -q -t ed25519 -N '' -f {key}")
    newcomer.run("ssh", "-F", str(config), "-O", "exit", "first")  # the shared connection
    changed = newcomer.run("ssh", "-F", str(config), "first", "true")
    assert changed.returncode == 255
    assert "shows another host key than the machine of workspace first" in changed.stderr

    watched = _done(newcomer, "up", "--idle", "report")
    assert "watch reports idle machines, and hibernates none" in watched
    # The server plans the runs of a schedule some seconds after it was switched on.
    until(lambda: "watch looks next at" in _done(newcomer, "status"), "a look of watch is planned")


def test_the_wheel_says_the_platform_that_it_runs_on(installed: Path) -> None:
    """auditwheel reads the library's symbols."""
    (wheel,) = installed.parent.glob("*.whl")
    asked = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    platform = wheel.stem.rpartition("-")[2]
    assert f'following platform tag: "{platform}"' in " ".join(shown.split())


def _copy_both_ways(newcomer: Newcomer, config: Path, name: str) -> None:
    """A file to the machine by scp, and back by rsync."""
    copied = newcomer.home / "copied"
    newcomer.run("sh", "-c", f"echo copied > {copied}")
    _by_openssh(newcomer, config, "scp", str(copied), f"first:workspace/{name}")
    back = ("rsync", "-e", f"ssh -F {config}", f"first:workspace/{name}", str(copied))
    done = newcomer.run(*back)
    assert done.returncode == 0, done.stderr


def _by_openssh(newcomer: Newcomer, config: Path, program: str, *arguments: str) -> str:
    done = newcomer.run(program, "-F", str(config), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _status(newcomer: Newcomer) -> dict[str, object]:
    (found,) = json.loads(_done(newcomer, "status", "first", "--json"))["workspaces"]
    return dict(found)


def _begun(said: str, *wanted: str) -> bool:
    """Whether lines that begin so stand there in this order."""
    lines = iter(said.splitlines())
    return all(any(line.startswith(words) for line in lines) for words in wanted)


def _done(newcomer: Newcomer, *arguments: str) -> str:
    done = newcomer.torpor(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
