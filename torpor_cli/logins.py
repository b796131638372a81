"""OpenSSH's files for the machines of workspaces: address, key, pinned host key and jump host.

`ssh` asks each time that it is called with the name of a workspace, through `Match exec`, whether
these files still hold (torpor_cli/login_check.py), and has them written again where that is not
certain. A wake from the UI or by a schedule needs no step on this host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from deployments.terminal import Waiting, say
from torpor.control.own_server import FOLDER_VARIABLE, choose_server, state_folder
from torpor.shared.errors import (
    InvalidInput,
    MachineUnreachable,
    TorporError,
    WorkspaceAsleep,
)
from torpor.shared.values import HOST_KEY_SIGNATURES, Endpoint, Machine
from torpor_cli import login_check, programs

NO_SSH: Final = (
    "this host has no `ssh`, which logs in to machines: as root, run `apt-get install "
    "openssh-client`, or what installs OpenSSH's client here"
)
_COMMENT: Final = "# torpor: the names of workspaces. `torpor ssh --setup` has added this line."
_ANY_BYTES: Final = "surrogateescape"
"""How a user's file is read and written: bytes that are no UTF-8, such as a comment in ISO-8859-1,
stay."""
_PLAIN: Final = re.compile(r"[\w.:@+/=-][\w.:@+/= -]*", re.ASCII)
"""Text of a market or a machine that may stand in OpenSSH's files: one line of plain characters."""
_CHOSEN: Final = re.compile(r"[^.]+\.[0-9a-f]{16}")
"""The name of the file of a machine that was chosen by its id; OpenSSH knows the machine by this
name, too."""
_CHECKED_S: Final = 7 * 24 * 3600
"""Seconds for which the signed address of the rental's record is valid: the most that S3 allows."""
_KEPT_S: Final = 300
"""Seconds that a connection stays open for the next `ssh`. An idle connection does not count as use
of the machine, because the sampler counts programs."""
_LONGEST_SOCKET: Final = 90
"""Bytes of a socket's path at most. Linux allows 107, and OpenSSH adds 17 while it makes one."""


def set_up() -> None:
    """Add the line to the user's SSH configuration, unless it is there."""
    with Waiting("reading the names of the workspaces"):
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
    say(f"{users} includes {config}")
    say(f"now `ssh NAME` works for: {', '.join(names) or 'no workspace yet'}")
    if not has_ssh():
        say(f"torpor: warning: {NO_SSH}", sys.stderr)


def has_ssh() -> bool:
    """Whether this host has OpenSSH's client."""
    return programs.found("ssh") is not None


def is_set_up() -> bool:
    """Whether the user's SSH configuration includes torpor's part."""
    try:
        return f'Include "{_config()}"'.encode() in _users().read_bytes().splitlines()
    except OSError:
        return False


def keep_current() -> None:
    """Write torpor's part of the SSH configuration again if the user's includes it: this torpor may
    be another version, in another folder."""
    with suppress(OSError, TorporError):
        if is_set_up():
            write_config()


def command_for(workspace: str) -> str:
    """How a person logs in to the workspace's machine. Called after a machine was rented, so an
    error of writing is not raised: the longer command is returned, which will say what is wrong."""
    with suppress(OSError, TorporError):
        if is_set_up():
            write_config()  # the workspace may be newer than the configuration
            return f"ssh {workspace}"
    return f"torpor ssh {workspace} (`torpor ssh --setup`, once, lets `ssh {workspace}` work)"


def forget(workspace: str) -> None:
    """Delete this host's files for logins to a workspace that was deleted."""
    for file in [*_hosts().glob(f"{workspace}.*"), _hosts() / workspace, _keys() / workspace]:
        file.unlink(missing_ok=True)
    if is_set_up():
        write_config()


def write_config() -> Path:
    """Write the part that the user's configuration includes: for each workspace, how to find its
    machine."""
    from blocks import Workspace
    from blocks.reference import saved_names

    lines = []
    for name in saved_names(Workspace):
        host = _hosts() / name
        if not host.exists():
            _write(host, "")
        refresh = ["-P", "-m", "torpor_cli", "ssh", "--refresh", name]
        command = shlex.join([*_check(), str(host), *refresh]).replace('"', '\\"')
        command = command.replace("%", "%%")
        lines += [f'Match originalhost {name} exec "{command}"', f'    Include "{host}"', ""]
        lines += [f"Match originalhost {_jump_of(name)}", f'    Include "{host}"', ""]
        for chosen in sorted(_hosts().glob(f"{name}.*")):
            if _CHOSEN.fullmatch(chosen.name):
                both = f"{chosen.name},{_jump_of(chosen.name)}"
                lines += [f"Match originalhost {both}", f'    Include "{chosen}"', ""]
    _write(_config(), "\n".join(lines))
    return _config()


def current(workspace: str) -> Path | None:
    """The file for ``ssh -F`` that was written last, if it certainly still holds."""
    file = _hosts() / workspace
    return file if file.parent == _hosts() and login_check.is_current(file) else None


def refresh_quietly(workspace: str) -> None:
    """Write where the machine is now. If that is unknown, `ssh` says why and ends."""
    file = _hosts() / workspace
    if file.parent != _hosts():
        raise InvalidInput(f"{workspace!r} is not the name of a workspace")
    try:
        refresh(workspace)
    except TorporError as error:
        # On one line: a second line would be an option of OpenSSH, in words of a market.
        said = shlex.quote(f"torpor: {' '.join(str(error).split())}")
        ends = f"sh -c {shlex.quote(f'echo {said} >&2; exit 1')}".replace("%", "%%")
        _write(file, f"Host {workspace}\n    ProxyCommand {ends}\n")


def refresh(workspace: str, machine: str = "") -> Path:
    """Write where the workspace's machine is now; returns the file for ``ssh -F``. A ``machine``
    that was chosen by its id has a file of its own, whose name is the machine's name for OpenSSH,
    beside that of the workspace: `ssh` goes to no chosen one by itself."""
    from tasks.workspace_blocks import open_workspace

    opened = open_workspace(workspace)
    found = machine_of(workspace, machine)
    endpoint = _plain_endpoint(found)
    key = _keys() / workspace
    _write(key, opened.identity.private_key)
    name = f"{workspace}.{_digest(found.id)}" if machine else workspace
    ways = {name: endpoint}
    through = ""
    if endpoint.jump is not None:
        ways[_jump_of(name)] = endpoint.jump
        through = f"    ProxyJump {_jump_of(name)}\n"
    file, known = _hosts() / name, _hosts() / f"{name}.known"
    first = ""
    if not machine:
        first = _what_to_check(opened, found, endpoint)
    if _is_new_openssh():
        through += "" if machine else _told_of_others(file)
        through += _shared_connection(found, endpoint)
    else:
        through += "    ControlPath none\n"
    also = f" {workspace}" if machine else ""
    blocks = [
        f"Host {name}{also if way is endpoint else ''}\n"
        f"    HostName {way.host}\n"
        f"    Port {way.port}\n"
        f"    User {way.user}\n"
        f'    IdentityFile "{key}"\n'
        "    IdentitiesOnly yes\n"
        "    PubkeyAuthentication yes\n"
        "    PreferredAuthentications publickey\n"
        "    ForwardAgent no\n"
        "    ForwardX11 no\n"
        f"    HostKeyAlias torpor-{name}\n"
        f"{_algorithms(way)}"
        f'    UserKnownHostsFile "{known}"\n'
        "    GlobalKnownHostsFile none\n"
        "    StrictHostKeyChecking yes\n"
        "    VerifyHostKeyDNS no\n"
        "    UpdateHostKeys no\n"
        for name, way in ways.items()
    ]
    _write(known, "".join(f"torpor-{name} {way.host_key}\n" for name, way in ways.items()))
    _write(file, first + blocks[0] + through + "".join(blocks[1:]))
    return file


def _what_to_check(opened: Any, machine: Machine, endpoint: Endpoint) -> str:
    """The line by which the next `ssh` knows that the file still holds; empty where it cannot."""
    choice = choose_server()
    if choice is None or machine.label is None:
        return ""
    import certifi
    from prefect.settings import get_current_settings

    asked = choose_server(set_in=str(get_current_settings().api.url or ""))
    if asked is None or asked.taken.api_url != choice.taken.api_url:
        return ""  # a prefect.toml names the server: the check would look for another one

    key = opened.rentals.key(machine.label)
    outer = endpoint.jump or endpoint
    noted = {
        "server": choice.taken.api_url,
        "record": opened.store.grant("GET", key, expires_s=_CHECKED_S).url,
        "authorities": certifi.where(),
        "authority": opened.store.authority,
        "host_key": endpoint.host_key,
        "host": endpoint.host,
        "port": endpoint.port,
        "knock": outer.host,
        "knock_port": outer.port,
    }
    return f"{login_check.MARK}{json.dumps(noted)}\n"


def _shared_connection(machine: Machine, endpoint: Endpoint) -> str:
    """Options for one shared connection of all logins to this rental at this address, and to
    nothing else."""
    _sockets().mkdir(mode=0o700, parents=True, exist_ok=True)
    socket = str(_sockets() / _digest(f"{machine.label} {machine.id} {endpoint!r}"))
    if len(os.fsencode(socket)) > _LONGEST_SOCKET or set(socket) & set('%$"'):
        return "    ControlPath none\n"
    return (
        "    ControlMaster auto\n"
        f'    ControlPath "{socket}"\n'
        f"    ControlPersist {_KEPT_S}\n"
        "    ServerAliveInterval 30\n"  # a destroyed machine never closes the connection
        "    ServerAliveCountMax 3\n"
    )


def _algorithms(way: Endpoint) -> str:
    # an option that OpenSSH does not know would end each `ssh` of its user, to any host
    signed = HOST_KEY_SIGNATURES.get((way.host_key or "").partition(" ")[0], ())
    return f"    HostKeyAlgorithms {','.join(signed)}\n" if signed else ""


def _check() -> list[str]:
    """The command by which OpenSSH runs login_check.py: by its path, without site-packages."""
    where = os.environ.get(FOLDER_VARIABLE)
    named = ["/usr/bin/env", f"{FOLDER_VARIABLE}={where}"] if where else []
    return [*named, sys.executable, "-I", "-S", login_check.__file__]


def _is_new_openssh() -> bool:
    """Whether OpenSSH is 8.5 or newer, in which KnownHostsCommand is known: an unknown option would
    end each `ssh` of its user. In older versions, a shared connection kept standard error open when
    its first `ssh` had ended: whoever read that waited for five minutes."""
    if (ssh := programs.found("ssh")) is None:
        return False
    asked = [ssh, "-F", "none", "-G", "-o", "KnownHostsCommand=none", "localhost"]
    return not subprocess.run(asked, capture_output=True, check=False).returncode


def _told_of_others(file: Path) -> str:
    """Options by which OpenSSH calls login_check.py for a host key that is not the pinned one."""
    argv = [*_check(), login_check.MET, str(file)]
    if any('"' in word for word in argv):
        return ""
    words = " ".join(f'"{word.replace("%", "%%")}"' for word in argv)
    return f"    KnownHostsCommand {words} %I %K\n"


def machine_of(workspace: str, wanted: str = "") -> Machine:
    """The workspace's only machine, or its machine ``wanted``, with an address that OpenSSH can
    use."""
    from flows.procedures.listing import list_logins

    found = list_logins(workspace)
    if wanted:
        found = [machine for machine in found if machine.id == wanted]
    if not found and wanted:
        raise InvalidInput(
            f"workspace {workspace} is on no machine called {wanted}: `torpor status` names its "
            "machines"
        )
    if not found:
        raise WorkspaceAsleep(f"workspace {workspace} is asleep: `torpor wake {workspace}`")
    if len(found) > 1:
        ids = ", ".join(machine.id for machine in found)
        raise InvalidInput(
            f"workspace {workspace} is on {len(found)} machines: choose one with --machine: {ids}"
        )
    _plain_endpoint(found[0])
    return found[0]


def _plain_endpoint(machine: Machine) -> Endpoint:
    """The machine's address, if OpenSSH reads it as it is."""
    endpoint = machine.endpoint
    if endpoint is None:
        raise MachineUnreachable(f"machine {machine.id} has no address yet: try again")
    if endpoint.host_key is None:
        raise MachineUnreachable(
            f"the host key of machine {machine.id} is not known before torpor has logged in to "
            "it once: `torpor backup` of its workspace does"
        )
    ways = [endpoint, endpoint.jump] if endpoint.jump else [endpoint]
    for text in [text for way in ways for text in (way.host, way.user, way.host_key or "")]:
        if not _PLAIN.fullmatch(text):
            raise MachineUnreachable(
                f"machine {machine.id} has an address that OpenSSH would misread: {text!r}"
            )
    return endpoint


def _jump_of(workspace: str) -> str:
    """The name of the jump host before the workspace's machine in OpenSSH's files. It has a dot,
    which no workspace's name has."""
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


def _sockets() -> Path:
    return _folder() / "c"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(file: Path, text: str) -> None:
    """Write a file that only this user can read; it appears whole."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as opened:
        opened.write(text.encode(errors=_ANY_BYTES))
    unfinished.rename(file)
