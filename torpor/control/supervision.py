"""What the supervisor of ``make up`` did, as a file that `watch` can read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.processes import ProcessRecord, boot_id, is_alive
from torpor.shared.values import learned

KEPT_EVENTS: Final = 200
SILENT_S: Final = 900.0
"""A supervisor that starts the server and then a worker is silent for ten minutes at most."""
_NAME: Final = "supervision.json"


class Event(msgspec.Struct, frozen=True):
    """One thing that the supervisor did or found: ``who`` is a process's role, or a check."""

    at_unix: float
    who: str
    what: str


class Supervision(msgspec.Struct, frozen=True):
    """The supervisor's record. ``troubles`` are those of now, ``events`` the newest, last one last.

    ``ended``: by `make down`, which writes it.
    """

    process: ProcessRecord
    boot: str
    looked_unix: float
    ended: bool = False
    troubles: dict[str, list[str]] = {}
    events: list[Event] = []

    def write(self, folder: Path) -> None:
        unfinished = folder / f"{_NAME}.new"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        unfinished.rename(folder / _NAME)


def installation_folder() -> Path | None:
    """The folder of the installation that started this process; None for a process of no one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def read_supervision(folder: Path) -> Supervision | None:
    """The record; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=learned(Supervision))
    except (OSError, msgspec.MsgspecError):
        return None


def told(folder: Path, *, since_unix: float, now_unix: float | None = None) -> list[str]:
    """The sentences that a person should read: what is wrong now, and what was restarted since."""
    now = time.time() if now_unix is None else now_unix
    record = read_supervision(folder)
    if record is None or record.ended:
        return [f"nothing restarts a process that ends: {folder} has no supervisor: run `make up`"]
    said = []
    if record.boot != boot_id() or not is_alive(record.process):
        said.append(
            f"nothing restarts a process that ends: the supervisor of {folder} (process "
            f"{record.process.pid}) has ended: run `make up`"
        )
    elif now - record.looked_unix > SILENT_S:
        said.append(
            f"the supervisor of {folder} (process {record.process.pid}) has looked at nothing for "
            f"{now - record.looked_unix:.0f} s: end it, and run `make up`"
        )
    said += [f"{who}: {what}" for who, whats in record.troubles.items() for what in whats]
    return said + [
        f"{event.who} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event.at_unix))} UTC: "
        f"{event.what}"
        for event in record.events
        if event.at_unix >= since_unix
    ]
