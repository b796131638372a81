"""The SSH server of one local machine: starting it, seeing that it lives, its last words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from torpor.control.ports import free_ports
from torpor.control.processes import (
    all_processes,
    boot_id,
    identify,
    is_alive,
    is_at_work,
    with_descendants,
)
from torpor.control.providers.local.folder import MARK, MachineFolder, MachineRecord, ServerRecord
from torpor.shared.errors import CreateFailed
from torpor.shared.values import MachineId

GO: Final = b"g"
"""The byte for which the server waits. It is sent once the server is on record, so that a destroy
finds it."""

_PACKAGES: Final = str(Path(__file__).resolve().parents[3])
_LAUNCH_S: Final = 60.0
# seconds from the end of a server to the end of its process, which still holds the port
_GONE_S: Final = 5.0
_POLL_S: Final = 0.02
_PORT_TRIES: Final = 5  # a free port may be taken between the look and the bind
_BACKLOG: Final = 128
# The shell ends at once, so that the server is no child of ours: init reaps it.
_DETACHED: Final = '"$@" >>"$0" 2>&1 & echo $!'


def serve(folder: MachineFolder, record: MachineRecord) -> None:
    """See to it that the machine's server listens and is on record.

    Clients may connect at once: they wait in the listener's queue while Python starts.
    """
    last = folder.read_server()
    if last is not None and server_lives(last):
        return
    if last is not None and last.process is not None and last.boot == boot_id():
        end = time.monotonic() + _GONE_S
        while is_alive(last.process) and time.monotonic() < end:
            time.sleep(_POLL_S)
    heard, speak = os.pipe()
    try:
        with _listener(record.id, None if last is None else last.port) as listener:
            process = identify(_launch(folder, record, listener.fileno(), heard))
            if process is None:
                raise CreateFailed(
                    f"the SSH server of machine {record.id} ended at once; its last words: "
                    f"{last_words(folder)}"
                )
            port = int(listener.getsockname()[1])
            folder.write_server(ServerRecord(port, boot_id(), process))
            os.write(speak, GO)
            folder.served.touch(mode=0o600)
    finally:
        os.close(heard)
        os.close(speak)


def server_lives(server: ServerRecord) -> bool:
    return server.boot == boot_id() and is_at_work(server.process)


def machine_processes(folder: MachineFolder, machine: MachineId) -> list[psutil.Process]:
    """Every live process of the machine: what carries its mark, as its server does, and what these
    began."""
    found = all_processes(others_too=True)
    mark = f"{MARK}={machine}".encode()
    own = {process for process, words in found.items() if mark in words}
    return with_descendants(own, found)


def last_words(folder: MachineFolder, at_most_bytes: int = 800) -> str:
    """The end of the server's log, for an error message."""
    try:
        with folder.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - at_most_bytes))
            return file.read(at_most_bytes).decode(errors="replace").strip() or "none"
    except OSError:
        return "none"


def _listener(machine: MachineId, known: int | None) -> socket.socket:
    """A listening socket on the ``known`` port, which clients have, or else on a free one."""
    for port in [*([] if known is None else [known]), *free_ports(_PORT_TRIES)]:
        try:
            return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        except OSError as cause:
            fault = cause
    raise CreateFailed(f"machine {machine} has no port to listen on: {fault}") from fault


def _launch(folder: MachineFolder, record: MachineRecord, listener: int, heard: int) -> int:
    server = [sys.executable, "-m", "torpor.control.providers.local.sshd", str(folder.root)]
    done = subprocess.run(
        ["sh", "-c", _DETACHED, str(folder.log), *server, str(listener), str(heard)],
        pass_fds=(listener, heard),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": _PACKAGES,
            "PYTHONDONTWRITEBYTECODE": "1",
            MARK: record.id,
        },
        start_new_session=True,
        umask=0o077,
        timeout=_LAUNCH_S,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        words = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise CreateFailed(f"the SSH server of machine {record.id} did not start: {words}")
    return int(done.stdout)
