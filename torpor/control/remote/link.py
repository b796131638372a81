"""One SSH connection with one attach process: the wire that a session speaks over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import asyncssh
import msgspec

from torpor.control.remote.bundle import Bundle, make_bundle
from torpor.control.remote.install import install
from torpor.control.remote.probe import DEFAULT_HOME, PYTHON_CANDIDATES, Probed, probe
from torpor.control.remote.ssh import (
    Completed,
    Identity,
    begin,
    connect,
    execute,
    said_by,
    scripted,
)
from torpor.shared.errors import (
    AgentLost,
    MachineDenied,
    MachineError,
    MachineUnfit,
    TorporError,
    as_ours,
    from_wire,
)
from torpor.shared.values import KIB, Endpoint
from torpor.shared.wire.protocol import MAX_LINE_BYTES, PROTOCOL, Hello, Said, parse_said

ATTACH_S: Final = 90.0  # seconds for starting an agent, or replacing one of another version
_READ_BYTES: Final = 256 * KIB
_NOISE_BYTES: Final = 64 * KIB  # bytes that may be printed before the agent's first line
_CLOSE_S: Final = 5.0
_PERMANENT: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError")


@dataclass(frozen=True)
class Route:
    """Everything needed to reach an agent again."""

    endpoint: Endpoint
    identity: Identity
    home: str = DEFAULT_HOME
    candidates: Sequence[str] = PYTHON_CANDIDATES
    cache: Path | None = None
    source: Path | None = None
    sampled: bool = False

    @property
    def where(self) -> str:
        return str(self.endpoint)

    def pinned(self, host_key: str) -> Route:
        pinned = msgspec.structs.replace(self.endpoint, host_key=host_key)
        return replace(self, endpoint=pinned)


class Link:
    """An agent that said hello. ``messages`` raises AgentLost at its end; it never reconnects."""

    def __init__(
        self,
        connection: asyncssh.SSHClientConnection,
        process: asyncssh.SSHClientProcess[bytes],
        where: str,
        machine: Probed,
        begun: bytes = b"",
    ) -> None:
        self.machine = machine
        self.heard = 0  # bytes that have come
        self._connection = connection
        self._process = process
        self._where = where
        self._waiting = bytearray(begun)

    async def first(self) -> Hello:
        """The agent's hello; raises the error that came instead, or what its end says."""
        noise = 0
        async for line in self._lines():
            said = parse_said(line)
            if said is not None and said.hello is not None:
                hello = said.hello
                if hello.protocol != PROTOCOL:
                    raise MachineUnfit(
                        f"{self._where}: the agent speaks protocol {hello.protocol}, and not "
                        f"{PROTOCOL}: use the torpor that started it"
                    )
                return hello
            if said is not None and said.error is not None:
                error = from_wire(said.error)
                raise type(error)(f"{self._where}: {error}")
            noise += len(line)
            if noise > _NOISE_BYTES:
                break
        words = await said_by(self._process)
        if self._process.exit_status and any(kind in words for kind in _PERMANENT):
            raise MachineUnfit(f"{self._where}: the agent cannot run there: {words}")
        raise AgentLost(f"{self._where}: the agent did not answer; the machine printed: {words}")

    async def messages(self) -> AsyncIterator[Said]:
        """Yield every message; raise AgentLost when the link ends."""
        async for line in self._lines():
            said = parse_said(line)
            if said is not None:
                yield said
        raise AgentLost(f"{self._where}: the connection to the agent ended")

    async def send(self, line: bytes) -> None:
        """Write one line; AgentLost if the link is gone."""
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except (asyncssh.Error, OSError) as error:
            raise AgentLost(f"{self._where}: the connection to the agent ended: {error}") from error

    async def execute(self, argv: Sequence[str], timeout_s: float) -> Completed:
        """Run a program beside the agent; AgentLost where the connection ends meanwhile."""
        return await execute(self._connection, self._where, argv, timeout_s=timeout_s)

    async def run_script(
        self, script: str, arguments: Sequence[str], timeout_s: float
    ) -> Completed:
        """Run a script of torpor's with the agent's Python, beside the agent."""
        argv = scripted(self.machine.python, *arguments)
        return await execute(
            self._connection, self._where, argv, timeout_s=timeout_s, script=script
        )

    async def send_bundle(self, bundle: Bundle) -> str:
        """Install the bundle unless it is there; returns its folder on the machine."""
        return await install(self._connection, self._where, self.machine, bundle)

    async def forward(self, port: int) -> asyncssh.SSHListener:
        """Pass connections to a local port on to ``port`` of the machine's own 127.0.0.1."""
        try:
            return await self._connection.forward_local_port("127.0.0.1", 0, "127.0.0.1", port)
        except (asyncssh.Error, OSError) as error:
            raise AgentLost(f"{self._where}: port {port} was not forwarded: {error}") from error

    async def listens(self, port: int) -> bool:
        """Whether a program on the machine accepts connections to ``port`` of 127.0.0.1."""
        try:
            _, writer = await self._connection.open_connection("127.0.0.1", port)
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise MachineDenied(
                    f"{self._where} forwards no ports: set AllowTcpForwarding in its sshd_config"
                ) from error
            return False
        except (asyncssh.Error, OSError) as error:
            raise AgentLost(f"{self._where}: port {port} was not tried: {error}") from error
        writer.close()
        return True

    async def close(self, graceful: bool = True) -> None:
        """End the attach process and the connection within a bounded time."""
        if graceful:
            try:
                self._process.stdin.write_eof()
                await asyncio.wait_for(self._process.wait_closed(), _CLOSE_S)
            except (asyncssh.Error, OSError, TimeoutError, asyncio.TimeoutError):
                graceful = False
        if graceful:
            self._connection.close()
        else:
            self._connection.abort()
        try:
            await asyncio.wait_for(self._connection.wait_closed(), _CLOSE_S)
        except (TimeoutError, asyncio.TimeoutError):
            self._connection.abort()

    async def _lines(self) -> AsyncIterator[bytes]:
        searched = 0
        while True:
            end = self._waiting.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._waiting[:end])
                del self._waiting[: end + 1]
                searched = 0
                yield line
                continue
            searched = len(self._waiting)
            if searched > MAX_LINE_BYTES:
                raise AgentLost(
                    f"{self._where}: the agent sent a line of more than {MAX_LINE_BYTES} bytes"
                )
            try:
                data = await self._process.stdout.read(_READ_BYTES)
            except (asyncssh.Error, OSError):  # the connection ended; `messages` raises
                return
            if not data:
                return
            self.heard += len(data)
            self._waiting += data


async def open_link(route: Route, pin: Callable[[str], None]) -> tuple[Link, Hello]:
    """Connect, probe, install and attach. ``pin`` gets the host key at first use."""
    connection, _ = await connect(route.endpoint, route.identity, pin)
    try:
        machine = await probe(connection, route.where, route.home, route.candidates)
        bundle = await asyncio.to_thread(_bundle, route, machine)
        folder = await install(connection, route.where, machine, bundle)
        return await _attach(connection, route, machine, folder)
    except BaseException as error:
        connection.abort()
        await connection.wait_closed()
        if not isinstance(error, Exception) or isinstance(error, TorporError):
            raise
        if isinstance(error, (asyncssh.Error, OSError)):
            raise AgentLost(f"{route.where}: the connection was lost: {error}") from error
        raise MachineError(
            f"{route.where} answers what torpor does not know: {as_ours(error)}"
        ) from error


async def _attach(
    connection: asyncssh.SSHClientConnection, route: Route, machine: Probed, folder: str
) -> tuple[Link, Hello]:
    command = "attach-and-sample" if route.sampled else "attach"
    argv = [machine.python, "-I", "-X", "utf8", folder, command, "--home", machine.home]
    process, begun = await begin(connection, route.where, argv)
    link = Link(connection, process, route.where, machine, begun)
    try:
        return link, await asyncio.wait_for(link.first(), ATTACH_S)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise AgentLost(f"{route.where}: the agent did not answer within {ATTACH_S:g} s") from error


def _bundle(route: Route, machine: Probed) -> Bundle:
    return make_bundle(machine.platform, cache=route.cache, source=route.source)
