"""The supervisor's process: one for each job of a HOME, apart from the agent and from everyone who
asks. It starts the command, keeps its log, waits for it, and writes how it ended.

A SIGTERM is a machine that shuts down: the autosave process has the workspace saved then, and this
one stays. It leaves once the command has ended, but for one that was frozen: then it stays until
that goes on or is stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.checkpoint.tree import frozen_for, remove_images, thaw
from torpor.machine.supervisor import log
from torpor.machine.supervisor.command import NOT_FOUND, NOT_STARTED, Command, Thawed
from torpor.machine.supervisor.folder import JobFolder, Kept
from torpor.machine.supervisor.freezing import Freeze
from torpor.machine.supervisor.processes import (
    MARK,
    OWN_MARK,
    adopt_orphans,
    identify,
    reap_orphans,
)
from torpor.machine.supervisor.requests import Requests
from torpor.shared.errors import InvalidInput
from torpor.shared.wire.job import JobState, StartJob
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line
from torpor.shared.wire.request import Nothing, parse_request

TICK_S: Final = 1.0
FROZEN_S: Final = 12 * 3600.0
"""Seconds that a supervisor stays for a frozen command that nobody lets go on or stops: as long as
a machine saves by itself. Until then no other snapshot may be stored of this machine."""


def supervise(home: Path, lock: int, bundle: str) -> None:
    """Start the command that stdin asks for, and wait for it. ``lock``: of the job's folder.

    Closes stdout once the command runs, or could not be started and that is on record.
    """
    os.set_inheritable(lock, False)  # the command must not hold the lock when this process is gone
    asked = parse_line(sys.stdin.buffer.read())
    if not isinstance(asked, Envelope):
        raise InvalidInput("a supervisor is started with a request")
    supervisor = Supervisor(home, lock, parse_request(StartJob, asked.args), bundle)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)
    supervisor.run()


class Supervisor:
    """Runs one attempt of a job's command."""

    def __init__(self, home: Path, lock: int, request: StartJob, bundle: str) -> None:
        self._folder = JobFolder(home, request.job)
        self._lock = lock
        self._has_place = True
        self._leaving = False
        self._frozen_s = 0.0  # since when the command is frozen
        self._requests = Requests(self._folder.listen(), self._serve)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        adopt_orphans()
        self._images = Path(request.images) if request.freezes and request.criu else None
        self._begin(request, bundle)
        self._look_at_orphans()

    def run(self) -> None:
        """Run until the command has ended, its end is written, and nothing is left to do."""
        while not self._done():
            self._requests.wait(TICK_S)
            self._look_at_command()
            self._look_at_orphans()
            self._look_at_folder()

    # -- the command

    def _begin(self, request: StartJob, bundle: str) -> None:
        began = log.size_of(request.log)
        thawed, afresh = _thawed(request) if request.images else (None, "")
        log.say(request.log, f"attempt {request.attempt} {'goes on' if thawed else 'begins'}")
        if afresh:
            log.say(request.log, f"its processes did not go on: {afresh}")
        output = log.open_log(request.log)
        self._output = log.Output(request.log)
        environment = {
            **os.environ,
            **request.environment,
            "TORPOR_JOB": request.job,
            "TORPOR_ATTEMPT": str(request.attempt),
            **_among_nodes(request),
            MARK: str(self._folder.path),
        }
        environment.pop(OWN_MARK, None)
        self._command: Command | Thawed = thawed or Command(
            request.argv, request.folder, output, environment
        )
        os.close(output)
        state = JobState(
            request.job,
            request.attempt,
            "running",
            started_unix=time.time(),
            log_from=began,
            went_on=thawed is not None,
            afresh=afresh,
        )
        me, root = identify(os.getpid()), thawed.root if thawed else None
        self._kept = Kept(
            state,
            me,
            self._command.id,
            request.log,
            bundle,
            request.serves,
            root,
            Freeze(request.job, request.images, request.criu) if request.freezes else None,
        )
        self._folder.write(self._kept)
        self._written = True  # written before the command runs
        error = self._command.go()
        if error:
            self._keep(error=error)
        self._look_at_command()

    def _look_at_command(self) -> None:
        """Nothing is done while the command is being frozen, which needs its log unchanged, unless
        somebody ends the command. The save says first how a frozen command ended."""
        if self._kept.runs:
            try:
                lock, is_free = self._folder.take_log(), False
            except OSError:  # somebody has removed the folder, or the disk is full
                lock, is_free = None, True
            try:
                if lock is not None or is_free or self._leaving:
                    self._look_at_running()
            finally:
                if lock is not None:
                    os.close(lock)
        if not self._written:
            self._keep()

    def _look_at_running(self) -> None:
        with suppress(OSError, InvalidInput):  # the next look tries again
            self._output.keep()
            log.cut(self._kept.log, log.MOST_LOG_BYTES)
        status = self._command.poll()
        if status is not None:
            self._ended(status)

    def _look_at_orphans(self) -> None:
        self._has_orphans = reap_orphans(self._command.id.pid if self._kept.runs else None)

    def _ended(self, status: int) -> None:
        state = self._kept.state
        frozen = frozen_for(self._images) if self._images and status == -signal.SIGKILL else None
        if frozen is not None:  # a frozen command goes on with its log as it is
            self._frozen_s = time.monotonic()
            self._keep(state="ended", status=status, ended_unix=time.time(), frozen=frozen)
            return
        how = f"with status {status}" if status >= 0 else f"by {_signal_name(-status)}"
        words = f"attempt {state.attempt} ended {how}"
        if state.error and status in (NOT_FOUND, NOT_STARTED):
            words = f"attempt {state.attempt} could not start {state.error}"
        try:
            self._output.keep(ended=True)
            log.say(self._kept.log, words)
        except (OSError, InvalidInput) as error:
            _note(f"the log of job {state.job} cannot be written: {error}")
        self._keep(state="ended", status=status, ended_unix=time.time())

    def _keep(self, **changes: Any) -> None:
        """Write the state if it has changed; what cannot be written now is tried again at each
        tick."""
        state = msgspec.structs.replace(self._kept.state, **changes)
        self._kept = msgspec.structs.replace(self._kept, state=state)
        failed_before = not self._written
        try:
            self._folder.write(self._kept)
            self._written = True
        except OSError as error:
            self._written = False
            if not failed_before:
                _note(f"the state of job {state.job} cannot be written: {error}")

    def _look_at_folder(self) -> None:
        """Make again what somebody has removed, as `rm -rf ~/.*` of the command does. What cannot
        be made now is tried again at each tick, unless the directory that contained HOME is gone,
        too."""
        with suppress(OSError):  # what the folder holds is unknown
            if self._folder.is_whole(self._lock):
                return
            self._has_place = self._folder.has_place
            lock = self._folder.make_again(self._lock)
            if lock is None:
                return
            os.set_inheritable(lock, False)
            if lock != self._lock:
                os.close(self._lock)
                self._lock = lock
            self._requests.listen(self._folder.listen())
            self._keep()

    def _done(self) -> bool:
        if self._kept.runs:
            return False
        if not self._has_place:  # there is no place to write to
            return True
        # if this process left, init would adopt the orphans
        stays = self._has_orphans or self._is_frozen()
        return self._written and (self._leaving or not stays)

    def _is_frozen(self) -> bool:
        """Whether the command was frozen and ended, and may go on soon."""
        if self._kept.state.frozen is None or self._images is None:
            return False
        is_recent = time.monotonic() < self._frozen_s + FROZEN_S
        return is_recent and frozen_for(self._images) is not None

    # -- requests

    def _serve(self, asked: Envelope) -> Nothing:
        if asked.op == Bye.op:
            # otherwise the request was meant for another attempt
            if asked.id == str(self._kept.state.attempt):
                self._leaving = True
        else:
            raise InvalidInput("this supervisor does not know what it is asked for")
        return Nothing()


def _among_nodes(request: StartJob) -> dict[str, str]:
    """The environment variables by which the command finds the other machines of its job; none if
    there are none."""
    if not request.nodes:
        return {}
    return {
        "TORPOR_NODES": str(len(request.nodes)),
        "TORPOR_NODE_RANK": str(request.rank),
        "TORPOR_NODE_IPS": ",".join(request.nodes),
        "TORPOR_MASTER": request.nodes[0],
    }


def _thawed(request: StartJob) -> tuple[Thawed | None, str]:
    """The command whose frozen processes go on, or why they do not. The images are removed."""
    images = Path(request.images)
    if not os.path.lexists(images):
        return None, "the workspace holds none that were frozen" if request.frozen else ""
    if request.freezes and (request.frozen is None or frozen_for(images) != request.frozen):
        remove_images(images)
        return None, "what was frozen is of another snapshot" if request.frozen else ""
    if not request.criu:
        remove_images(images)
        return None, "they cannot go on here"
    try:
        return Thawed(*thaw(Path(request.criu), images)), ""
    except Exception as error:  # noqa: BLE001  the command is started in any case
        return None, str(error)
    finally:
        remove_images(images)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _note(words: str) -> None:
    """Write a line into the agent's log, which is this process's standard error. Ignores errors of
    a full disk."""
    with suppress(OSError):
        os.write(2, f"supervisor: {words}\n".encode("utf-8", "backslashreplace"))
