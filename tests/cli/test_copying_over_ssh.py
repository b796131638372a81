"""Copies and ports through OpenSSH, as OpenSSH's own server sees them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.sshd import Sshd
from torpor.control.ports import free_ports
from torpor.shared.values import Machine, MachineId
from torpor_cli import copying, logins
from torpor_cli.copying import cp, push
from torpor_cli.forwarding import Forward, argv_of


@pytest.fixture(autouse=True)
def awake(monkeypatch: pytest.MonkeyPatch, sshd: Sshd, tmp_path: Path) -> Path:
    """The directory of the workspace, which is on that server."""
    there = sshd.home / "workspace"
    machine = Machine(MachineId("m-1"), "vast://mine", None, "running", sshd.endpoint)
    spec = SimpleNamespace(paths=[str(there)])
    jobs = SimpleNamespace(open=list)
    opened = SimpleNamespace(identity=sshd.identity, spec=spec, jobs=jobs)
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
    monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: [machine])
    monkeypatch.setattr(copying, "connected", nullcontext)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return there


def test_a_folder_goes_to_a_machine_and_comes_back(awake: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for number in range(200):
        (here / f"{number % 7}").mkdir(exist_ok=True)
        (here / f"{number % 7}" / f"o'dd \n{number}").write_bytes(b"\0\xff" * number)
    assert push("mywork") == 0
    assert cp("mywork:here", "back") == 0
    names = {path.relative_to(here / "back") for path in (here / "back").rglob("*")}
    assert len([name for name in names if (here / name).is_file()]) == 200
    for name in names:
        if (here / name).is_file():
            assert (here / "back" / name).read_bytes() == (here / name).read_bytes()
    assert awake.is_dir()


@pytest.mark.rule(23)
def test_no_ssh_of_the_folder_runs_where_path_has_a_relative_directory(
    awake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "here" / "bin" / "ssh"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\nexec {shutil.which("ssh")} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"bin::./bin:{os.environ['PATH']}")
    assert cp("bin", "mywork:") == 0
    assert (awake / "bin" / "ssh").exists()
    assert not (tmp_path / "ran").exists()


def test_a_run_of_a_folder_whose_files_are_all_ignored_sends_nothing(
    awake: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    (here / ".gitignore").write_text("*\n")
    (here / "data.csv").write_text("1,2")
    awake.mkdir()
    made = awake.stat().st_ino  # as torpor remembers the directories that it made
    sent = copying.look_at(here)
    assert sent.names == ()
    assert copying.send(sent, "mywork", str(awake)).files == 0
    assert (awake.stat().st_ino, [*awake.iterdir()]) == (made, [])


def test_a_port_of_the_machine_answers_on_this_host(sshd: Sshd) -> None:
    (here,) = free_ports(1)
    argv = argv_of(logins.refresh("mywork"), "mywork", [Forward(here, sshd.port)])
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as held:
        assert held.stdout is not None
        try:
            assert held.stdout.readline() == b"torpor-connected\n"
            with socket.create_connection(("127.0.0.1", here)) as reached:
                assert reached.recv(4) == b"SSH-"
        finally:
            held.terminate()
