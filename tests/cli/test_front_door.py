"""The command line from a clean home: a newcomer's first hour."""

from __future__ import annotations

import json

from tests.fixtures.newcomer import Newcomer, outside_of, processes_of
from torpor.control.ports import free_ports


def test_a_newcomer_makes_a_workspace_and_finds_the_files_after_a_wake(newcomer: Newcomer) -> None:
    no_server = newcomer.torpor("status")
    assert no_server.returncode == 2
    assert "run `torpor up`" in no_server.stderr

    _done(newcomer, "up", "--port", str(free_ports(1)[0]))
    local = ("--store", "default", "--market", "local", "--path", "~/workspace", "--gpu", "")
    assert "scratch object" in _done(newcomer, "init", "first", *local)
    again = newcomer.torpor("init", "first", *local)
    assert again.returncode == 2
    assert "workspace/first already" in again.stderr

    assert "1 offer fits workspace first" in _done(newcomer, "offers", "first")
    assert "log in: torpor ssh first" in _done(newcomer, "create", "first", "--yes")
    _done(newcomer, "ssh", "first", "--", "mkdir -p workspace && echo kept > workspace/a.txt")
    assert _status(newcomer)["state"] == "awake"
    _done(newcomer, "hibernate", "first")
    assert _status(newcomer)["state"] == "asleep"

    asleep = newcomer.torpor("ssh", "first", "--", "true")
    assert asleep.returncode == 2
    assert "workspace first is asleep: `torpor wake first`" in asleep.stderr
    unanswered = newcomer.torpor("wake", "first")
    assert unanswered.returncode == 2
    assert "add --yes" in unanswered.stderr

    assert "includes" in _done(newcomer, "ssh", "--setup")
    assert "log in: ssh first" in _done(newcomer, "wake", "first", "--yes")
    config = newcomer.home / ".ssh" / "config"
    openssh = newcomer.run("ssh", "-F", str(config), "first", "cat workspace/a.txt")
    assert openssh.stdout == "kept\n", openssh.stderr
    twice = newcomer.torpor("wake", "first", "--yes")
    assert twice.returncode == 3
    assert "already on machine" in twice.stderr
    assert "Traceback" not in twice.stderr

    assert "ended workers, store, Prefect server" in _done(newcomer, "down", "--machines")
    assert processes_of(newcomer) == []
    down = newcomer.torpor("status")
    assert down.returncode == 1
    assert "does not answer" in down.stderr
    ssh_files = {str(config), str(config.parent)}
    assert [path for path in outside_of(newcomer) if path not in ssh_files] == []


def _status(newcomer: Newcomer) -> dict[str, object]:
    (found,) = json.loads(_done(newcomer, "status", "first", "--json"))["workspaces"]
    return dict(found)


def _done(newcomer: Newcomer, *arguments: str) -> str:
    done = newcomer.torpor(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
