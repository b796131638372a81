"""The agent's half of autosave: it starts the process that saves a workspace, and asks it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.agent.older_supervisors import end_their_saves, older_that_saves
from torpor.machine.agent.processes import ask, start_process
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.sampler.save_lock import end_save
from torpor.machine.supervisor.autosave import refuse_late
from torpor.machine.supervisor.folder import AUTOSAVES, AutosaveFolder, Kept, autosave_folders
from torpor.machine.supervisor.processes import (
    HARD_S,
    OWN_MARK,
    kill,
    own_folders,
    own_processes,
)
from torpor.shared.errors import MachineError, TorporError, WorkspaceBusy, from_wire
from torpor.shared.values import WorkspaceName, workspace_name
from torpor.shared.wire.autosave import (
    Autosave,
    AutosaveState,
    EndAutosave,
    HearForAttempt,
    LookAtAutosave,
)
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import request_line
from torpor.shared.wire.request import Nothing, Request, parse_answer

LEAVE_S: Final = 15.0
"""A process whose save was ended leaves within this time."""
HANGS_S: Final = 60.0
"""Seconds after which a process that does not answer hangs."""
_POLL_S: Final = 0.02
_turn: Final = threading.Lock()
"""Held by the thread that may start a process. Trying a process's lock makes the lock look taken to
other threads for a moment."""


def autosave(request: Autosave, call: Call, start: list[str]) -> Nothing:
    """Serve the request Autosave. ``start`` is the argv that starts an autosave process."""
    give(workspace_name(request.book.workspace), request, call, start)
    return Nothing()


def give(
    workspace: WorkspaceName, request: Autosave | HearForAttempt, call: Call, start: list[str]
) -> None:
    """Hand the request to the process that saves the workspace. Starts a process where none lives,
    and replaces one of another bundle."""
    with _own_turn(call):
        end_their_saves(workspace, call)
        folder = AutosaveFolder(call.home, workspace)
        folder.make()
        if isinstance(request, HearForAttempt):
            # ends the save of the attempt before, with that attempt's save command
            end_save(call.home, workspace)
        give_up = time.monotonic() + HANGS_S
        while (lock := _vacant(folder)) is None:
            if folder.bundle() != _bundle(start):
                if isinstance(request, Autosave):
                    refuse_late(request, _state_of(folder, call).job, folder.read())
                lock = _dismissed(folder, call)
                break
            try:
                _ask(folder, call.request_id, request)
            except (OSError, MachineError) as error:  # the process may be just leaving
                if isinstance(error, MachineError) and isinstance(request, Autosave):
                    # the process may have used grants, and each grant is for one process only
                    raise
                call.check()
                if time.monotonic() >= give_up:
                    lock = _dismissed(folder, call)
                    break
            else:
                return
            time.sleep(_POLL_S)
        _start(folder, lock, request, call, start)


@contextmanager
def _own_turn(call: Call) -> Iterator[None]:
    while not _turn.acquire(timeout=_POLL_S):
        call.check()
    try:
        yield
    finally:
        _turn.release()


def hear_again(kept: Kept, call: Call, start: list[str]) -> None:
    """Start the process that hears notices for a running command, where that process has ended. A
    failure is tried again at the next look."""
    if not (kept.at_work and _turn.acquire(blocking=False)):
        return
    try:
        with suppress(OSError, TorporError):
            for folder in autosave_folders(call.home):
                told, state = folder.read(), kept.state
                if told.job != state.job or told.over or (lock := _vacant(folder)) is None:
                    continue
                heard = HearForAttempt(folder.workspace, state.job, state.attempt, told.notices)
                _start(folder, lock, heard, call, start)
    finally:
        _turn.release()


def end_saves_for(job: str, call: Call) -> None:
    """End the saves for a job that was stopped, and with it its save command: remove its grants,
    and see that no process takes a book that is still on its way. A process that hangs with grants
    is ended."""
    for folder in _all_folders(call.home):
        # the folder is gone, and so is its process; or nothing can be written
        with suppress(OSError):
            _end_for(folder, job, call)


def _end_for(folder: AutosaveFolder, job: str, call: Call) -> None:
    request = HearForAttempt(folder.workspace, job, 0, over=True)
    give_up, ends = time.monotonic() + HANGS_S, 0.0
    while (lock := _vacant(folder)) is None:
        try:
            _ask(folder, call.request_id, request)
        except (OSError, MachineError):  # the process makes its folder again, or hangs
            call.check()
        except TorporError:  # a process of an older bundle: it saves for no job
            return
        else:
            if folder.read().job == job:
                end_save(call.home, folder.workspace)
            return
        told = folder.read()
        if told.job != job and (folder.has_told or time.monotonic() >= give_up):
            return  # nothing of this job is there
        if time.monotonic() >= give_up:
            ends = ends or time.monotonic() + HARD_S
            if not told.saves_until_unix or time.monotonic() >= ends:
                return
            kill(own_processes(folder.path))
        time.sleep(_POLL_S)
    try:
        told = folder.read()
        if told.job == job:
            end_save(call.home, folder.workspace)  # the save outlives the process that began it
            folder.write(msgspec.structs.replace(told, over=True))
    finally:
        os.close(lock)


def _all_folders(home: Path) -> list[AutosaveFolder]:
    """The folders of all workspaces that were ever saved so, and of all processes that live,
    because a command may have removed a folder."""
    there = {folder.path: folder for folder in autosave_folders(home)}
    for path in own_folders(home / AUTOSAVES):
        there.setdefault(path, AutosaveFolder(home, WorkspaceName(path.name)))
    return [*there.values()]


def look_at_autosave(request: LookAtAutosave, call: Call) -> AutosaveState:
    workspace = workspace_name(request.workspace)
    line = WorkspaceState(call.home, workspace).past().line
    state = _state_of(AutosaveFolder(call.home, workspace), call)
    job = state.job or older_that_saves(call.home, workspace)
    return msgspec.structs.replace(state, job=job, line=line.snapshot if line else None)


def _state_of(folder: AutosaveFolder, call: Call) -> AutosaveState:
    state = AutosaveState(lives=False)
    with suppress(OSError, MachineError):  # no process answers
        said = _ask(folder, call.request_id, LookAtAutosave(folder.workspace))
        state = parse_answer(LookAtAutosave, said)
    return state


def end_autosave(request: EndAutosave, call: Call) -> Nothing:
    workspace = workspace_name(request.workspace)
    with _own_turn(call), suppress(FileNotFoundError):  # neither a folder nor a process is there
        os.close(_dismissed(AutosaveFolder(call.home, workspace), call))
    end_their_saves(workspace, call)
    return Nothing()


def dismiss_autosaves(home: Path, call: Call) -> None:
    """End all autosave processes before HOME is removed. WorkspaceBusy while a process does not
    leave."""
    for folder in _all_folders(home):
        with suppress(FileNotFoundError):  # as in end_autosave
            os.close(_dismissed(folder, call))


def used_bundles(home: Path) -> set[Path]:
    """The bundles from which autosave processes run."""
    used = set()
    for folder in autosave_folders(home):
        lock = folder.take()
        if lock is None:
            used.add(Path(folder.bundle()))
        else:
            os.close(lock)
    return used


def _start(
    folder: AutosaveFolder, lock: int, asked: Autosave | HearForAttempt, call: Call, argv: list[str]
) -> None:
    try:
        line, mark = request_line(call.request_id, asked), {OWN_MARK: str(folder.path)}
        start_process(argv, lock, line, call, mark)
    finally:
        os.close(lock)  # the process holds it by its own copy


def _vacant(folder: AutosaveFolder) -> int | None:
    """The lock of a folder, if no process lives for it. The folder of a living process may have
    been removed by a command."""
    try:
        lock = folder.take()
    except FileNotFoundError:
        if own_processes(folder.path):
            return None
        raise
    if lock is None:
        return None
    os.close(lock)  # at once, because that process makes its folder again
    return None if own_processes(folder.path) else folder.take()


def _dismissed(folder: AutosaveFolder, call: Call) -> int:
    """The lock of the folder, after its process has left. A process that does not answer is
    ended."""
    give_up, ends, hangs = time.monotonic() + LEAVE_S, 0.0, True
    while (lock := _vacant(folder)) is None:
        with suppress(OSError, MachineError):
            _ask(folder, call.request_id, Bye())
            hangs = False
        end_save(call.home, folder.workspace)
        call.check()
        if time.monotonic() >= give_up:
            ends = ends or time.monotonic() + HARD_S
        if hangs and time.monotonic() < ends:
            kill(own_processes(folder.path))
        elif ends:
            raise WorkspaceBusy(
                f"the process that saves workspace {folder.workspace} by itself does not leave: "
                "wait until its save has ended, then run it again"
            )
        time.sleep(_POLL_S)
    return lock


def _ask(folder: AutosaveFolder, request_id: str, request: Request[Any]) -> dict[str, Any]:
    """The process's answer. OSError where no process listens, or where it ended before it had read
    the request. MachineError where a process does not answer: it may or may not have carried out
    the request."""
    with folder.connect() as peer:
        try:
            said = ask(peer, request_line(request_id, request))
        # a Unix socket says this only while bytes are unread
        except (BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            raise MachineError(
                f"the process of {folder.path} did not answer ({error}): ask again"
            ) from None
    if said is None:
        raise MachineError(f"the process of {folder.path} did not answer: ask again")
    if said.error is not None:
        raise from_wire(said.error)
    return dict(said.result or {})


def _bundle(start: list[str]) -> str:
    return start[start.index("autosave") - 1]
