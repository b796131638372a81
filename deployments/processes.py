"""Start processes of an installation, and find those that no parent holds: flow runs, which outlive
their worker, the demo's, and what an earlier version has started.

These are found by a mark in their environment, which child processes inherit from before their
start: a reused pid never counts as ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from deployments.installation import CHECKOUT, Installation
from torpor.control.processes import (
    STARTED_BY,
    all_processes,
    end_processes,
    ending_with_this_process,
    is_running,
)
from torpor.control.providers.local.folder import MARK as MACHINE_MARK
from torpor.shared.values import MIB

MARK: Final = STARTED_BY
RUN_MARK: Final = b"PREFECT__FLOW_RUN_ID="
"""The variable that Prefect sets in the process of each run, and that all processes of the run
inherit."""
LOG_BYTES: Final = 16 * MIB
"""Bytes of one log at most. The older log beside it has as many again."""


def begin(
    installation: Installation,
    role: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    apart: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, however that ends; ``apart``: one that outlives it.
    Its output is appended to the role's log."""
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
            start_new_session=True,  # Ctrl-C at `make up` does not reach the process
            preexec_fn=None if apart else ending_with_this_process(),
        )
    finally:
        os.close(log)
    return child


def mark(installation: Installation, role: str) -> dict[str, str]:
    """The variables that mark a process, and all that it starts, as this role's."""
    return {MARK: f"{role}@{installation.folder}"}


def flow_runs(installation: Installation, *roles: str) -> list[psutil.Process]:
    """The processes of the flow runs that workers of these roles have started."""
    marked = _marked(installation, roles)
    return [
        process
        for process, words in marked.items()
        if any(word.startswith(RUN_MARK) for word in words)
    ]


def running(installation: Installation, *roles: str) -> list[psutil.Process]:
    """The live processes of these roles, with flow runs."""
    return [*_marked(installation, roles)]


def end(installation: Installation, *roles: str, polite_s: float) -> None:
    """End the processes of these roles and their children."""
    end_processes(lambda: running(installation, *roles), polite_s=polite_s)


def _marked(installation: Installation, roles: Sequence[str]) -> dict[psutil.Process, set[bytes]]:
    """The processes with the mark of these roles, without the local machines that flows have
    started."""
    marks = {f"{MARK}={role}@{installation.folder}".encode() for role in roles}
    return {
        process: words
        for process, words in all_processes().items()
        if process.pid != os.getpid()
        and not marks.isdisjoint(words)
        and not any(word.startswith(f"{MACHINE_MARK}=".encode()) for word in words)
        and is_running(process)
    }


def trim(log: Path) -> None:
    """Move a log that is too big to ``NAME.1``. The process that appends to it goes on doing so."""
    if log.stat().st_size > LOG_BYTES:
        shutil.copy(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)  # a line that is written at this moment is lost


def printed_since(said_bytes: int, log: Path) -> bytes:
    """The part of a log behind its first ``said_bytes`` bytes."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(said_bytes if said_bytes <= size else 0)  # the log was trimmed
        return file.read()
    return b""


def last_words(log: Path, at_most_bytes: int = 2000) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - at_most_bytes))
            return file.read(at_most_bytes).decode(errors="replace").strip() or "none"
    except OSError:
        return "none"
