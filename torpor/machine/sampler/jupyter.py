"""What the machine's Jupyter servers do: asked on loopback, with the token that each leaves in a
file for programs of its user."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from torpor.shared.wire.activity import NOBODY

EVERY_S: Final = 15.0
_ANSWER_S: Final = 3.0
_MOST_BYTES: Final = 1 << 20
_FILES: Final = ("jpserver-*.json", "nbserver-*.json")


class Jupyter:
    """Asks the servers on a thread of its own, so that one that hangs delays no sample."""

    def __init__(self, folders: list[Path] | None = None) -> None:
        self._folders = runtime_folders() if folders is None else folders
        self.quiet_s = NOBODY
        self.answered = False
        threading.Thread(target=self._run, name="jupyter", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.quiet_s, self.answered = look(self._folders)
            time.sleep(EVERY_S)


def runtime_folders() -> list[Path]:
    """Where servers of this user leave their files."""
    named = os.environ.get("JUPYTER_RUNTIME_DIR")
    data = os.environ.get("JUPYTER_DATA_DIR")
    folders = [Path(named)] if named else []
    folders += [Path(data) / "runtime"] if data else []
    return [*folders, Path("~/.local/share/jupyter/runtime").expanduser()]


def look(folders: list[Path], now: Callable[[], float] = time.time) -> tuple[int, bool]:
    """Seconds since the last activity of any kernel or terminal, NOBODY without one; and whether
    there are servers and all of them answered."""
    servers = list(_servers(folders))
    kernels = [_ask(facts, "api/kernels") for facts in servers]
    terminals = [_ask(facts, "api/terminals") for facts in servers]
    every = [session for listed in (*kernels, *terminals) for session in listed or []]
    quiet = [_quiet_s(session, now()) for session in every if isinstance(session, dict)]
    return min(quiet, default=NOBODY), bool(kernels) and None not in kernels


def _servers(folders: list[Path]) -> Iterator[dict[str, Any]]:
    files = [path for folder in folders for kind in _FILES for path in sorted(folder.glob(kind))]
    for path in files:
        try:
            facts = json.loads(path.read_bytes())
            os.kill(int(facts["pid"]), 0)
        except PermissionError:
            pass  # another user's server lives
        except (OSError, ValueError, KeyError, TypeError):  # left by a server that was killed
            continue
        yield facts


def _ask(facts: dict[str, Any], question: str) -> list[Any] | None:
    """The list that the server answers; None if it does not answer."""
    try:
        port = int(facts["port"])
        path = urlsplit(str(facts["url"])).path.rstrip("/")
        kind = http.client.HTTPSConnection if facts.get("secure") else http.client.HTTPConnection
        connection = kind("127.0.0.1", port, timeout=_ANSWER_S)
        try:
            token = {"Authorization": f"token {facts.get('token', '')}"}
            connection.request("GET", f"{path}/{question}", headers=token)
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES)
        finally:
            connection.close()
        found = json.loads(body) if answer.status == 200 else None
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return None
    return found if isinstance(found, list) else None


def _quiet_s(session: dict[str, Any], now: float) -> int:
    """Seconds since the kernel's last activity: 0 for a kernel at work, and for one that does not
    say since when it rests."""
    if session.get("execution_state") == "busy":
        return 0
    try:
        last = datetime.fromisoformat(str(session["last_activity"]).replace("Z", "+00:00"))
        return max(0, int(now - last.timestamp()))
    except (KeyError, ValueError):
        return 0
