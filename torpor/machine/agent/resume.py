"""The counterpart of the quiesce hook: a machine that is kept goes on with what the hook stopped,
and with the programs that were frozen.

A run that quiesces, or a save that the machine makes by itself, leaves a record, and holds a lock
as long as it lives. In the end it runs the command itself. A process of its own waits for the lock
beside it: where the run has ended without that, or its process was killed, and no other run takes
the lock up for GRACE_S, that process runs the command. Where that process was killed too, the next
start of the agent, or the next save that the machine makes by itself, starts it again. So whoever
is killed, the user's program does not stay stopped. The command runs at least once: one that is
killed before it has ended runs again.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.agent.home import try_lock
from torpor.machine.agent.hook import RESUME, run_hook
from torpor.machine.agent.log import LOG_FILE, Log
from torpor.machine.agent.programs import end_frozen, let_go_on
from torpor.machine.sampler.ring import boot_id
from torpor.shared.errors import HookFailed, InvalidInput, WorkspaceBusy
from torpor.shared.values import learned
from torpor.shared.wire.snapshot import Program

GRACE_S: Final = 60.0
"""Seconds within which a living control side begins its run again, at an agent that was
restarted."""
WAIT_S: Final = 2.0
"""Seconds to wait for the lock, which a process that finds nothing owed holds for a moment."""
_POLL_S: Final = 0.05
_MODULE: Final = "torpor.machine.agent.resume"
_WORKSPACES: Final = "workspaces"
_RECORD: Final = "resume"
_LOCK: Final = "resume.lock"


class PendingResume(msgspec.Struct, frozen=True):
    """A command that has to run and programs that have to go on, unless the machine has started
    again since."""

    argv: list[str]
    timeout_s: float
    boot: str
    programs: list[Program] = []


class Resumption:
    """The resume command of one workspace on this machine, in the folder of its state."""

    def __init__(self, folder: Path) -> None:
        self._home = folder.parents[1]
        self._record = folder / _RECORD
        self._lock_path = folder / _LOCK
        self._log = Log(self._home / LOG_FILE)
        self._lock_fd: int | None = None
        self._pending: PendingResume | None = None

    def take_up(self) -> None:
        """Take over what an earlier run owes. WorkspaceBusy while that run's resume command
        runs."""
        if self._lock_fd is not None or not self._record.exists():
            return
        self._lock(WAIT_S)
        self._pending = self._recorded()
        if self._pending is None:
            self._settled()

    def add_pending(
        self,
        argv: list[str],
        timeout_s: float,
        grace_s: float = GRACE_S,
        programs: Sequence[Program] = (),
    ) -> None:
        """Record that the command has to run and the programs have to go on, whatever ends."""
        if self._pending is None:
            self._pending = PendingResume(argv, timeout_s, boot_id(), [*programs])
            try:
                self._lock(WAIT_S)
                self._write(self._pending)
                _watch(self._record.parent, grace_s)
            except OSError as error:  # a full disk: the end of this run still knows of it
                what = f"{argv[0]!r} will not run" if argv else "frozen programs do not go on"
                self._log.write(f"if this agent is killed, {what}: {error}")
        else:
            owed = self._pending
            both = [
                *owed.programs,
                *(program for program in programs if program not in owed.programs),
            ]
            self._pending = msgspec.structs.replace(owed, argv=owed.argv or argv, programs=both)
            if self._pending != owed:
                with suppress(OSError):  # a full disk, as above
                    self._write(self._pending)

    @property
    def programs(self) -> Sequence[Program]:
        """The programs that may be frozen."""
        return () if self._pending is None else self._pending.programs

    def settle(self) -> str:
        """Run the command and let the programs go on, if owed; returns in words what went wrong.
        Only its time limit stops it."""
        owed, self._pending = self._pending, None
        if owed is None:
            return ""
        try:
            faults = let_go_on(self._home, owed.programs)
            try:
                if owed.argv:
                    run_hook(owed.argv, owed.timeout_s, lambda: None, RESUME)
            except (HookFailed, InvalidInput) as error:
                faults.append(str(error))
            for fault in faults:
                self._log.write(fault)
            return "; ".join(faults)
        finally:
            self._settled()

    def end_programs(self) -> None:
        """End the frozen programs, which from now on go on only from their images. The command
        stays owed, because the machine may live on."""
        owed = self._pending
        if owed is None or not owed.argv:
            self.drop()
            return
        end_frozen(self._home, owed.programs)
        self._pending = msgspec.structs.replace(owed, programs=[])
        with suppress(OSError):  # a full disk: settle() still knows of it
            self._write(self._pending)

    def drop(self) -> None:
        """Forget what is owed, because the machine ends. Frozen programs go on only from their
        images."""
        owed, self._pending = self._pending, None
        if owed is not None:
            end_frozen(self._home, owed.programs)
        self._settled()

    def leave(self) -> None:
        """Leave what the ended run still owes to the process that waits for that."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def wait_and_run(self, grace_s: float) -> None:
        """Wait, in the process of its own, until nothing is owed; run the command where the run has
        not."""
        while True:
            self._lock(None)
            if self._recorded() is None:
                return
            self.leave()
            time.sleep(grace_s)
            with suppress(WorkspaceBusy):
                self._lock(0.0)
                self._pending = self._recorded()
                if self._pending is not None:
                    self._log.write("the run that quiesced the workspace is gone: resuming")
                self.settle()
                return

    def _lock(self, wait_s: float | None) -> None:
        """Take the lock. WorkspaceBusy where another process holds it for ``wait_s`` seconds; None
        waits without limit."""
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if wait_s is None:
            fcntl.flock(fd, fcntl.LOCK_EX)
        else:
            give_up = time.monotonic() + wait_s
            while not try_lock(fd):
                if time.monotonic() >= give_up:
                    os.close(fd)
                    raise WorkspaceBusy(
                        "the resume command of an earlier run is at work on this machine: wait "
                        "until it has ended"
                    )
                time.sleep(_POLL_S)
        self._lock_fd = fd

    def _recorded(self) -> PendingResume | None:
        try:
            owed = msgspec.json.decode(self._record.read_bytes(), type=learned(PendingResume))
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None
        return owed if owed.boot == boot_id() else None

    def _write(self, owed: PendingResume) -> None:
        fresh = self._record.with_name("resume.new")
        fresh.write_bytes(msgspec.json.encode(owed))
        os.replace(fresh, self._record)

    def _settled(self) -> None:
        with suppress(FileNotFoundError):
            self._record.unlink()
        self.leave()


def watch_owed(home: Path, grace_s: float = GRACE_S) -> None:
    """Start the process that waits, for each workspace that has something owed and no run."""
    for record in (home / _WORKSPACES).glob(f"*/{_RECORD}"):
        fd = os.open(record.with_name(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(fd):
                _watch(record.parent, grace_s)
        finally:
            os.close(fd)


def _watch(folder: Path, grace_s: float) -> None:
    """Start the waiting process. A thread waits for its end, so that it becomes no zombie."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-s",
            "-E",
            "-X",
            "utf8",
            "-m",
            _MODULE,
            json.dumps([str(folder), grace_s]),
        ],
        cwd=Path(__file__).parents[3],  # the folder of torpor's packages, also outside of a bundle
        env={**os.environ, "HOME": os.path.expanduser("~")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name="resume-watch", daemon=True).start()


def main(argv: Sequence[str]) -> None:
    folder, grace_s = json.loads(argv[1])
    with suppress(FileNotFoundError):  # the agent was told to leave nothing behind
        Resumption(Path(folder)).wait_and_run(grace_s)


if __name__ == "__main__":
    main(sys.argv)
