"""What a smoke test sees on the machine: its greeting, and a few commands that change nothing."""

from __future__ import annotations

import asyncio
import re
from typing import Final, Protocol

import msgspec

from torpor.control.remote.ssh import Completed, Identity, connect, execute
from torpor.control.rental.greeting import greeting_fault
from torpor.shared.values import Endpoint

_COMMAND_S: Final = 60.0
_COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "gpus": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    "umask": ("sh", "-c", "umask"),
    "python": ("python3", "--version"),
    "system": ("cat", "/etc/os-release"),
    "variables": ("env",),
}


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """What commands on the machine printed, one field each; empty where the command failed."""

    gpus: tuple[str, ...] = ()  # name, memory and driver of each
    umask: str = ""
    python: str = ""
    system: str = ""
    variables: tuple[str, ...] = ()  # only the names


class Door(Protocol):
    """A way to a machine's SSH server."""

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        """None where the server answers with this key, otherwise what is wrong."""

    def look(self, endpoint: Endpoint) -> Inside:
        """Log in and look. MachineError where that fails."""


class SshDoor:
    """The way over real SSH."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        return greeting_fault(endpoint, host_key, self._identity.load())

    def look(self, endpoint: Endpoint) -> Inside:
        said = asyncio.run(self._asked(endpoint))
        lines = {name: done.stdout.decode(errors="replace") for name, done in said.items()}
        names = re.findall(r"^([A-Za-z_]\w*)=", lines.get("variables", ""), re.MULTILINE)
        system = re.search(r'^PRETTY_NAME="?([^"\n]*)', lines.get("system", ""), re.MULTILINE)
        return Inside(
            gpus=tuple(lines.get("gpus", "").strip().splitlines()),
            umask=lines.get("umask", "").strip(),
            python=lines.get("python", "").strip(),
            system=system[1] if system else "",
            variables=tuple(sorted(set(names))),
        )

    async def _asked(self, endpoint: Endpoint) -> dict[str, Completed]:
        """The output of each command that ended well."""
        connection, _ = await connect(endpoint, self._identity)
        async with connection:
            done = {
                name: await execute(connection, str(endpoint), argv, timeout_s=_COMMAND_S)
                for name, argv in _COMMANDS.items()
            }
        return {name: completed for name, completed in done.items() if completed.exit == 0}
