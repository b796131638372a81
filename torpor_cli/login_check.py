"""Checks, for each `ssh`, whether OpenSSH's file about a workspace's machine still holds.

OpenSSH runs this file by its path, with ``python -I -S``: without site-packages it takes 0.1 s,
where `torpor` takes seconds. It reads one object of the store, the rental's record, by a signed
address that the file brings. Whatever is not certain is left to `torpor ssh --refresh`, which
asks the market and writes the file anew.

The record's signature is not checked here. Nothing that it says leads anywhere: the file alone
names the machine, and OpenSSH refuses any host key but the one that is pinned for this rental.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

MARK: Final = "# torpor: "
"""Begins the first line of a file that can be checked; the rest of the line says in JSON what to
check."""
MET: Final = "--met"
_NOTED: Final = frozenset(
    {"server", "record", "authorities", "authority", "host_key", "host", "port"}
    | {"knock", "knock_port"}
)
"""The keys that this version writes in that line. A file of another version counts as out of
date."""
_WITHIN_S: Final = 2.0
_MOST_BYTES: Final = 1 << 20


def main(arguments: list[str]) -> int:
    """``HOSTS_FILE REFRESH...``: end with 0, where the file is not current after REFRESH, the
    arguments of Python. ``--met HOSTS_FILE WHY KEY``: see met()."""
    if arguments[0] == MET:
        _, file, why, key = arguments
        return met(Path(file), why, key)
    file, *refresh = arguments
    if not is_current(Path(file)):
        os.execv(sys.executable, [sys.executable, *refresh])  # noqa: S606 - argv, and no shell
    return 0


def is_current(file: Path) -> bool:
    """Whether the rental is still handed over, and its machine answers at the address in the
    file."""
    noted = _noted(file)
    if noted is None or not noted.keys() >= _NOTED or noted["server"] != _server():
        return False
    answers: list[bool] = []
    knock = threading.Thread(target=lambda: answers.append(_answers(noted)), daemon=True)
    knock.start()
    if not _is_handed_over(noted):
        return False
    knock.join(_WITHIN_S)
    return answers == [True]


def met(file: Path, why: str, key: str) -> int:
    """Say in plain words that another machine answers, and have the next `ssh` look again. OpenSSH
    calls this with the host key that it has met, in base64, and ends after a status other than 0.
    ``why``: what OpenSSH looks for; the key is known where that is HOSTNAME."""
    noted = _noted(file)
    if why != "HOSTNAME" or noted is None or key == noted["host_key"].split()[1]:
        return 0
    print(
        f"torpor: {noted['host']} port {noted['port']} shows another host key than the machine of "
        f"workspace {file.name}. Nobody was logged in. Run this again: torpor then asks the market "
        "where the workspace is. Where that is the same address, another machine answers in its "
        "place",
        file=sys.stderr,
    )
    _forget(file)
    return 1


def _forget(file: Path) -> None:
    """Remove the first line of the file, so that the file does not count any more."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as opened:
        opened.write(file.read_bytes().partition(b"\n")[2])
    unfinished.rename(file)


def _noted(file: Path) -> dict[str, Any] | None:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape") as opened:
            first = opened.readline()
        return dict(json.loads(first.removeprefix(MARK))) if first.startswith(MARK) else None
    except (OSError, ValueError):
        return None


def _server() -> str | None:
    """The Prefect server that this shell means: a workspace of another server may have the same
    name."""
    # with -S, Python does not find torpor
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from torpor.control.own_server import (
        CONNECTION_FILE,
        choose_server,
        connection,
        state_folder,
    )

    if connection(needed=False) is None and (state_folder() / CONNECTION_FILE).exists():
        return None  # the file is damaged: `torpor ssh --refresh` says so
    choice = choose_server()
    return choice.taken.api_url if choice else None


def _answers(noted: dict[str, Any]) -> bool:
    try:
        socket.create_connection((noted["knock"], noted["knock_port"]), timeout=_WITHIN_S).close()
    except OSError:
        return False
    return True


def _is_handed_over(noted: dict[str, Any]) -> bool:
    from urllib.request import HTTPSHandler, build_opener

    handlers = []
    try:
        if noted["record"].startswith("https:"):
            import ssl

            trusted = ssl.create_default_context(
                cafile=noted["authorities"], cadata=noted["authority"] or None
            )
            handlers = [HTTPSHandler(context=trusted)]
        with build_opener(*handlers).open(noted["record"], timeout=_WITHIN_S) as answer:
            record = json.loads(answer.read(_MOST_BYTES))["record"]
        return bool(
            record["state"] == "handed over"
            and record.get("snapshot") is None  # otherwise the machine is being ended
            and record.get("host_key") == noted["host_key"]
        )
    except (OSError, ValueError, LookupError, TypeError):  # HTTPError and SSLError are OSErrors
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
