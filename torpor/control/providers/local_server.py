"""The SSH server of one local machine: starting it, seeing that it lives, its last words."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from torpor.control.ports import free_ports
from torpor.control.providers import asyncssh_host, openssh_host
from torpor.control.providers.local_place import MachineRecord, Place, ServerRecord
from torpor.control.providers.local_processes import (
    Process,
    boot_id,
    end_processes,
    identify,
    is_at_work,
    server_processes,
    wait_for_end,
)
from torpor.shared.errors import CreateFailed
from torpor.shared.values import MachineId

_LISTEN_S = 20.0  # from launch to pid file
_LISTEN_POLL_S = 0.01
_DEAD_LOOK_S = 0.1  # how often to see whether the server still lives while it starts
_GONE_S = 5.0  # from the end of a server to that of its process, which still holds the port
_PORT_TRIES = 5  # a free port may be taken between the look and the bind
_TAKEN: Final = "ddress already in use"


def serve(place: Place, record: MachineRecord) -> None:
    """See to it that the machine's server listens and is on record."""
    last = place.read_server()
    if last is not None and server_lives(last):
        return
    if last is None or last.process is None:
        # An earlier create was killed between launch and record. Nobody knows that server.
        end_processes(lambda: server_processes(record.id, place.log))
    elif last.boot == boot_id():
        wait_for_end([last.process], _GONE_S)
    host = openssh_host if record.server == "openssh" else asyncssh_host
    for attempt in range(_PORT_TRIES):
        port = last.port if last is not None and attempt == 0 else free_ports(1)[0]
        heard = _log_bytes(place)
        place.write_server(ServerRecord(port, boot_id()))
        place.pid_file.unlink(missing_ok=True)
        host.launch(place, record, port)
        process = _await_listening(place, record.id)
        if process is not None:
            place.write_server(ServerRecord(port, boot_id(), process))
            return
        words = log_words(place, heard)
        if _TAKEN not in words:
            break
    raise CreateFailed(
        f"the SSH server of machine {record.id} ({record.server}) did not begin to listen on "
        f"127.0.0.1 port {port}; its last words: {words or 'none'}"
    )


def server_lives(server: ServerRecord) -> bool:
    return server.process is not None and server.boot == boot_id() and is_at_work(server.process)


def log_words(place: Place, begin: int, at_most: int = 800) -> str:
    """What the server's log says after ``begin``: its end."""
    try:
        with place.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - at_most))
            return file.read(at_most).decode(errors="replace").strip()
    except OSError:
        return ""


def _await_listening(place: Place, machine: MachineId) -> Process | None:
    """The server's process once it has written its pid file; None when it died or hangs."""
    started = time.monotonic()
    looked = started
    while (now := time.monotonic()) < started + _LISTEN_S:
        with contextlib.suppress(OSError, ValueError):
            process = identify(int(place.pid_file.read_text()))
            if process is not None:
                return process
        if now - looked >= _DEAD_LOOK_S:
            looked = now
            if not server_processes(machine, place.log) and not place.pid_file.exists():
                return None
        time.sleep(_LISTEN_POLL_S)
    end_processes(lambda: server_processes(machine, place.log))
    return None


def _log_bytes(place: Place) -> int:
    try:
        return place.log.stat().st_size
    except OSError:
        return 0
