"""What the supervisor of ``torpor up`` is and did, as files that everybody else reads.

The file ``supervisor`` is locked as long as the supervisor lives, and names it: nothing else says
whether an installation is up. ``supervision.json`` tells what it did.
"""

from __future__ import annotations

import contextlib
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
"""A supervisor whose looks take long is silent for ten minutes at most."""
_NAME: Final = "supervision.json"


class Parent(msgspec.Struct, frozen=True):
    """The supervisor: the parent of an installation's server, store and workers.

    ``api_url`` is of the server that it serves, and ``own`` whether it starts that one.
    ``made_of``: what its children were started with; where that changes, others are needed.
    """

    pid: int
    api_url: str
    own: bool
    made_of: str = ""

    def write(self, folder: Path) -> None:
        """By the supervisor, which holds the lock."""
        (folder / LOCK).write_bytes(msgspec.json.encode(self))


class Event(msgspec.Struct, frozen=True):
    """One thing that the supervisor did or found: ``who`` is a process's role, or a check."""

    at_unix: float
    who: str
    what: str


class Supervision(msgspec.Struct, frozen=True):
    """The supervisor's record. ``troubles`` are those of now, ``events`` the newest, last one last.

    ``running``: the pids of the children that do their work, by role.
    """

    looked_unix: float
    troubles: dict[str, list[str]] = {}
    events: list[Event] = []
    running: dict[str, int] = {}

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{_NAME}.new"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        unfinished.rename(folder / _NAME)


def installation_folder() -> Path | None:
    """The folder of the installation that started this process; None for a process of no one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def last_parent(folder: Path) -> Parent | None:
    """The supervisor that lives, or was killed; None for one that ended on purpose."""
    try:
        return msgspec.json.decode((folder / LOCK).read_bytes(), type=learned(Parent))
    except (OSError, msgspec.MsgspecError):
        return None


def living_parent(folder: Path) -> Parent | None:
    """The supervisor that lives: its lock ends with it."""
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return last_parent(folder)
    return None


def read_supervision(folder: Path) -> Supervision | None:
    """The record; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=learned(Supervision))
    except (OSError, msgspec.MsgspecError):
        return None


def children_of(folder: Path) -> dict[str, int]:
    """The pids of the supervisor's children that do their work, by role; none without it."""
    record = read_supervision(folder) if living_parent(folder) else None
    return record.running if record else {}


def told(folder: Path, *, since_unix: float, now_unix: float | None = None) -> list[str]:
    """The sentences that a person should read: what is wrong now, and what was restarted since."""
    now = time.time() if now_unix is None else now_unix
    record, parent = read_supervision(folder), last_parent(folder)
    if record is None or parent is None:
        return [f"nothing restarts a process that ends: {folder} has no supervisor: run `make up`"]
    said = []
    if living_parent(folder) is None:
        said.append(
            f"nothing restarts a process that ends: the supervisor of {folder} (process "
            f"{parent.pid}) has ended: run `make up`"
        )
    elif now - record.looked_unix > SILENT_S:
        said.append(
            f"the supervisor of {folder} (process {parent.pid}) has looked at nothing for "
            f"{now - record.looked_unix:.0f} s: end it, and run `make up`"
        )
    said += [f"{who}: {what}" for who, whats in record.troubles.items() for what in whats]
    return said + [
        f"{event.who} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event.at_unix))} UTC: "
        f"{event.what}"
        for event in record.events
        if event.at_unix >= since_unix
    ]
