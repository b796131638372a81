"""OpenSSH's files for the machines of workspaces: address, key, pinned host key and jump host.

`ssh` asks for the current ones each time that it is called with the name of a workspace, through
`Match exec`, so that a wake from the UI or by a schedule needs no step on this host.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from torpor.control.supervision import FOLDER_VARIABLE, state_folder
from torpor.shared.errors import InvalidInput, MachineUnreachable, TorporError
from torpor.shared.values import Endpoint

_COMMENT: Final = "# torpor: the names of workspaces. `torpor ssh --setup` has added this line."
_ANY_BYTES: Final = "surrogateescape"
"""A user's file may hold bytes that are no UTF-8, such as a comment in ISO-8859-1: they stay."""
_PLAIN: Final = re.compile(r"[\w.:@+/=-][\w.:@+/= -]*", re.ASCII)
"""What a market or a machine may say of itself in OpenSSH's files: one line of plain words."""


def set_up() -> None:
    """Add the line to the user's SSH configuration, unless it is there."""
    config = write_config()
    users = _users()
    line = f'Include "{config}"'
    try:
        before = users.read_bytes().decode(errors=_ANY_BYTES) if users.exists() else ""
        if line not in before.splitlines():
            users.parent.mkdir(mode=0o700, exist_ok=True)
            _write(users.resolve(), f"{_COMMENT}\n{line}\n\n{before}")
    except OSError as error:
        raise InvalidInput(
            f"{users} cannot be changed ({error.strerror}): add this as its first line yourself:\n"
            f"{line}"
        ) from None
    names = [path.name for path in sorted(_hosts().glob("*")) if not path.suffix]
    print(f"{users} includes {config}")
    print(f"now `ssh NAME` works for: {', '.join(names) or 'no workspace yet'}")


def is_set_up() -> bool:
    """Whether the user's SSH configuration includes ours."""
    try:
        return f'Include "{_config()}"'.encode() in _users().read_bytes().splitlines()
    except OSError:
        return False


def command_for(workspace: str) -> str:
    """How a person logs in to the workspace's machine. It is said after a machine was rented, so
    files that cannot be written leave the longer command, which says what is wrong."""
    with suppress(OSError, TorporError):
        if is_set_up():
            write_config()  # of a workspace that is younger than it
            return f"ssh {workspace}"
    return f"torpor ssh {workspace} (`torpor ssh --setup`, once, lets `ssh {workspace}` work)"


def write_config() -> Path:
    """Write what the user's configuration includes: for each workspace, how to find its machine."""
    from blocks import Workspace
    from blocks.reference import saved_names

    where = os.environ.get(FOLDER_VARIABLE)
    named = ["env", f"{FOLDER_VARIABLE}={where}"] if where else []
    torpor = shlex.join([*named, sys.executable, "-P", "-m", "torpor_cli", "ssh", "--refresh"])
    lines = []
    for name in saved_names(Workspace):
        host = _hosts() / name
        if not host.exists():
            _write(host, "")
        command = f"{torpor} {shlex.quote(name)}".replace('"', '\\"')
        lines += [f'Match originalhost {name} exec "{command}"', f'    Include "{host}"', ""]
        lines += [f"Match originalhost {_jump_of(name)}", f'    Include "{host}"', ""]
    _write(_config(), "\n".join(lines))
    return _config()


def refresh_quietly(workspace: str) -> None:
    """Write where the machine is now. Where it cannot be said, `ssh` says why and ends."""
    file = _hosts() / workspace
    if file.parent != _hosts():
        raise InvalidInput(f"{workspace!r} is not the name of a workspace")
    try:
        refresh(workspace)
    except TorporError as error:
        # In one line: a second one would be an option of OpenSSH, in words of a market.
        said = shlex.quote(f"torpor: {' '.join(str(error).split())}")
        ends = f"sh -c {shlex.quote(f'echo {said} >&2; exit 1')}".replace("%", "%%")
        _write(file, f"Host {workspace}\n    ProxyCommand {ends}\n")


def refresh(workspace: str, machine: str = "") -> Path:
    """Write where the workspace's machine is now; returns the file for ``ssh -F``."""
    from tasks.workspace_blocks import open_workspace

    opened = open_workspace(workspace)
    endpoint = endpoint_of(workspace, machine)
    key = _keys() / workspace
    _write(key, opened.identity.private_key)
    known = _hosts() / f"{workspace}.known"
    ways = {workspace: endpoint}
    through = ""
    if endpoint.jump is not None:
        ways[_jump_of(workspace)] = endpoint.jump
        through = f"    ProxyJump {_jump_of(workspace)}\n"
    _write(known, "".join(f"torpor-{name} {way.host_key}\n" for name, way in ways.items()))
    blocks = [
        f"Host {name}\n"
        f"    HostName {way.host}\n"
        f"    Port {way.port}\n"
        f"    User {way.user}\n"
        f'    IdentityFile "{key}"\n'
        "    IdentitiesOnly yes\n"
        "    ForwardAgent no\n"
        "    ForwardX11 no\n"
        f"    HostKeyAlias torpor-{name}\n"
        f'    UserKnownHostsFile "{known}"\n'
        "    GlobalKnownHostsFile none\n"
        "    StrictHostKeyChecking yes\n"
        for name, way in ways.items()
    ]
    file = _hosts() / workspace
    _write(file, blocks[0] + through + "".join(blocks[1:]))
    return file


def endpoint_of(workspace: str, wanted: str = "") -> Endpoint:
    """Where the workspace's machine answers, or its machine ``wanted``, in words that OpenSSH reads
    as they are."""
    from flows.procedures.listing import list_logins

    found = list_logins(workspace)
    if wanted:
        found = [machine for machine in found if machine.id == wanted]
    if not found:
        where = f"on no machine called {wanted}" if wanted else "asleep"
        raise InvalidInput(f"workspace {workspace} is {where}: `torpor wake {workspace}`")
    if len(found) > 1:
        ids = ", ".join(machine.id for machine in found)
        raise InvalidInput(
            f"workspace {workspace} is on {len(found)} machines: choose one with --machine: {ids}"
        )
    endpoint = found[0].endpoint
    if endpoint is None:
        raise MachineUnreachable(f"machine {found[0].id} has no address yet: try again")
    if endpoint.host_key is None:
        raise MachineUnreachable(
            f"the host key of machine {found[0].id} is not known before torpor has logged in to "
            f"it once: `torpor backup {workspace}` does"
        )
    ways = [endpoint, endpoint.jump] if endpoint.jump else [endpoint]
    for text in [text for way in ways for text in (way.host, way.user, way.host_key or "")]:
        if not _PLAIN.fullmatch(text):
            raise MachineUnreachable(
                f"machine {found[0].id} has an address that OpenSSH would misread: {text!r}"
            )
    return endpoint


def _jump_of(workspace: str) -> str:
    """What OpenSSH calls the jump host before the workspace's machine: no workspace has a dot in
    its name."""
    return f"{workspace}.jump"


def _users() -> Path:
    return Path("~/.ssh/config").expanduser()


def _folder() -> Path:
    return state_folder() / "ssh"


def _config() -> Path:
    return _folder() / "config"


def _hosts() -> Path:
    return _folder() / "hosts"


def _keys() -> Path:
    return _folder() / "keys"


def _write(file: Path, text: str) -> None:
    """Write a file that only this user can read; it appears whole."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as opened:
        opened.write(text.encode(errors=_ANY_BYTES))
    unfinished.rename(file)
