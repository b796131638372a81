"""The processes that an installation started, found by a mark in their environment.

The mark is set before a process exists and is inherited, so one that was started a moment before
``make up`` was killed is found too, and a pid that was used again is never taken for ours.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from deployments.installation import CHECKOUT, Installation
from torpor.control.providers.local_processes import MARK as MACHINE_MARK
from torpor.control.providers.local_processes import Process, end_processes, identify

MARK: Final = "TORPOR_STARTED_BY"
_ENVIRON_MAX_BYTES: Final = 4 << 20


def launch(
    installation: Installation, role: str, argv: Sequence[str], env: Mapping[str, str]
) -> Process:
    """Start a process that outlives us; its output goes to the role's log, which begins anew."""
    log = os.open(
        installation.log(role), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
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
    child.returncode = 0  # not ours to wait for; silences the warning of Popen's own
    return identify(child.pid) or Process(child.pid, 0)


def mark(installation: Installation, role: str) -> dict[str, str]:
    """The environment that marks a process and all that it starts as the role's."""
    return {MARK: f"{role}@{installation.folder}"}


def running(
    installation: Installation, *roles: str, having: Mapping[str, str] = MappingProxyType({})
) -> list[Process]:
    """The live processes of these roles, without the local machines that flows have started.

    ``having`` keeps only those that have these variables in their environment.
    """
    wanted = {f"{name}={value}".encode() for name, value in having.items()}
    marks = {f"{MARK}={role}@{installation.folder}".encode() for role in roles}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        words = _environ(int(name))
        if marks.isdisjoint(words) or any(w.startswith(f"{MACHINE_MARK}=".encode()) for w in words):
            continue
        if not wanted <= words:
            continue
        process = identify(int(name))
        if process is not None:
            found.append(process)
    return found


def end(installation: Installation, *roles: str, polite_s: float) -> int:
    """End the processes of these roles and what they started; returns how many there were."""
    count = len(running(installation, *roles))
    if count:
        end_processes(lambda: running(installation, *roles), polite_s=polite_s)
    return count


def last_words(log: Path, at_most_bytes: int = 2000) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - at_most_bytes))
            return file.read(at_most_bytes).decode(errors="replace").strip() or "none"
    except OSError:
        return "none"


def _environ(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read(_ENVIRON_MAX_BYTES).split(b"\0"))
    except OSError:
        return set()
