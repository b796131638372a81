"""``python3 BUNDLE COMMAND --home HOME``: ``attach``, ``attach-and-sample``, ``canary``,
``daemon``, ``rescue``, and with ``--lock FD`` also ``autosave``, ``sample`` and ``supervise``."""

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
# commands that are started with a lock that is held already
_LOCKED: Final = ("autosave", "sample", "supervise")
_COMMANDS: Final = ("attach", "attach-and-sample", "canary", "daemon", "rescue", *_LOCKED)
_STALE_S: Final = 3600.0  # a half-installed bundle of this age is stale: remove it


def main(argv: list[str]) -> int:
    """Run one of the commands. To attach, to supervise and to autosave say what went wrong as one
    JSON line on stdout."""
    command, options = argv[1:2], argv[2::2]
    wanted = ["--home", "--lock"] if command and command[0] in _LOCKED else ["--home"]
    if len(argv) != 2 + 2 * len(wanted) or options != wanted or command[0] not in _COMMANDS:
        sys.stderr.write(f"usage: BUNDLE ({'|'.join(_COMMANDS)}) --home HOME [--lock FD]\n")
        return 2
    bundle, home = Path(argv[0]).absolute(), Path(argv[3])
    if command == ["sample"]:
        return _sample(bundle, home, int(argv[5]))
    if argv[1] == "daemon":
        return _daemon(bundle, home)
    if argv[1] == "canary":
        return _canary(home)
    if argv[1] == "rescue":
        from torpor.machine.agent.rescue import rescue_by_stdin  # attach does not need it

        return rescue_by_stdin(home)
    try:
        if argv[1] == "supervise":
            _supervise(bundle, home, int(argv[5]))
        elif argv[1] == "autosave":
            _autosave(bundle, home, int(argv[5]))
        else:
            _attach(bundle, home, sampled=argv[1] == "attach-and-sample")
    except TorporError as error:
        return _say(error)
    except OSError as error:
        full = error.errno in (28, 122)  # ENOSPC, EDQUOT
        kind = DiskFull if full else MachineError
        what = {"supervise": "supervisor", "autosave": "autosave process"}.get(argv[1], "agent")
        return _say(kind(f"the {what} in {home} cannot be started or reached: {error}"))
    return 0


def _attach(bundle: Path, home: Path, *, sampled: bool) -> None:
    from torpor.machine.agent.attach import attach, own_command  # the daemon does not need it

    sampler = own_command(bundle, home, "sample") if sampled else None
    attach(home, version(bundle), own_command(bundle, home, "daemon"), sampler)


def _sample(bundle: Path, home: Path, lock: int) -> int:
    from torpor.machine.agent.home import LIFE_LOCK
    from torpor.machine.sampler.process import sample  # attach does not need it
    from torpor.machine.supervisor.marker import MARKER

    sample(home, version(bundle), lock, MARKER, LIFE_LOCK)
    return 0


def _canary(home: Path) -> int:
    """Fly the canary with the CRIU whose folder stdin names; stdout says how it fared."""
    import msgspec

    from torpor.machine.checkpoint.canary import run_canary  # attach does not need it
    from torpor.machine.checkpoint.criu import CheckpointFailed
    from torpor.machine.checkpoint.tree import program
    from torpor.shared.wire.job import Tried

    try:
        run_canary(program(Path(sys.stdin.read())), home)
        told = Tried()
    except CheckpointFailed as error:
        told = Tried(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(told))
    return 0


def _supervise(bundle: Path, home: Path, lock: int) -> None:
    from torpor.machine.supervisor.process import supervise  # attach does not need it

    supervise(home, lock, str(bundle))


def _autosave(bundle: Path, home: Path, lock: int) -> None:
    from torpor.machine.agent.attach import own_command
    from torpor.machine.supervisor.autosave import autosave  # attach does not need it

    autosave(home, lock, str(bundle), own_command(bundle, home, "rescue"))


def _daemon(bundle: Path, home: Path) -> int:
    # Imported here: attach must be quick, and importing these modules takes most of a start's time.
    from torpor.machine.agent.attach import own_command
    from torpor.machine.agent.daemon import Daemon
    from torpor.machine.agent.home import SOCKET, enter_home, hold_life_lock
    from torpor.machine.agent.memory import keep_freed_chunks
    from torpor.machine.agent.memory_room import room
    from torpor.machine.agent.memory_trouble import MemoryTrouble
    from torpor.machine.agent.operations import operations
    from torpor.machine.agent.packages import note_image
    from torpor.machine.agent.runs import RunRegistry
    from torpor.machine.agent.workers import WORKERS, workers_in

    home = enter_home(home)
    life = hold_life_lock(home)
    if life is None:
        sys.stderr.write(f"another agent lives in {home}\n")
        return 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # left by an agent that was killed: this process holds the lock of the living agent
    if os.path.lexists(SOCKET):
        os.unlink(SOCKET)
    listener.bind(SOCKET)
    os.chmod(SOCKET, 0o600)
    note_image(home)
    trouble = MemoryTrouble(home)
    workers = 1 if trouble.has_been else workers_in(room())
    if workers == WORKERS:
        keep_freed_chunks()
    runs = RunRegistry(home, workers)
    own = [own_command(bundle, home, of) for of in ("supervise", "autosave", "canary")]
    table = operations(runs, *own)
    daemon = Daemon(home, version(bundle), table, runs)
    signal.signal(signal.SIGTERM, lambda _number, _frame: daemon.stop())
    listener.listen(64)
    _remove_other_bundles(bundle, home)
    daemon.serve(listener)
    trouble.forget()
    if os.path.lexists(SOCKET):
        os.unlink(SOCKET)
    return 0


def version(bundle: Path) -> str:
    """The content hash that the bundle was installed under; "source" outside of a bundle."""
    try:
        return (bundle / COMPLETE).read_text("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return "source"


def _remove_other_bundles(bundle: Path, home: Path) -> None:
    """Only one agent lives in a HOME, so other bundles there are old or half-installed, except CRIU
    and those from which other processes run. If it is unknown from which bundles processes run, all
    of them stay."""
    from torpor.machine.agent.autosave import used_bundles
    from torpor.machine.supervisor.folder import all_kept
    from torpor.shared.wire.job import CRIU

    if not (bundle / COMPLETE).is_file():
        return
    try:
        used = {Path(kept.bundle) for _, kept in all_kept(home) if kept.supervisor.lives}
        used |= used_bundles(home)
    except (MachineError, OSError) as error:
        sys.stderr.write(f"old bundles stay: {error}\n")
        return
    for other in bundle.parent.iterdir():
        fresh = time.time() - other.lstat().st_mtime < _STALE_S
        kept = other.name.startswith(CRIU) or (other.name.startswith(".") and fresh)
        if other != bundle and other not in used and not kept:
            shutil.rmtree(other, ignore_errors=True)


def _say(error: TorporError) -> int:
    sys.stdout.write(json.dumps({"error": error.to_wire()}) + "\n")
    sys.stdout.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
