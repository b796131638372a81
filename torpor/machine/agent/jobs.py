"""The agent's half of jobs: it starts a supervisor, looks at what that wrote, and ends a command.

Ending needs no supervisor: whoever asks finds the job's processes itself.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.agent.autosave import end_saves_for, give, hear_again
from torpor.machine.agent.call import Call
from torpor.machine.agent.environment import host
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.agent.older_supervisors import end_their_saves
from torpor.machine.agent.processes import ask, start_process
from torpor.machine.agent.programs import look_at
from torpor.machine.checkpoint.tree import why_not
from torpor.machine.supervisor import log
from torpor.machine.supervisor.folder import JobFolder, Kept, all_kept
from torpor.machine.supervisor.processes import OWN_MARK, end_processes, of_supervisor
from torpor.shared.errors import (
    AgentLost,
    InvalidInput,
    MachineError,
    WorkspaceBusy,
)
from torpor.shared.values import learned, workspace_name
from torpor.shared.wire.autosave import HearForAttempt
from torpor.shared.wire.job import (
    JobLook,
    JobState,
    LookAtJob,
    StartJob,
    StopJob,
    Tried,
    TryFreezing,
)
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import request_line

LEFT_GRACE_S: Final = 10.0
"""Seconds that processes of an earlier attempt get between SIGTERM and SIGKILL."""
MOST_GRACE_S: Final = 3600.0
LEAVE_S: Final = 5.0
"""Seconds within which a supervisor leaves that has nothing to do."""
CANARY_S: Final = 60.0
SETTLE_S: Final = 60.0
"""Seconds within which a supervisor starts, writes that its command has ended, or leaves."""
_UNWRITABLE: Final = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)
"""Errors of writing that another try does not mend."""
_POLL_S: Final = 0.02
_VARIABLE: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def start_job(
    request: StartJob, call: Call, supervise: list[str], autosaves: list[str]
) -> JobState:
    """Start the job's command. ``supervise`` and ``autosaves`` are the argv that start a supervisor
    and an autosave process."""
    request = _resolved(request)
    workspace = workspace_name(request.workspace) if request.workspace else None
    folder = JobFolder(call.home, request.job)
    folder.make()
    _remove_logs(call.home, request)
    if workspace is not None and folder.look()[0].state != "running":
        end_their_saves(workspace, call)  # otherwise an older supervisor that saves would not leave
    lock = _lock_to_start(folder, request.attempt, call)
    if lock is None:
        return _look(folder, call)[0]
    try:
        state, kept = folder.look()
        if state.attempt >= request.attempt and kept is not None:
            return state
        end_processes(lambda: folder.processes(kept), LEFT_GRACE_S, call.check)
        _make_log(request.log)
        if workspace is not None:
            heard = HearForAttempt(workspace, request.job, request.attempt, request.notices)
            give(workspace, heard, call, autosaves)
        mark = {OWN_MARK: str(folder.path)}
        start_process(supervise, lock, request_line(request.job, request), call, mark)
    finally:
        os.close(lock)  # the supervisor holds it by its own copy
    state, _ = _look(folder, call)
    if state.attempt != request.attempt:
        raise AgentLost(
            f"the supervisor of job {request.job} ended as it started; the agent's log on the "
            f"machine is {call.home / LOG_FILE}. Where that happens again, look for memory that "
            "runs out"
        )
    return state


def look_at_job(request: LookAtJob, call: Call, autosaves: list[str]) -> JobLook:
    """The state of the command. ``autosaves`` as in ``start_job``."""
    state, kept = _look(JobFolder(call.home, request.job), call)
    if kept is None:
        return JobLook(state, "", request.offset)
    hear_again(kept, call, autosaves)
    ended = state.state == "ended"
    try:
        piece = log.read(kept.log, request.offset, request.most_bytes, state.log_from, whole=ended)
        return JobLook(state, piece.text, piece.offset, log.size_of(kept.log))
    except OSError as error:  # the folder may have become a file, for example
        return JobLook(state, "", request.offset, unread=error.strerror or str(error))


def stop_job(request: StopJob, call: Call) -> JobState:
    folder = JobFolder(call.home, request.job)
    if not 0 <= request.grace_s <= MOST_GRACE_S:
        raise InvalidInput(f"the grace of a stop is 0 to {MOST_GRACE_S:.0f} s")
    if _look(folder, call)[1] is None and folder.identity() is None:
        end_processes(lambda: folder.processes(None), request.grace_s, call.check)
        end_saves_for(folder.job, call)
        return folder.look()[0]
    with _none_starts(folder, call):
        _, kept = folder.look()
        end_processes(lambda: folder.processes(kept), request.grace_s, call.check)
        if kept is not None:
            _ask_to_leave(folder, kept.state.attempt)
        end_saves_for(folder.job, call)
        give_up = time.monotonic() + SETTLE_S
        while (state := folder.look()[0]).state == "running":
            call.check()
            _wait(give_up, f"job {request.job} was ended, and its supervisor does not notice")
        return state


def try_freezing(request: TryFreezing, call: Call, canary: list[str]) -> Tried:
    """Answer TryFreezing. ``canary``: the argv of a process that flies the canary, apart from this
    process and its threads."""
    said = _try_freezing(request, canary)
    programs = list(look_at(call.home, request.programs))
    return msgspec.structs.replace(said, programs=programs, host=host())


def _try_freezing(request: TryFreezing, canary: list[str]) -> Tried:
    if (words := why_not()) or not request.criu:
        return Tried(words)
    try:
        done = subprocess.run(
            canary,
            input=request.criu.encode(),
            stdout=subprocess.PIPE,
            timeout=CANARY_S,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=learned(Tried))
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        return Tried(f"the canary's process failed: {error}")


def dismiss_supervisors(home: Path) -> None:
    """End all supervisors before HOME is removed. WorkspaceBusy while a command runs, or while its
    supervisor still has something to do."""
    for folder, kept in all_kept(home):
        if kept.at_work:
            raise WorkspaceBusy(
                f"the command of job {folder.job} runs on this machine: stop it before {home} is "
                "removed"
            )
        give_up = time.monotonic() + LEAVE_S
        while kept.supervisor.lives:
            _ask_to_leave(folder, kept.state.attempt)
            if time.monotonic() >= give_up:
                raise WorkspaceBusy(
                    f"the supervisor of job {folder.job} does not leave: look at the machine's "
                    f"processes, then remove {home}"
                )
            time.sleep(_POLL_S)


def _resolved(request: StartJob) -> StartJob:
    """The request with absolute paths; InvalidInput for what can never be started."""
    if not request.argv or not request.argv[0]:
        raise InvalidInput("a job's command is empty: give a program and its arguments")
    paths = [os.path.expanduser(path) for path in (request.folder, request.log, request.images)]
    for path in paths[: 3 if request.images else 2]:
        if not os.path.isabs(path):
            raise InvalidInput(f"{path!r} must be an absolute path, or begin with ~/")
    if any("\0" in text for text in (*request.argv, *paths)):
        raise InvalidInput("a job's command and paths must not hold a zero byte")
    for name, value in request.environment.items():
        if not _VARIABLE.fullmatch(name) or name.startswith("TORPOR_") or "\0" in value:
            raise InvalidInput(
                f"{name[:80]!r} cannot be an environment variable of a command: write letters, "
                "digits and _, not TORPOR_ in front, and no zero byte in its value"
            )
    if request.attempt < 1:
        raise InvalidInput(f"attempts count from 1; this is {request.attempt}")
    return msgspec.structs.replace(request, folder=paths[0], log=paths[1], images=paths[2])


def _lock_to_start(folder: JobFolder, attempt: int, call: Call) -> int | None:
    """The lock of the job's folder; None where an attempt runs, or this one was started before."""
    give_up = time.monotonic() + SETTLE_S
    while True:
        state, kept = folder.look()
        lives = folder.has_supervisor if kept is None else kept.supervisor.lives
        if (lock := folder.take()) is not None:
            if not lives:
                return lock
            os.close(lock)  # somebody has removed the lock file: the supervisor makes it again
        elif kept is not None and kept.supervisor.lives:
            if state.attempt >= attempt or state.state == "running":
                return None
            left = partial(of_supervisor, folder.path, kept.supervisor)
            # without the supervisor, init adopts the processes
            end_processes(left, LEFT_GRACE_S, call.check)
            _ask_to_leave(folder, state.attempt)
        call.check()
        if time.monotonic() >= give_up:
            raise WorkspaceBusy(
                f"the supervisor of attempt {state.attempt} of job {folder.job} does not leave: "
                "look at the machine's processes, then run it again"
            )
        time.sleep(_POLL_S)


def _look(folder: JobFolder, call: Call) -> tuple[JobState, Kept | None]:
    """The state of the command, as its supervisor wrote it. If somebody has removed the file, wait
    until the supervisor has written it again. AgentLost where that does not happen."""
    give_up = time.monotonic() + SETTLE_S
    while (seen := folder.look())[1] is None and folder.has_supervisor:
        call.check()
        if time.monotonic() >= give_up:
            raise AgentLost(
                f"the supervisor of job {folder.job} lives, and what it keeps in {folder.path} is "
                "gone and is not written again: see whether that disk is full"
            )
        time.sleep(_POLL_S)
    return seen


@contextmanager
def _none_starts(folder: JobFolder, call: Call) -> Iterator[None]:
    """Wait until no start is under way. If no supervisor lives, keep other starts out meanwhile."""
    give_up = time.monotonic() + SETTLE_S
    while (lock := folder.take()) is None:
        kept = folder.look()[1]
        if kept is not None and kept.supervisor.lives:
            break
        call.check()
        _wait(give_up, f"job {folder.job} is being started")
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _remove_logs(home: Path, request: StartJob) -> None:
    for job in request.forget:
        with suppress(OSError):  # the log was moved away; or a later job removes it
            os.unlink(f"{os.path.dirname(request.log)}/{JobFolder(home, job).job}.log")


def _make_log(path: str) -> None:
    try:
        os.close(log.open_log(path))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise InvalidInput(
            f"the log {path} cannot be written on the machine: {error.strerror}. Name a file in "
            "the workspace"
        ) from None


def _ask_to_leave(folder: JobFolder, attempt: int) -> None:
    """Ask that attempt's supervisor, if it lives, to leave when its command ends."""
    with suppress(OSError), folder.connect() as peer:
        ask(peer, request_line(str(attempt), Bye()))


def _wait(give_up: float, words: str) -> None:
    if time.monotonic() >= give_up:
        raise MachineError(f"{words}: look at the machine's processes, then run it again")
    time.sleep(_POLL_S)
