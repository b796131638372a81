"""SSH with pinned host keys and nothing of the user's: no config, agent, keys or known hosts."""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import asyncssh

from torpor.shared.errors import (
    AgentLost,
    HostKeyChanged,
    InvalidInput,
    MachineDenied,
    MachineError,
    MachineUnfit,
    MachineUnreachable,
)
from torpor.shared.plain_text import plain
from torpor.shared.values import HOST_KEY_SIGNATURES, KIB, Endpoint

CONNECT_S: Final = 20.0
LOGIN_S: Final = 30.0
KEEPALIVE_S: Final = 15
KEEPALIVES: Final = 4  # keepalives without an answer, after which the connection is lost
BEGIN_S: Final = 30.0  # seconds from a login to its program; the files of a slow login take 5 s
MAX_OUTPUT_BYTES: Final = 256 * KIB
_CHUNK_BYTES: Final = 256 * KIB
_WORDS: Final = 300  # most characters of a machine's output that a message shows
_WORDS_S: Final = 2.0  # seconds to wait for the rest of a machine's output

# Each program begins in `/`, whatever folder the login chose: there, only root can put programs
# that a `.` in PATH would find. The mark comes after all output of the login's files, on a line of
# its own.
_BEGIN: Final = 'cd /; echo; echo torpor-begins; exec "$@"'
_BEGUN: Final = b"\ntorpor-begins\n"
# Input that a login's files may read before the mark comes. Every program skips empty lines.
_TO_READ: Final = b"\n" * 64
# One short line, for shells that take no other. It reads the script, which follows empty lines.
_SCRIPTED: Final = (
    "import sys; exec(bytes.fromhex(next(filter(bytes.strip, sys.stdin.buffer)).decode()))"
)
_PASSING: Final = (
    "resource temporarily unavailable",
    "cannot allocate memory",
    "cannot fork",
    "system is booting up",
    "system is going down",
)
LOGIN_FILES: Final = (
    "the login's shell there, its files (~/.bashrc, ~/.profile, ~/.zshenv, ~/.cshrc, ~/.ssh/rc), "
    "and command= in authorized_keys or ForceCommand in sshd_config"
)


@dataclass(frozen=True)
class Identity:
    """The key for login: an OpenSSH private key, and its passphrase if it has one."""

    private_key: str = field(repr=False)
    passphrase: str | None = field(default=None, repr=False)

    def load(self) -> asyncssh.SSHKey:
        """The parsed key. InvalidInput, without the key's text, if it does not parse."""
        try:
            return asyncssh.import_private_key(self.private_key, self.passphrase)
        except asyncssh.KeyEncryptionError:
            raise InvalidInput("the SSH identity's passphrase does not open its key") from None
        except (asyncssh.KeyImportError, ValueError):
            raise InvalidInput(
                "the SSH identity's private key does not parse: give the whole text of an "
                "OpenSSH private key file, and its passphrase where it has one"
            ) from None

    def public_key(self) -> str:
        """The line for ``authorized_keys``."""
        return self.load().export_public_key().decode("ascii").strip()


@dataclass(frozen=True)
class Completed:
    """The result of a command."""

    exit: int
    stdout: bytes
    stderr: bytes


async def connect(
    endpoint: Endpoint, identity: Identity, pin: Callable[[str], None] | None = None
) -> tuple[asyncssh.SSHClientConnection, str]:
    """Connect and log in; returns the connection and the host key that it is pinned to.

    If ``endpoint`` has no host key, the key that the machine shows is pinned, and ``pin`` must
    record it. Raises HostKeyChanged, MachineDenied, MachineUnreachable (retryable) or InvalidInput.
    """
    connection, guard = await _connect(endpoint, identity.load(), str(endpoint))
    seen = guard.line()
    if endpoint.host_key is None and pin is not None:
        pin(seen)
    return connection, seen


async def connect_jump(
    endpoint: Endpoint, key: asyncssh.SSHKey
) -> asyncssh.SSHClientConnection | None:
    """Log in to the jump host of ``endpoint``; None where it has none. Raises as ``connect``."""
    jump = endpoint.jump
    if jump is None:
        return None
    if jump.host_key is None:
        raise InvalidInput(f"the jump host {jump} has no host key: nothing was sent to it")
    connection, _ = await _connect(jump, key, f"the jump host {jump}")
    return connection


async def _connect(
    endpoint: Endpoint, key: asyncssh.SSHKey, where: str
) -> tuple[asyncssh.SSHClientConnection, _Client]:
    """Connect. The connection holds the one to the jump host, and closes it."""
    guard = _Client(_pinned(endpoint), key)
    jump = await connect_jump(endpoint, key)
    try:
        connection = await _log_in(endpoint, key, guard, jump, where)
    except BaseException:
        if jump is not None:
            jump.abort()
        raise
    if jump is not None:
        connection.set_tunnel(jump)
    return connection, guard


async def _log_in(
    endpoint: Endpoint,
    key: asyncssh.SSHKey,
    guard: _Client,
    jump: asyncssh.SSHClientConnection | None,
    where: str,
) -> asyncssh.SSHClientConnection:
    try:
        connection, _ = await asyncio.wait_for(
            asyncssh.create_connection(
                lambda: guard,
                endpoint.host,
                endpoint.port,
                tunnel=jump,
                username=endpoint.user,
                client_keys=[guard.pair],
                known_hosts=([], [], []),
                server_host_key_algs=_algorithms(guard.pinned),
                config=None,
                agent_path=None,
                agent_forwarding=False,
                gss_host=None,
                preferred_auth=["publickey", "keyboard-interactive", "password"],
                compression_algs=None,
                connect_timeout=CONNECT_S,
                login_timeout=LOGIN_S,
                keepalive_interval=KEEPALIVE_S,
                keepalive_count_max=KEEPALIVES,
            ),
            CONNECT_S + LOGIN_S,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise _key_changed(where, guard.pinned, guard.seen) from error
    except asyncssh.PermissionDenied as error:
        raise _denied(where, endpoint.user, key, guard) from error
    except asyncssh.KeyExchangeFailed as error:
        raise MachineUnreachable(f"{where}: no common SSH algorithms: {error}") from error
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise MachineUnreachable(
            f"{where} did not answer within {CONNECT_S:g} s: is it running, and its port open?"
        ) from error
    except socket.gaierror as error:
        raise MachineUnreachable(
            f"{where}: the name {endpoint.host!r} is not known ({error.strerror}): check the host"
        ) from error
    except asyncssh.Error as error:
        raise MachineUnreachable(
            f"{where} did not complete an SSH connection: {error.reason}; check that this port "
            "is an SSH server's"
        ) from error
    except (OSError, ValueError) as error:
        raise MachineUnreachable(
            f"{where} cannot be connected to: {error}; check host and port, and that it runs"
        ) from error
    return connection


async def begin(
    connection: asyncssh.SSHClientConnection, where: str, argv: Sequence[str]
) -> tuple[asyncssh.SSHClientProcess[bytes], bytes]:
    """Start ``argv`` behind the login's files: all that they print is skipped, and they may read
    lines. Returns the process and what it has printed so far.

    Raises MachineUnfit, with what the machine printed, where the login ends without the program;
    AgentLost where the connection is lost or the program has not begun within BEGIN_S.
    """
    command = shlex.join(["/bin/sh", "-c", _BEGIN, "torpor", *argv])
    process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(
        command, encoding=None
    )
    heard = bytearray(b"\n")
    with suppress(OSError):  # it has ended: the end of its output says so
        process.stdin.write(_TO_READ)
    try:
        async with asyncio.timeout(BEGIN_S):
            while (at := heard.find(_BEGUN)) < 0:
                data = await process.stdout.read(64 * KIB)
                if not data:
                    raise await _not_begun(process, where, bytes(heard))
                del heard[:-MAX_OUTPUT_BYTES]
                heard += data
    except TimeoutError as error:
        said = await said_by(process, bytes(heard))
        process.close()
        raise AgentLost(
            f"{where} let torpor in, and ran no program within {BEGIN_S:g} s. It printed: {said}. "
            f"Its login may wait for input, or be slow: look at {LOGIN_FILES}"
        ) from error
    return process, bytes(heard[at + len(_BEGUN) :])


async def said_by(process: asyncssh.SSHClientProcess[bytes], printed: bytes = b"") -> str:
    """The last words of a program that ends, for a message: its output, then its stderr."""
    words = bytes(printed)
    with suppress(TimeoutError, asyncssh.Error, OSError):
        async with asyncio.timeout(_WORDS_S):
            while data := await process.stderr.read(4 * KIB):
                words = (words + b"\n" + data)[-4 * KIB :]
            await process.wait_closed()
    return last_words(words)


def last_words(printed: bytes) -> str:
    """The end of what a machine printed, on one line."""
    return plain(" ".join(printed.decode("utf-8", "replace").split())[-_WORDS:]) or "nothing"


def passes(words: str) -> bool:
    """Whether a machine's output shows trouble that ends without its user."""
    return any(passing in words.lower() for passing in _PASSING)


async def _not_begun(
    process: asyncssh.SSHClientProcess[bytes], where: str, printed: bytes
) -> MachineError:
    """The error of a login that ended without the program."""
    said = await said_by(process, printed)
    status = process.exit_status
    if status is None or process.exit_signal is not None:
        return AgentLost(f"{where}: the connection ended before a program ran; it printed: {said}")
    words = f"{where} let torpor in, and ran no program. It printed: {said} (exit {status}). "
    if passes(said):
        return AgentLost(f"{words}Try again when that has passed")
    return MachineUnfit(
        f"{words}Take the user that it names, if it names one; else look at {LOGIN_FILES}. "
        "Nothing was sent"
    )


def scripted(python: str, *arguments: str) -> list[str]:
    """The argv that runs a script of torpor's, which ``execute`` sends. Python imports nothing from
    a folder of the user's, and ignores the user's PYTHON variables."""
    return [python, "-I", "-c", _SCRIPTED, *arguments]


async def execute(
    connection: asyncssh.SSHClientConnection,
    where: str,
    argv: Sequence[str],
    *,
    timeout_s: float,
    script: str = "",
    stdin: Path | None = None,
) -> Completed:
    """Run ``argv`` with ``script``, where it is one of ``scripted``, and the file ``stdin`` as its
    input. Output beyond a limit is dropped, and what the login's files print.

    Raises as ``begin``, and AgentLost when the connection is lost or after the time limit, beside
    which the login has its own.
    """
    try:
        async with asyncio.timeout(BEGIN_S + _WORDS_S + timeout_s):
            return await _execute(connection, where, argv, script, stdin)
    except TimeoutError as error:
        raise AgentLost(
            f"{where}: {argv[0]} on the machine did not end within {timeout_s:g} s"
        ) from error
    except (asyncssh.Error, OSError) as error:
        raise AgentLost(
            f"{where}: the SSH connection was lost while {argv[0]} ran: {error}"
        ) from error


async def _execute(
    connection: asyncssh.SSHClientConnection,
    where: str,
    argv: Sequence[str],
    script: str,
    stdin: Path | None,
) -> Completed:
    process, begun = await begin(connection, where, argv)
    async with process:
        feed = asyncio.ensure_future(_feed(process.stdin, script, stdin))
        out, err = await asyncio.gather(_drain(process.stdout), _drain(process.stderr))
        await process.wait_closed()
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
        status = process.exit_status
    return Completed(-1 if status is None else status, (begun + out)[:MAX_OUTPUT_BYTES], err)


async def _feed(into: asyncssh.SSHWriter[bytes], script: str, source: Path | None) -> None:
    try:
        if script:
            into.write(script.encode().hex().encode() + b"\n")
        if source is not None:
            with open(source, "rb") as data:  # noqa: ASYNC230  a local file, 256 KiB at a time
                while chunk := data.read(_CHUNK_BYTES):
                    into.write(chunk)
                    await into.drain()
        into.write_eof()
    except (
        asyncssh.Error,
        OSError,
    ):  # the program ended before it had read everything: its exit status says why
        return


async def _drain(source: asyncssh.SSHReader[bytes]) -> bytes:
    kept = bytearray()
    while data := await source.read(64 * KIB):
        if len(kept) < MAX_OUTPUT_BYTES:
            kept += data
    return bytes(kept[:MAX_OUTPUT_BYTES])


class _Client(asyncssh.SSHClient):
    """Compares the machine's host key with the pinned one, and keeps what its SSH server says
    before a login."""

    def __init__(self, pinned: asyncssh.SSHKey | None, key: asyncssh.SSHKey) -> None:
        self.pinned = pinned
        self.seen: asyncssh.SSHKey | None = None
        self.accepted = False  # only a server that accepts a key asks for a signature with it
        (self.pair,) = asyncssh.load_keypairs(key)
        self._sign = self.pair.sign
        vars(self.pair)["sign"] = self._note_accepted
        self.banner = b""
        self.wanted: list[str] = []

    def _note_accepted(self, data: bytes) -> bytes:
        self.accepted = True
        return self._sign(data)

    def auth_banner_received(self, msg: str, lang: str) -> None:
        self.banner = (self.banner + msg.encode("utf-8", "replace"))[: 4 * KIB]

    def kbdint_auth_requested(self) -> None:
        self.wanted.append("a code or a password (keyboard-interactive)")

    def password_auth_requested(self) -> None:
        self.wanted.append("a password")

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        self.seen = key
        return self.pinned is None or key.public_data == self.pinned.public_data

    def line(self) -> str:
        if self.seen is None:
            raise MachineError("the SSH connection came up without a host key")
        return " ".join(self.seen.export_public_key().decode("ascii").split()[:2])


def _pinned(endpoint: Endpoint) -> asyncssh.SSHKey | None:
    if endpoint.host_key is None:
        return None
    try:
        return asyncssh.import_public_key(endpoint.host_key)
    except (asyncssh.KeyImportError, ValueError):
        raise InvalidInput(
            f"the host key recorded for {endpoint.host} port {endpoint.port} is no OpenSSH "
            "public key line (ssh-ed25519 AAAA...)"
        ) from None


def _algorithms(pinned: asyncssh.SSHKey | None) -> list[str]:
    # The pinned key's kind first, so that a server with several keys shows that one. The others
    # stay on the list, so that a server without it shows another one, which is then refused.
    kinds = list(HOST_KEY_SIGNATURES)
    if pinned is not None:
        kinds.sort(key=lambda kind: kind != pinned.get_algorithm())
    return [algorithm for kind in kinds for algorithm in HOST_KEY_SIGNATURES[kind]]


def _denied(where: str, user: str, key: asyncssh.SSHKey, guard: _Client) -> MachineError:
    banner = f" It says: {last_words(guard.banner)}." if guard.banner else ""
    if passes(banner):
        return MachineUnreachable(f"{where} lets nobody in yet.{banner}")
    named = f"the SSH identity ({key.get_fingerprint()})"
    if guard.accepted:
        more = f"asks for {' or '.join(guard.wanted)}" if guard.wanted else "lets nobody in"
        return MachineDenied(
            f"{where} accepts {named}, and then {more}.{banner} Torpor logs in with a key alone: "
            f"set `AuthenticationMethods publickey` for user {user} in its sshd_config, and see "
            "that the account is neither locked nor expired, nor left out by AllowUsers or PAM"
        )
    public = key.export_public_key().decode("ascii").strip()
    return MachineDenied(
        f"{where} refuses {named}.{banner} If it let torpor in "
        "before, ~/.ssh/authorized_keys was replaced there, or others may write to it or to a "
        "directory above it. Check that its sshd takes this user's keys, and type there, as "
        f"user {user}: mkdir -p ~/.ssh && echo '{public}' >>~/.ssh/authorized_keys && "
        "chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys"
    )


def _key_changed(
    where: str, pinned: asyncssh.SSHKey | None, seen: asyncssh.SSHKey | None
) -> HostKeyChanged:
    was = pinned.get_fingerprint() if pinned else "none"
    now = seen.get_fingerprint() if seen else "none"
    return HostKeyChanged(
        f"{where} shows host key {now}, pinned is {was}: another machine answers there, or it was "
        "set up again. Nothing was sent. Compare with the provider's console; only when the "
        "change is right, remove the recorded key"
    )
