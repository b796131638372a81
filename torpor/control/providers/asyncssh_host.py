"""asyncssh as the server of one local machine, where there is no usable sshd.

``python -m torpor.control.providers.asyncssh_host FOLDER PORT`` leaves its parent's process tree,
serves SSH like sshd would (exec, shell without a terminal, SFTP), and writes its pid file once it
listens.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import asyncssh

from torpor.control.providers.local_place import MachineRecord, Place, write_whole
from torpor.control.providers.local_processes import MARK
from torpor.shared.errors import CreateFailed

_LAUNCH_S = 20
_PACKAGES = str(Path(__file__).resolve().parents[3])
_SHELL = "/bin/sh"
_PUMP_BYTES = 64 << 10  # in flight between a client and its program, each way
# What Debian's sshd gives to a session.
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"
_ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def launch(place: Place, record: MachineRecord, port: int) -> None:
    """Start the server in a process of its own; CreateFailed where it does not even begin."""
    argv = [
        sys.executable,
        "-m",
        "torpor.control.providers.asyncssh_host",
        str(place.root),
        str(port),
    ]
    environ = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": _PACKAGES,
        "PYTHONDONTWRITEBYTECODE": "1",
        MARK: record.id,
    }
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environ,
            start_new_session=True,
            umask=0o022,
            timeout=_LAUNCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise CreateFailed(f"asyncssh did not start for machine {record.id}: {cause}") from cause
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace")[-500:].strip()
        raise CreateFailed(f"asyncssh did not start for machine {record.id}: {words}")


class _Server(asyncssh.SSHServer):
    """Lets in the one account with the machine's authorized keys, as sshd's AllowUsers does."""

    def __init__(self, place: Place, user: str) -> None:
        self._place = place
        self._user = user
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def begin_auth(self, username: str) -> bool:
        if username == self._user and self._connection is not None:
            self._connection.set_authorized_keys(str(self._place.authorized_keys))
        return True


class _Sessions:
    """Runs what clients ask for, in the machine's home, with the machine's environment."""

    def __init__(self, place: Place, record: MachineRecord) -> None:
        self._home = str(place.home)
        self._shell = _shell()
        self._environ = {
            "HOME": self._home,
            "LOGNAME": record.user,
            "PATH": _ROOT_PATH if os.geteuid() == 0 else _PATH,
            "SHELL": self._shell,
            "USER": record.user,
            MARK: record.id,
        }
        # Kept until they end by themselves: asyncio kills a child whose transport it collects.
        self._running: set[asyncio.Task[int]] = set()

    async def run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Like sshd: a program outlives its client, but reads the end and writes into nothing."""
        # Not by asyncssh's redirect(): it dropped the last 32 KiB of 4 MiB through ``cat``.
        argv = [self._shell, "-c", process.command] if process.command else [self._shell, "-l"]
        outputs, errors = os.pipe(), os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=outputs[1],
                stderr=errors[1],
                cwd=self._home,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as cause:
            os.close(outputs[0])
            os.close(errors[0])
            process.stderr.write(f"{argv[0]} did not start: {cause}\n".encode())
            process.exit(126)
            return
        finally:
            os.close(outputs[1])
            os.close(errors[1])
        waiter = asyncio.ensure_future(child.wait())
        self._running.add(waiter)
        waiter.add_done_callback(self._running.discard)
        feeder = asyncio.ensure_future(_feed(process.stdin, child.stdin))
        try:
            await asyncio.gather(
                _forward(outputs[0], process.stdout), _forward(errors[0], process.stderr)
            )
            code = await asyncio.shield(waiter)
        finally:
            feeder.cancel()
        if code >= 0:
            process.exit(code)
        else:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))


async def _feed(source: asyncssh.SSHReader[bytes], target: asyncio.StreamWriter | None) -> None:
    """The client's bytes to the program, until either has had enough."""
    if target is None:
        return
    try:
        while chunk := await source.read(_PUMP_BYTES):
            target.write(chunk)
            await target.drain()
    except (OSError, asyncssh.Error):
        pass  # the client or the program has gone; either way the input is at its end
    finally:
        target.close()


async def _forward(source: int, target: asyncssh.SSHWriter[bytes]) -> None:
    """The program's bytes to the client; when the client has gone the program gets SIGPIPE."""
    reader = asyncio.StreamReader(limit=_PUMP_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", 0)
    )
    try:
        while chunk := await reader.read(_PUMP_BYTES):
            target.write(chunk)
            await target.drain()
    except (OSError, asyncssh.Error):
        pass
    finally:
        transport.close()


def _shell() -> str:
    """The account's shell where it runs commands, else /bin/sh."""
    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        return _SHELL
    usable = os.path.basename(shell) not in ("", "nologin", "false") and os.access(shell, os.X_OK)
    return shell if usable else _SHELL


async def _serve(place: Place, record: MachineRecord, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sessions = _Sessions(place, record)
    listener = await asyncssh.create_server(
        lambda: _Server(place, record.user),
        "127.0.0.1",
        port,
        server_host_keys=[str(place.host_key)],
        process_factory=sessions.run,
        sftp_factory=True,
        encoding=None,
        line_editor=False,
        login_timeout=30,
        keepalive_interval=0,
    )
    write_whole(place.pid_file, f"{os.getpid()}\n".encode())
    await stop.wait()
    listener.close()


def _leave_parent(place: Place) -> None:
    """Become a process of init's with the machine's log as its output."""
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(place.home)


def main(argv: list[str]) -> None:
    place, port = Place(Path(argv[0])), int(argv[1])
    record = place.read_machine()
    if record is None:
        raise SystemExit(f"there is no machine in {place.root}")
    _leave_parent(place)
    code = 1
    try:
        asyncio.run(_serve(place, record, port))
        code = 0
    except OSError as cause:
        print(f"asyncssh host: {cause}", file=sys.stderr)
    finally:
        # Without the interpreter's farewell, in which asyncio would kill the sessions' programs.
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
