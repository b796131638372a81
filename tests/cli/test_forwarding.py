"""`torpor forward` and `open`: which words OpenSSH, an editor and a browser get."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from torpor.shared.errors import InvalidInput, MachineError, MachineUnreachable
from torpor_cli import copying, forwarding, logins
from torpor_cli.copying import Side
from torpor_cli.forwarding import Forward, argv_of, forward, open_


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "connected", nullcontext)
    monkeypatch.setattr(copying, "machine_side", lambda workspace, machine: Side("mywork", [], []))
    monkeypatch.setattr(logins, "refresh", lambda workspace, machine="": Path("/dev/null"))
    monkeypatch.setattr("torpor_cli.forwarding.sleep", lambda seconds: None)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose programs come before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_ports_have_a_connection_of_their_own_on_loopback() -> None:
    argv = argv_of(Path("/state/mywork"), "mywork", [Forward(9000, 8888), Forward(6006, 6006)])
    assert argv[:5] == ["ssh", "-F", "/state/mywork", "-N", "-T"]
    assert {"ControlPath=none", "ExitOnForwardFailure=yes"} <= {*argv}
    assert argv[-5:] == [
        "-L",
        "127.0.0.1:9000:localhost:8888",
        "-L",
        "127.0.0.1:6006:localhost:6006",
        "mywork",
    ]


@pytest.mark.parametrize("port", ["", "http", "0", "65536", "1:2:3", "8888:", "-1", "٣"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidInput, match="is no port"):
        forward("mywork", port)


def test_a_port_that_is_taken_here_is_named_with_another_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"port {port} .* such as \d+:8888"):
            forward("mywork", f"{port}:8888")
    with pytest.raises(InvalidInput, match=r"port 9000 of this host is given twice: .*HERE:2"):
        forward("mywork", "9000:1", "9000:2")
    with pytest.raises(InvalidInput, match="name a port"):
        forward("mywork")


def test_a_connection_that_ends_is_made_again_and_the_address_is_said_once(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = tmp_path / "count"
    program(
        programs,
        "ssh",
        f"echo >> {count}; test $(wc -l < {count}) -gt 2 && exit 255; echo torpor-connected",
    )
    with pytest.raises(MachineUnreachable, match="`ssh` ended with status 255"):
        forward("mywork", "9000:8888")
    said = capsys.readouterr()
    assert said.out.count("http://127.0.0.1:9000 is port 8888 of mywork\n") == 1
    assert "the connection ended: connecting again" in said.err


def test_ports_that_never_stood_end_the_command(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = tmp_path / "count"
    program(programs, "ssh", f"echo >> {count}; exit 255")
    with pytest.raises(MachineUnreachable):
        forward("mywork", "9000:8888")
    assert count.read_text() == "\n"
    assert "http" not in capsys.readouterr().out


def test_ctrl_c_closes_the_ports_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(workspace: str, machine: str = "") -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(logins, "refresh", stopped)
    forward("mywork", "9000:8888")
    assert capsys.readouterr().err == "the ports are closed\n"


@pytest.mark.parametrize(("name", "command"), [("vscode", "code"), ("cursor", "cursor")])
def test_an_editor_that_is_not_there_is_named_with_how_to_get_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Any, command: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match=f"this host has no `{command}`.* press Ctrl-Shift-P"):
        open_("mywork", name)


def test_an_editor_gets_the_name_that_ssh_knows(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "code", f'printf "%s\\n" "$@" > {tmp_path}/words')
    monkeypatch.setattr(logins, "is_set_up", lambda: False)
    with pytest.raises(InvalidInput, match="run `torpor ssh --setup` once"):
        open_("mywork", "vscode")
    monkeypatch.setattr(logins, "is_set_up", lambda: True)
    monkeypatch.setattr(logins, "write_config", lambda: tmp_path)
    monkeypatch.setattr(copying, "ask", lambda side, asked: f"/root/workspace/{asked['path']}")
    open_("mywork", "vscode", "proj")
    words = (tmp_path / "words").read_text().splitlines()
    assert words == ["--remote", "ssh-remote+mywork", "/root/workspace/proj"]
    chosen = tmp_path / "mywork.0123456789abcdef"
    monkeypatch.setattr(logins, "refresh", lambda workspace, machine: chosen)
    open_("mywork", "vscode", machine="m-2")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[1] == "ssh-remote+mywork.0123456789abcdef"


def test_a_directory_of_a_hostile_machine_writes_nothing_to_the_terminal(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(programs, "code", "exit 0")
    monkeypatch.setattr(logins, "is_set_up", lambda: True)
    monkeypatch.setattr(logins, "write_config", lambda: tmp_path)
    monkeypatch.setattr(copying, "ask", lambda side, asked: "/root\x1b]52;c;cm0gLXJm\x07")
    open_("mywork", "vscode")
    assert capsys.readouterr().out == "VS Code opens /root\\x1b]52;c;cm0gLXJm\\x07 of mywork\n"


def test_jupyter_s_address_has_its_token_and_the_port_of_this_host(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(programs, "ssh", "echo torpor-connected; exit 255")
    found = {"port": 8888, "token": "0a1b", "base_url": "/base/"}
    monkeypatch.setattr(copying, "ask", lambda side, asked: found)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found["port"] = taken.getsockname()[1]
        monkeypatch.setattr("torpor_cli.forwarding.TRIES", 1)
        with pytest.raises(MachineUnreachable):
            open_("mywork", "jupyter")
    line = capsys.readouterr().out.splitlines()[0]
    assert line.endswith("/base/?token=0a1b")
    assert line.startswith("http://127.0.0.1:") and f":{found['port']}/" not in line


@pytest.mark.parametrize(
    "found",
    [
        {},
        "text",
        {"port": 0, "token": "a", "base_url": "/"},
        {"port": 8888, "token": "a\x1b]52;", "base_url": "/"},
        {"port": 8888, "token": "a", "base_url": "@evil.example/"},
    ],
)
def test_an_address_of_a_hostile_machine_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(copying, "ask", lambda side, asked: found)
    with pytest.raises(MachineError, match="an address that no browser would take"):
        open_("mywork", "jupyter")


def test_a_machine_without_jupyter_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(side: Side, asked: object) -> None:
        raise MachineError("mywork: no Jupyter server runs there, and none is installed")

    monkeypatch.setattr(copying, "ask", none)
    with pytest.raises(MachineError, match="`torpor ssh mywork`, and there `pip install jupyterl"):
        open_("mywork", "jupyter")
