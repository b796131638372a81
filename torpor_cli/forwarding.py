"""Ports of a workspace's machine on this host, and the programs that are opened over SSH."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Final, Literal

from deployments.terminal import Waiting, say
from torpor.control.own_server import LOGIN_VARIABLE
from torpor.shared.errors import InvalidInput, MachineError, MachineUnreachable
from torpor_cli import copying, logins, programs
from torpor_cli.server import connected

TRIES: Final = 6
"""How often in a row no connection may come up."""
_PAUSE_S: Final = 2.0
_CONNECTED: Final = b"torpor-connected\n"
_PORTS: Final = re.compile(r"(?:(\d{1,5}):)?(\d{1,5})", re.ASCII)
_TOKEN: Final = re.compile(r"[\w.~-]{0,200}", re.ASCII)
_BASE_URL: Final = re.compile(r"/(?:[\w.~-]+/)*", re.ASCII)
_EDITORS: Final = {
    "vscode": ("code", "VS Code", "Shell Command: Install 'code' command in PATH"),
    "cursor": ("cursor", "Cursor", "Shell Command: Install 'cursor' command"),
}


@dataclass(frozen=True)
class Forward:
    """A port of this host that leads to a port of the machine."""

    here: int
    there: int


def forward(workspace: str, *ports: str, machine: str = "") -> None:
    """Forward ports of this host to ports of a workspace's machine, until Ctrl-C.

    torpor forward mywork 8888 6006

    Only programs of this host reach them. A connection that breaks is made again.

    Args:
        workspace: The workspace.
        ports: A port there, such as 8888, which gets the same number here; or HERE:THERE, such as
            9000:8888.
        machine: The machine's id, where there are several.
    """
    forwards = [_forward(port) for port in ports]
    if not forwards:
        raise InvalidInput(f"name a port: `torpor forward {workspace} 8888`")
    _check_free(forwards)
    urls = [f"http://127.0.0.1:{one.here} is port {one.there} of {workspace}" for one in forwards]
    _keep(workspace, machine, forwards, [*urls, "Ctrl-C ends it"])


def open_(
    workspace: str,
    program: Literal["vscode", "cursor", "jupyter"],
    path: str = "",
    *,
    machine: str = "",
) -> None:
    """Open a workspace's machine in an editor, or its Jupyter server in this host's browser.

    Args:
        workspace: The workspace.
        program: vscode and cursor connect to the machine by SSH. jupyter finds the server that runs
            there, or starts one, and forwards its port until Ctrl-C.
        path: The directory that the editor opens, below the workspace's first one unless it begins
            with / or ~/.
        machine: The machine's id, where there are several.
    """
    if program == "jupyter":
        if path:
            raise InvalidInput(
                f"only an editor opens a directory, and Jupyter shows its own: leave {path} out"
            )
        _open_jupyter(workspace, machine)
        return
    command, name, how = _EDITORS[program]
    found = programs.found(command)
    if found is None:
        raise InvalidInput(
            f"this host has no `{command}`, which opens {name}: in {name}, press Ctrl-Shift-P and "
            f'choose "{how}"'
        )
    if not logins.is_set_up():
        raise InvalidInput(
            f"{name} finds a machine by your SSH configuration: run `torpor ssh --setup` once"
        )
    with connected():
        host = logins.refresh(workspace, machine).name if machine else workspace
        logins.write_config()
        where = copying.ask(
            copying.machine_side(workspace, machine), {"do": "place", "path": path or "./"}
        )
    if not isinstance(where, str) or not where.startswith("/"):
        raise MachineError(f"{workspace} did not say where {path or 'its directory'} is")
    argv = [found, "--remote", f"ssh-remote+{host}", where]
    # An editor has no use for the server's login, and its extensions could read it.
    env = {name: value for name, value in os.environ.items() if name != LOGIN_VARIABLE}
    done = subprocess.run(argv, env=env, check=False)
    if done.returncode:
        raise MachineError(
            f"{name} did not open {where} of {workspace}: `{command}` ended with status "
            f"{done.returncode}; see what it says above, and that `ssh {host}` works"
        )
    say(f"{name} opens {where} of {workspace}")


def _open_jupyter(workspace: str, machine: str) -> None:
    with connected(), Waiting(f"looking for Jupyter on {workspace}"):
        try:
            found = copying.ask(copying.machine_side(workspace, machine), {"do": "jupyter"})
        except MachineError as error:
            raise MachineError(
                f"{error}. `torpor ssh {workspace}`, and there `pip install jupyterlab`, or start "
                "the one that a virtual environment has"
            ) from None
    port, address = _jupyter(workspace, found)
    one = Forward(_free_port(port), port)
    url = f"http://127.0.0.1:{one.here}{address}"
    _keep(workspace, machine, [one], [url, "Ctrl-C ends the way there; Jupyter runs on"])


def _jupyter(workspace: str, found: Any) -> tuple[int, str]:
    """The port of the Jupyter server, and the rest of its address. Both come from a machine, which
    may be hostile."""
    try:
        port, token, base = int(found["port"]), str(found["token"]), str(found["base_url"])
    except (KeyError, TypeError, ValueError):
        port, token, base = 0, "", ""
    if not 0 < port < 1 << 16 or not _TOKEN.fullmatch(token) or not _BASE_URL.fullmatch(base):
        raise MachineError(f"Jupyter on {workspace} has an address that no browser would take")
    return port, base + (f"?token={token}" if token else "")


def _forward(text: str) -> Forward:
    found = _PORTS.fullmatch(text)
    numbers = [int(one) for one in (found[1] or found[2], found[2])] if found else []
    if not numbers or not all(0 < number < 1 << 16 for number in numbers):
        raise InvalidInput(f"{text!r} is no port: name one such as 8888, or two such as 9000:8888")
    return Forward(*numbers)


def _check_free(forwards: Sequence[Forward]) -> None:
    for one in forwards:
        if not _is_free(one.here):
            raise InvalidInput(
                f"port {one.here} of this host is taken or not allowed: choose another one, such "
                f"as {_free_port(one.here)}:{one.there}"
            )
    seen: set[int] = set()
    for one in forwards:
        if one.here in seen:
            raise InvalidInput(
                f"port {one.here} of this host is given twice: write another port of this host "
                f"before the colon, as in HERE:{one.there}"
            )
        seen.add(one.here)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port(wanted: int) -> int:
    """That port of this host if it is free, or else another one."""
    if _is_free(wanted):
        return wanted
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _keep(workspace: str, machine: str, forwards: Sequence[Forward], lines: list[str]) -> None:
    """Hold the forwarded ports until Ctrl-C, which ends the command normally and raises no
    KeyboardInterrupt."""
    tries, ever = 0, False
    try:
        while True:
            with connected():
                if not logins.has_ssh():
                    raise InvalidInput(logins.NO_SSH)
                file = logins.refresh(workspace, machine)
            held, status = _hold(argv_of(file, workspace, forwards), [] if ever else lines)
            ever = ever or held
            tries = 1 if held else tries + 1
            if not ever or tries >= TRIES:
                raise MachineUnreachable(
                    f"{workspace}: no connection with these ports stands (`ssh` ended with status "
                    f"{status}, after what it says above)"
                )
            say(f"torpor: {workspace}: the connection ended: connecting again", sys.stderr)
            sleep(_PAUSE_S * 2 ** (tries - 1))
    except KeyboardInterrupt:
        say("the ports are closed", sys.stderr)


def argv_of(file: Path, workspace: str, forwards: Sequence[Forward]) -> list[str]:
    """The argv of a connection of its own: ports of a shared connection would stay when the command
    ends."""
    options = [
        "ControlMaster=no",
        "ControlPath=none",
        "ExitOnForwardFailure=yes",
        "BatchMode=yes",
        "ConnectTimeout=30",
        "ServerAliveInterval=15",
        "ServerAliveCountMax=3",
        "PermitLocalCommand=yes",
        f"LocalCommand=echo {_CONNECTED.decode().strip()}",
    ]
    argv = ["ssh", "-F", str(file), "-N", "-T"]
    argv += [word for option in options for word in ("-o", option)]
    for one in forwards:
        argv += ["-L", f"127.0.0.1:{one.here}:localhost:{one.there}"]
    return [*argv, workspace]


def _hold(argv: list[str], lines: list[str]) -> tuple[bool, int]:
    """Run the connection until it ends; returns whether its ports were open, and its status. The
    ``lines`` are printed once they are open."""
    program = programs.found(argv[0])
    process = subprocess.Popen(
        argv, executable=program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    held = False
    with process:
        try:
            for line in process.stdout or ():
                if line == _CONNECTED and not held:
                    held = True
                    for words in lines:
                        say(words)
        except BaseException:
            process.terminate()
            raise
    return held, process.returncode
