"""The processes that an installation started, found by a mark in their environment.

Child processes inherit the mark from before their start. So a process is found even if ``make up``
was killed a moment later, and a reused pid never counts as ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from deployments.installation import CHECKOUT, Installation
from torpor.control.processes import (
    STARTED_BY,
    ProcessRecord,
    all_processes,
    end_processes,
    identify,
    is_alive,
    is_running,
)
from torpor.control.providers.local.folder import MARK as MACHINE_MARK
from torpor.shared.values import MIB

MARK: Final = STARTED_BY
LOG_BYTES: Final = 16 * MIB
"""Of one log; as much again lies in the older one beside it."""


def launch(
    installation: Installation, role: str, argv: Sequence[str], env: Mapping[str, str]
) -> ProcessRecord:
    """Start a process that outlives this one. Its output is appended to the role's log."""
    log = os.open(
        installation.log(role), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        child = subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            env={**env, **mark(installation, role)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at `make up` does not reach it
        )
    finally:
        os.close(log)
    child.returncode = 0  # it outlives us; this silences Popen's warning
    return identify(child.pid) or ProcessRecord(child.pid, 0)


def mark(installation: Installation, role: str) -> dict[str, str]:
    """The variables that mark a process, and all that it starts, as this role's."""
    return {MARK: f"{role}@{installation.folder}"}


def running(
    installation: Installation, *roles: str, having: Mapping[str, str] = MappingProxyType({})
) -> list[psutil.Process]:
    """The live processes of these roles, without the local machines that flows have started.

    ``having`` keeps only those that have these variables in their environment.
    """
    wanted = {f"{name}={value}".encode() for name, value in having.items()}
    marks = {f"{MARK}={role}@{installation.folder}".encode() for role in roles}
    return [
        process
        for process, words in all_processes().items()
        if process.pid != os.getpid()
        and not marks.isdisjoint(words)
        and not any(word.startswith(f"{MACHINE_MARK}=".encode()) for word in words)
        and wanted <= words
        and is_running(process)
    ]


def started_process(
    installation: Installation, role: str, having: Mapping[str, str] = MappingProxyType({})
) -> ProcessRecord | None:
    """The role's own process, `prefect server start` say; not the flow runs that it started."""
    for process in running(installation, role, having=having):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "start" in process.cmdline():
                return identify(process.pid)
    return None


def trim(log: Path) -> None:
    """Move a log that is too big to ``NAME.1``. The process that appends to it goes on doing so."""
    if log.stat().st_size > LOG_BYTES:
        shutil.copy(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)  # a line that is written in between is lost


def end(installation: Installation, *roles: str, polite_s: float) -> int:
    """End the processes of these roles and their children; returns how many there were."""
    count = len(running(installation, *roles))
    if count:
        end_processes(lambda: running(installation, *roles), polite_s=polite_s)
    return count


def kill(process: ProcessRecord) -> None:
    """SIGKILL one process, and nothing that it started: flow runs outlive a killed worker."""
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(process.pid)
        if is_alive(process):
            one.kill()
            end_processes(lambda: [one] if is_alive(process) else [], polite_s=0.0)


def last_words(log: Path, at_most_bytes: int = 2000) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - at_most_bytes))
            return file.read(at_most_bytes).decode(errors="replace").strip() or "none"
    except OSError:
        return "none"
