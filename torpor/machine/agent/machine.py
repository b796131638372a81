"""What the agent reports about its machine."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from torpor.shared.wire.protocol import PROTOCOL, Hello

_ID_FILE = "machine-id"


def machine_id(home: Path) -> str:
    """This machine's random id, made once and kept in ``home``."""
    path = home / _ID_FILE
    for _ in range(2):
        try:
            found = path.read_text("ascii").strip()
        except FileNotFoundError:
            found = ""
        if len(found) == 32 and all(c in "0123456789abcdef" for c in found):
            return found
        fresh = path.with_name(f".{_ID_FILE}-{os.getpid()}")
        fresh.write_text(secrets.token_hex(16) + "\n", "ascii")
        os.replace(fresh, path)
    return path.read_text("ascii").strip()


def hello(home: Path, agent: str, busy: bool) -> Hello:
    """The facts of the agent's first line, as they are now."""
    return Hello(
        protocol=PROTOCOL,
        agent=agent,
        machine=machine_id(home),
        clock_unix=time.time(),
        busy=busy,
    )
