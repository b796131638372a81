"""The agent's half of autosave: it starts the process that saves a workspace, and asks it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.agent.processes import ask, start_process
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.sampler.save_lock import end_save
from torpor.machine.supervisor.autosave import AutosaveFolder, autosave_folders
from torpor.machine.supervisor.folder import JobFolder, ProcessFolder, job_that_saves
from torpor.shared.errors import InvalidInput, MachineError, WorkspaceBusy, from_wire
from torpor.shared.values import Compression, WorkspaceName, workspace_name
from torpor.shared.wire.autosave import Autosave, AutosaveState, EndAutosave, LookAtAutosave
from torpor.shared.wire.job import StandBy
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import request_line
from torpor.shared.wire.request import Nothing, Request, parse_answer

LEAVE_S: Final = 15.0
"""A process whose save was ended leaves within this time."""
_POLL_S: Final = 0.02


def autosave(request: Autosave, call: Call, start: list[str]) -> Nothing:
    """``start`` is the argv that starts a process. One of another bundle is replaced."""
    workspace = workspace_name(request.book.workspace)
    if request.book.every_s <= 0:
        raise InvalidInput(f"workspace {workspace} cannot be saved every {request.book.every_s} s")
    folder = AutosaveFolder(call.home, workspace)
    folder.make()
    lock = folder.take()
    if request.instead_of and request.instead_of == job_that_saves(call.home, workspace):
        _take_grants_of(JobFolder(call.home, request.instead_of), workspace, call)
    if lock is None and folder.bundle() == _bundle(start):
        _ask(folder, call.request_id, request)
        return Nothing()
    if lock is None:
        lock = _dismissed(folder, workspace, call)
    try:
        # With the lock: a job that gets its grants after this look ends what is started here.
        if job := job_that_saves(call.home, workspace):
            raise WorkspaceBusy(f"job {job} saves workspace {workspace} on this machine")
        start_process(start, lock, request_line(call.request_id, request), call)
    finally:
        os.close(lock)
    return Nothing()


def look_at_autosave(request: LookAtAutosave, call: Call) -> AutosaveState:
    workspace = workspace_name(request.workspace)
    folder = AutosaveFolder(call.home, workspace)
    line = WorkspaceState(call.home, workspace).past().line
    state = AutosaveState(lives=False)
    with suppress(OSError):  # none listens
        said = _ask(folder, call.request_id, request)
        state = parse_answer(LookAtAutosave, said)
    job = job_that_saves(call.home, workspace)
    return msgspec.structs.replace(state, job=job, line=line.snapshot if line else None)


def end_saves(request: EndAutosave, call: Call) -> Nothing:
    """Those of the workspace's own process, and those that the supervisor of a job makes."""
    workspace = workspace_name(request.workspace)
    end_autosave(workspace, call)
    if job := job_that_saves(call.home, workspace):
        _take_grants_of(JobFolder(call.home, job), workspace, call)
        if job_that_saves(call.home, workspace):
            raise MachineError(f"the supervisor of job {job} keeps its grants: ask again")
    return Nothing()


def end_autosave(workspace: WorkspaceName, call: Call) -> None:
    """End the process that saves the workspace, if one lives."""
    folder = AutosaveFolder(call.home, workspace)
    if folder.identity() is not None:
        os.close(_dismissed(folder, workspace, call))


def dismiss_autosaves(home: Path, call: Call) -> None:
    """Before HOME is removed. WorkspaceBusy while a process does not leave."""
    for folder in autosave_folders(home):
        os.close(_dismissed(folder, WorkspaceName(folder.path.name), call))


def used_bundles(home: Path) -> set[Path]:
    """The bundles that processes run from."""
    used = set()
    for folder in autosave_folders(home):
        lock = folder.take()
        if lock is None:
            used.add(Path(folder.bundle()))
        else:
            os.close(lock)
    return used


def _take_grants_of(folder: JobFolder, workspace: WorkspaceName, call: Call) -> None:
    """Its supervisor saves nothing from now on, but for a save after a notice that runs."""
    empty: list[Any] = []
    none = StandBy(
        job=folder.job,
        workspace=workspace,
        roots=empty,
        exclude=empty,
        accepted=empty,
        compression=Compression(),
        key=None,
        known=empty,
        parent=None,
        lost=empty,
        saves=empty,
        packs=empty,
        save_argv=empty,
        save_timeout_s=0.0,
    )
    with suppress(OSError, MachineError):  # it has just left, and its grants with it
        _ask(folder, call.request_id, none)
    end_save(call.home, workspace)


def _dismissed(folder: AutosaveFolder, workspace: WorkspaceName, call: Call) -> int:
    """The lock of the folder, whose process has left."""
    give_up = time.monotonic() + LEAVE_S
    while (lock := folder.take()) is None:
        with suppress(OSError):
            _ask(folder, call.request_id, Bye())
        end_save(call.home, workspace)
        call.check()
        if time.monotonic() >= give_up:
            raise WorkspaceBusy(
                f"the process that saves workspace {workspace} by itself does not leave: wait "
                "until its save has ended, then run it again"
            )
        time.sleep(_POLL_S)
    return lock


def _ask(folder: ProcessFolder, request_id: str, request: Request[Any]) -> dict[str, Any]:
    with folder.connect() as peer:
        said = ask(peer, request_line(request_id, request))
    if said is None:
        raise MachineError(f"the process of {folder.path} did not answer: ask again")
    if said.error is not None:
        raise from_wire(said.error)
    return dict(said.result or {})


def _bundle(start: list[str]) -> str:
    return start[start.index("autosave") - 1]
