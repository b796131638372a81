"""The supervisor of ``torpor up``, as everybody else sees it: a lock, and a record.

The file ``supervisor`` is locked as long as the supervisor lives: nothing else says whether an
installation is up. ``supervision.json`` says who it is, what it serves, and what it did.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from torpor.control.own_server import FOLDER_VARIABLE
from torpor.shared.values import learned

LOCK: Final = "supervisor"
STORE: Final = "store"
"""The role of the store in the record."""
KEPT_EVENTS: Final = 200
SILENT_S: Final = 900.0
"""Seconds of silence after which a supervisor is reported. One whose looks take long is silent for
ten minutes at most."""
RECORD: Final = "supervision.json"


class SupervisorEvent(msgspec.Struct, frozen=True):
    """One thing that the supervisor did or found: ``who`` is a process's role, or a check."""

    at_unix: float
    who: str
    what: str


class Supervision(msgspec.Struct, frozen=True):
    """The record of the supervisor, the parent of an installation's server, store and workers.

    ``api_url`` is of the server that it serves, and ``own`` whether it starts that one. ``version``
    and ``login``, of which this is a digest: what its children were started with. ``running``: the
    pids of the children that do their work, by role; none once it has ended in order. ``troubles``
    are the present ones; ``events`` are the newest, in their order.
    """

    pid: int
    api_url: str
    own: bool
    version: str = ""
    login: str = ""
    looked_unix: float = 0.0
    running: dict[str, int] = {}
    troubles: dict[str, list[str]] = {}
    events: list[SupervisorEvent] = []

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{RECORD}.new"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        unfinished.rename(folder / RECORD)


def installation_folder() -> Path | None:
    """The folder of the installation that started this process; None if none did."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock on that file. The lock ends with the process."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_supervision(folder: Path) -> Supervision | None:
    """The newest record; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=learned(Supervision))
    except (OSError, msgspec.MsgspecError):
        return None


def living(folder: Path) -> Supervision | None:
    """The record of the living supervisor; None if none lives."""
    return read_supervision(folder) if is_held(folder / LOCK) else None


def children_of(folder: Path) -> dict[str, int]:
    """The pids of the supervisor's children that do their work, by role; empty if no supervisor
    lives."""
    record = living(folder)
    return record.running if record else {}


def trouble_of(folder: Path, role: str) -> str:
    """Why the supervisor cannot start this child; empty where it can, or has not tried."""
    record = read_supervision(folder)
    return "; ".join(record.troubles.get(role, [])) if record else ""


def told(folder: Path, *, since_unix: float, now_unix: float | None = None) -> list[str]:
    """The sentences that a person should read: what is wrong now, and what was restarted since."""
    now = time.time() if now_unix is None else now_unix
    record = living(folder)
    if record is None:
        return [
            f"nothing restarts a process that ends: {folder} has no supervisor: run `torpor up`"
        ]
    said = []
    if now - record.looked_unix > SILENT_S:
        said.append(
            f"the supervisor of {folder} (process {record.pid}) has looked at nothing for "
            f"{now - record.looked_unix:.0f} s: end it, and run `torpor up`"
        )
    said += [f"{who}: {what}" for who, whats in record.troubles.items() for what in whats]
    return said + [
        f"{event.who} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event.at_unix))} UTC: "
        f"{event.what}"
        for event in record.events
        if event.at_unix >= since_unix
    ]
