"""``python3 BUNDLE COMMAND --home HOME``: ``attach``, ``attach-and-sample``, ``daemon``, and
``sample --lock FD``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from torpor.shared.errors import DiskFull, MachineError, TorporError

COMPLETE: Final = ".complete"  # in a bundle: its content hash, written when all is there
_COMMANDS: Final = ("attach", "attach-and-sample", "daemon", "sample")
_STALE_S: Final = 3600.0  # a half-installed bundle of this age is stale: remove it


def main(argv: list[str]) -> int:
    """Run one of the commands. To attach says what went wrong as one JSON line on stdout."""
    command, options = argv[1:2], argv[2::2]
    wanted = ["--home", "--lock"] if command == ["sample"] else ["--home"]
    if len(argv) != 2 + 2 * len(wanted) or options != wanted or command[0] not in _COMMANDS:
        sys.stderr.write(f"usage: BUNDLE ({'|'.join(_COMMANDS)}) --home HOME [--lock FD]\n")
        return 2
    bundle, home = Path(argv[0]).absolute(), Path(argv[3])
    if command == ["sample"]:
        return _sample(bundle, home, int(argv[5]))
    if argv[1] == "daemon":
        return _daemon(bundle, home)
    try:
        _attach(bundle, home, sampled=argv[1] == "attach-and-sample")
    except TorporError as error:
        return _say(error)
    except OSError as error:
        full = error.errno in (28, 122)  # ENOSPC, EDQUOT
        kind = DiskFull if full else MachineError
        return _say(kind(f"the agent in {home} cannot be attached to: {error}"))
    return 0


def _attach(bundle: Path, home: Path, *, sampled: bool) -> None:
    from torpor.machine.agent.attach import attach, own_command  # the daemon does not need it

    sampler = own_command(bundle, home, "sample") if sampled else None
    attach(home, version(bundle), own_command(bundle, home, "daemon"), sampler)


def _sample(bundle: Path, home: Path, lock: int) -> int:
    from torpor.machine.agent.home import LIFE_LOCK, MARKER
    from torpor.machine.sampler.process import sample  # attach need not load it

    sample(home, version(bundle), lock, MARKER, LIFE_LOCK)
    return 0


def _daemon(bundle: Path, home: Path) -> int:
    # Imported here: attach must be quick, and these take most of a start's time.
    from torpor.machine.agent.daemon import Daemon
    from torpor.machine.agent.home import SOCKET, enter_home, hold_life_lock
    from torpor.machine.agent.memory import keep_freed_chunks
    from torpor.machine.agent.operations import operations
    from torpor.machine.agent.runs import RunRegistry

    home = enter_home(home)
    life = hold_life_lock(home)
    if life is None:
        sys.stderr.write(f"another agent lives in {home}\n")
        return 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.lexists(SOCKET):  # left by an agent that was killed: we hold the lock of the living
        os.unlink(SOCKET)
    listener.bind(SOCKET)
    os.chmod(SOCKET, 0o600)
    keep_freed_chunks()
    runs = RunRegistry(home)
    daemon = Daemon(home, version(bundle), operations(runs), runs)
    signal.signal(signal.SIGTERM, lambda _number, _frame: daemon.stop())
    listener.listen(64)
    _remove_other_bundles(bundle)
    daemon.serve(listener)
    if os.path.lexists(SOCKET):
        os.unlink(SOCKET)
    return 0


def version(bundle: Path) -> str:
    """The content hash that the bundle was installed under; "source" outside of a bundle."""
    try:
        return (bundle / COMPLETE).read_text("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return "source"


def _remove_other_bundles(bundle: Path) -> None:
    """Only one agent lives in a HOME, so the other bundles there are old or half-installed."""
    if not (bundle / COMPLETE).is_file():
        return
    for other in bundle.parent.iterdir():
        fresh = time.time() - other.lstat().st_mtime < _STALE_S
        if other != bundle and not (other.name.startswith(".") and fresh):
            shutil.rmtree(other, ignore_errors=True)


def _say(error: TorporError) -> int:
    sys.stdout.write(json.dumps({"error": error.to_wire()}) + "\n")
    sys.stdout.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
