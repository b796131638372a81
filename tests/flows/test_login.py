"""Where OpenSSH brings a person on a machine that was created, and where it brings a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flows import create
from tests.fixtures.plain_flows import run_plainly
from tests.fixtures.ssh_client import Client
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import World


@pytest.mark.rule(22)
def test_a_person_begins_in_the_workspace_and_a_command_in_the_home(
    world: World, tmp_path: Path
) -> None:
    machine = run_plainly(world.opened, create)
    home, place = world.home(machine.id), world.workspace(machine.id)
    client = Client(tmp_path / "client", machine, world.access.private_key)
    argv = client.argv("")[:-1]
    shell = subprocess.run(
        [argv[0], "-tt", *argv[1:]],
        input=b"echo at=$PWD=\nexit\n",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert f"at={place}=".encode() in shell.stdout, shell
    assert client.say("pwd").strip() == str(home)
    assert client.run("bash -l", b"pwd\n").stdout.decode().split() == [str(home)]
    (tmp_path / "sent").write_text("by scp")
    assert client.sftp(f"put {tmp_path / 'sent'} sent\n").returncode == 0
    assert (home / "sent").read_text() == "by scp"
