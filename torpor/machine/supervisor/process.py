"""The supervisor's process: one for each job of a HOME, apart from the agent and from everyone who
asks. It starts the command, waits for it, and writes how it ended.

It also stands by: with what ``job.standby`` gave it, in memory only, it has the workspace saved
when the machine will be taken away, and as often as that says where nobody else does, also once the
command has ended. A SIGTERM is a machine that shuts down. It leaves after the command's end when it
is asked to, or cannot save.
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
from torpor.machine.supervisor.guard import Frozen, Guard, News
from torpor.machine.supervisor.processes import (
    MARK,
    OWN_MARK,
    adopt_orphans,
    descendants,
    identify,
    reap_orphans,
    resident_bytes,
)
from torpor.machine.supervisor.requests import Requests
from torpor.shared.errors import InvalidInput
from torpor.shared.wire.job import JobState, Notice, StandBy, StartJob
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line
from torpor.shared.wire.request import Nothing, parse_request

TICK_S: Final = 1.0
_NOT_PROVEN: Final = "this machine has not proven that processes can be frozen on it"
_SHUTS_DOWN: Final = "the machine shuts down: the supervisor of the job got SIGTERM"


def supervise(home: Path, lock: int, bundle: str, save: list[str]) -> None:
    """Start the command that stdin asks for, and wait for it. ``lock``: of the job's folder;
    ``save``: the argv of a process that saves the workspace.

    Closes stdout once the command runs, or could not be started and that is on record.
    """
    os.set_inheritable(lock, False)  # the command must not hold it when this process is gone
    asked = parse_line(sys.stdin.buffer.read())
    if not isinstance(asked, Envelope):
        raise InvalidInput("a supervisor is started with a request")
    supervisor = Supervisor(home, lock, parse_request(StartJob, asked.args), bundle, save)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)
    supervisor.run()


class Supervisor:
    """Begins the attempt as it is made."""

    def __init__(
        self, home: Path, lock: int, request: StartJob, bundle: str, save: list[str]
    ) -> None:
        self._folder = JobFolder(home, request.job)
        self._lock = lock
        self._has_place = True
        self._leaving = False
        self._requests = Requests(self._folder.listen(), self._serve)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._shut_down)
        self._shuts_down = False
        adopt_orphans()
        self._images = Path(request.images) if request.freezes and request.criu else None
        self._unable = _NOT_PROVEN if request.freezes and not request.criu else ""
        self._begin(request, bundle)
        # Its threads start only now: the command is a fork of this process.
        freezes = self._images is not None and self._kept.runs
        freeze = Freeze(request.job, request.images, request.criu) if freezes else None
        wake = self._requests.wake
        self._guard = Guard(request.notices, save, wake, freeze, self._held_bytes, rests=False)
        self._look_at_orphans()

    def run(self) -> None:
        """Until the command has ended, that is written, and nothing is left to do."""
        while not self._done():
            self._requests.wait(TICK_S)
            if self._shuts_down:
                self._guard.shut_down()
                saves = self._guard.is_urgent  # then another one waits for what is being frozen
                self._shuts_down = saves and self._guard.freezes_now
                if not saves:
                    self._guard.hear(Notice("signal", _SHUTS_DOWN, time.time()))
            if not self._leaving:
                self._guard.save_if_due()
            for news in self._guard.news():
                self._hear(news)
            self._look_at_command(freezes=self._guard.freezes_now)
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
        self._kept = Kept(state, me, self._command.id, request.log, bundle, request.serves, root)
        self._folder.write(self._kept)
        self._written = True  # before it runs
        error = self._command.go()
        if error:
            self._keep(error=error)
        self._look_at_command()

    def _held_bytes(self) -> int:
        """The memory of the command; 0 once it has ended."""
        command = self._kept.command
        if not (self._kept.runs and command.lives):
            return 0
        return max(1, resident_bytes({command.pid, *descendants(command.pid)}))

    def _look_at_command(self, *, freezes: bool = False) -> None:
        """``freezes``: what is frozen needs its log as it is, unless somebody ends it."""
        if self._kept.runs and (self._leaving or not freezes):
            with suppress(OSError, InvalidInput):  # the next look tries again
                self._output.keep()
                log.cut(self._kept.log, log.MOST_LOG_BYTES)
            status = self._command.poll()
            if status is not None:
                self._ended(status)
        if not self._written:
            self._keep()

    def _look_at_orphans(self) -> None:
        if not self._guard.saves_now:  # its thread waits for the process that saves
            self._has_orphans = reap_orphans(self._command.id.pid if self._kept.runs else None)

    def _ended(self, status: int) -> None:
        state = self._kept.state
        frozen = frozen_for(self._images) if self._images and status == -signal.SIGKILL else None
        if frozen is not None:  # it goes on with its log as it is
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
        """Write what has changed; what cannot be written now is tried again at each tick."""
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
        be made now is tried again at each tick, unless what HOME stood in is gone, too."""
        with suppress(OSError):  # it is not known what is there
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
        if self._kept.runs or self._guard.saves_now:
            return False
        if not self._has_place:  # there is nowhere to write it
            return True
        stays = self._guard.stands_by or self._has_orphans  # which init would adopt
        return self._written and (self._leaving or not stays)

    # -- the machine's end

    def _shut_down(self, _number: int, _frame: object) -> None:
        self._shuts_down = True

    def _hear(self, news: News) -> None:
        if isinstance(news, Notice):
            if news.kind != "schedule":
                self._keep(notice=news, save_error="", not_frozen=self._unable)
        elif isinstance(news, Frozen):
            was, done = self._kept.state, news.done
            state = msgspec.structs.replace(
                was, saved=done.saved or was.saved, not_frozen=done.error
            )
            self._kept = msgspec.structs.replace(self._kept, state=state)
            self._look_at_command()  # where it was ended for that, one write says both
            self._keep()
        elif news.scheduled:
            if news.saved is not None:
                self._keep(saved=news.saved)
        else:
            self._keep(saved=news.saved or self._kept.state.saved, save_error=news.error)

    # -- requests

    def _serve(self, asked: Envelope) -> Nothing:
        if asked.op == StandBy.op:
            book = parse_request(StandBy, asked.args)
            self._guard.stand_by(book)
            until_unix = self._guard.stands_until_unix
            self._kept = msgspec.structs.replace(
                self._kept, saves=book.workspace, saves_until_unix=until_unix
            )
            self._keep()
        elif asked.op == Bye.op:
            if asked.id == str(self._kept.state.attempt):  # else it was meant for another one
                self._leaving = True
        else:
            raise InvalidInput("this supervisor does not know what it is asked for")
        return Nothing()


def _among_nodes(request: StartJob) -> dict[str, str]:
    """How the command finds those of the other machines; nothing where there are none."""
    if not request.nodes:
        return {}
    return {
        "TORPOR_NODES": str(len(request.nodes)),
        "TORPOR_NODE_RANK": str(request.rank),
        "TORPOR_NODE_IPS": ",".join(request.nodes),
        "TORPOR_MASTER": request.nodes[0],
    }


def _thawed(request: StartJob) -> tuple[Thawed | None, str]:
    """The command whose processes go on, or why they do not. Its images are removed."""
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
    """Into the agent's log, which is this process's standard error. A full disk has no room for
    it either."""
    with suppress(OSError):
        os.write(2, f"supervisor: {words}\n".encode("utf-8", "backslashreplace"))
