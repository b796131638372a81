"""The SSH server of one local machine, on asyncssh: programs, terminals, SFTP.

``python -m torpor.control.providers.local.sshd FOLDER LISTENER GO`` serves the socket with the
descriptor LISTENER once it reads GO. As in OpenSSH, each connection has a process: programs outlive
it, and when it ends they read the end of their input and write into a broken pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import signal
import socket
import struct
import sys
import termios
from pathlib import Path
from typing import Final

import asyncssh

from torpor.control.providers.local.folder import MARK, MachineFolder, MachineRecord
from torpor.control.providers.local.server import GO

_SHELL: Final = "/bin/sh"
_PUMP_BYTES: Final = 64 << 10  # bytes in flight between a client and its program, each way
_LOGIN_S: Final = 30
_MAX_CONNECTIONS: Final = 200
# The environment variables that Debian's sshd gives to a session.
_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/games"
_ROOT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_Process = asyncssh.SSHServerProcess[bytes]


class _Login(asyncssh.SSHServer):
    """Lets in the one account with the machine's authorized keys, as sshd's AllowUsers does."""

    def __init__(self, folder: MachineFolder, user: str) -> None:
        self._folder = folder
        self._user = user
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def begin_auth(self, username: str) -> bool:
        if username == self._user and self._connection is not None:
            self._connection.set_authorized_keys(str(self._folder.authorized_keys))
        return True

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        """Forward to this host alone; a real machine's sshd forwards by default."""
        return dest_host in ("127.0.0.1", "localhost")


class _Files(asyncssh.SFTPServer):
    """SFTP that ends with status 0, as OpenSSH's does: scp takes a missing status for a failure."""

    def exit(self) -> None:
        self.channel.exit(0)


class _Programs:
    """Runs what a client asks for, in the machine's home, with the machine's environment."""

    def __init__(self, folder: MachineFolder, record: MachineRecord) -> None:
        self._shell = _shell()
        self._environ = {
            "HOME": str(folder.home),
            "LOGNAME": record.user,
            "PATH": _ROOT_PATH if os.geteuid() == 0 else _PATH,
            "SHELL": self._shell,
            "USER": record.user,
            MARK: record.id,
        }
        # asyncio kills a child whose transport is collected.
        self._children: list[asyncio.subprocess.Process] = []

    async def run(self, process: _Process) -> None:
        """Run a program to its end. Not by asyncssh's redirect(): it dropped the last 32 KiB of
        4 MiB through ``cat``."""
        argv = [self._shell, "-c", process.command] if process.command else [self._shell, "-l"]
        terminal = process.term_type
        if terminal is None:
            (stdin, into), (outputs, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
            forwards = [(outputs, process.stdout), (errors, process.stderr)]
        else:
            into, stdin = os.openpty()
            stdout, stderr = os.dup(stdin), os.dup(stdin)
            forwards = [(os.dup(into), process.stdout)]
            _resize(into, *process.term_size[:2])
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=self._environ | ({} if terminal is None else {"TERM": terminal}),
                start_new_session=True,
                preexec_fn=None if terminal is None else _take_terminal,
            )
        except OSError as cause:
            for fd in (into, *(source for source, _ in forwards)):
                os.close(fd)
            process.stderr.write(f"{argv[0]} did not start: {cause}\n".encode())
            process.exit(126)
            return
        finally:
            for fd in (stdin, stdout, stderr):
                os.close(fd)
        self._children.append(child)
        feeder = asyncio.ensure_future(_feed(process.stdin, into))
        await asyncio.gather(*(_forward(source, target) for source, target in forwards))
        code = await child.wait()
        self._children.remove(child)
        feeder.cancel()
        if code >= 0:
            process.exit(code)
        else:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))


def main(argv: list[str]) -> None:
    """Accept connections until a signal ends this process."""
    folder, listener = MachineFolder(Path(argv[0])), socket.socket(fileno=int(argv[1]))
    with open(int(argv[2]), "rb", buffering=0) as launcher:
        if launcher.read(1) != GO:
            raise SystemExit("whoever started this server died before it was on record")
    record = folder.read_machine()
    if record is None:
        raise SystemExit(f"there is no machine in {folder.root}")
    os.chdir(folder.home)
    os.umask(0o022)
    Path("/proc/self/comm").write_text("torpor-sshd")  # by this name the sampler knows its sessions
    connections: set[int] = set()

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                connections.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        link, _ = listener.accept()
        with link:
            if len(connections) >= _MAX_CONNECTIONS:
                continue
            # A child that ends at once must not be reaped before it is counted.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                listener.close()
                _converse(folder, record, link)
            connections.add(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _converse(folder: MachineFolder, record: MachineRecord, link: socket.socket) -> None:
    """Serve one connection to its end, then end this process and nothing else."""
    try:
        asyncio.run(_connection(folder, record, link))
    except (OSError, asyncssh.Error) as cause:
        print(f"a connection ended: {cause}", file=sys.stderr, flush=True)
    finally:
        # Without the interpreter's farewell, in which asyncio would kill the programs.
        os._exit(0)


async def _connection(folder: MachineFolder, record: MachineRecord, link: socket.socket) -> None:
    connection = await asyncssh.run_server(
        link,
        server_factory=lambda: _Login(folder, record.user),
        server_host_keys=[str(folder.host_key)],
        process_factory=_Programs(folder, record).run,
        sftp_factory=_Files,
        encoding=None,
        line_editor=False,
        agent_forwarding=False,
        login_timeout=_LOGIN_S,
    )
    await connection.wait_closed()
    sys.stderr.flush()
    os._exit(0)  # before asyncio.run() cancels what still runs


async def _feed(source: asyncssh.SSHReader[bytes], into: int) -> None:
    """The client's bytes to the program, until either has had enough."""
    try:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
            os.fdopen(os.dup(into), "wb", 0),
        )
        target = asyncio.StreamWriter(transport, protocol, None, loop)
        with contextlib.closing(target):
            while True:
                try:
                    chunk = await source.read(_PUMP_BYTES)
                except asyncssh.TerminalSizeChanged as size:
                    _resize(into, size.width, size.height)
                    continue
                except (asyncssh.BreakReceived, asyncssh.SignalReceived):
                    continue
                if not chunk:
                    return
                target.write(chunk)
                await target.drain()
    except (OSError, asyncssh.Error):
        return  # the client or the program has gone, so the input ends
    finally:
        os.close(into)


async def _forward(source: int, target: asyncssh.SSHWriter[bytes]) -> None:
    """The program's bytes to the client; when the client has gone the program gets SIGPIPE."""
    reader = asyncio.StreamReader(limit=_PUMP_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: _Output(reader), os.fdopen(source, "rb", 0)
    )
    try:
        while chunk := await reader.read(_PUMP_BYTES):
            target.write(chunk)
            await target.drain()
    except (OSError, asyncssh.Error):
        return
    finally:
        transport.close()


class _Output(asyncio.StreamReaderProtocol):
    """A terminal says by an error that its last program is gone, which is no more than the end."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _resize(terminal: int, columns: int, rows: int) -> None:
    with contextlib.suppress(OSError):  # a pipe has no size
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _shell() -> str:
    """The account's shell where it runs commands, else /bin/sh."""
    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        return _SHELL
    usable = os.path.basename(shell) not in ("", "nologin", "false") and os.access(shell, os.X_OK)
    return shell if usable else _SHELL


if __name__ == "__main__":
    main(sys.argv[1:])
