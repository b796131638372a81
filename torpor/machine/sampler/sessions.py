"""Who is logged in over SSH: people and their programs, without torpor's own connections."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from torpor.shared.wire.activity import MACHINE_VARIABLE, NOBODY, OWN_COPY

_SERVERS: Final = ("sshd", "sshd-session", "sshd-auth", "dropbear", "torpor-sshd")
_OWN: Final = (
    b" attach --home ", b" attach-and-sample --home ", b" daemon --home ", b" sample --home ",
    b"torpor-probe", b"torpor-install", OWN_COPY.encode(),
)  # fmt: skip
"""Texts in the command lines of programs that torpor runs over SSH, or starts from there."""
_TERMINALS: Final = range(136, 144)  # major device numbers of /dev/pts


class SessionLook(NamedTuple):
    """``ssh_s``: seconds since the last input of any session, NOBODY without one. ``jupyter``: a
    Jupyter server runs."""

    ssh_s: int
    jupyter: bool


class _Process(NamedTuple):
    pid: int
    name: str
    parent: int
    terminal: int


def look(
    root: Path = Path("/"),
    now: Callable[[], float] = time.time,
    machine: str = os.environ.get(MACHINE_VARIABLE, ""),
) -> SessionLook:
    """Find the programs that an SSH server started. One without a terminal counts as input now:
    it copies files, or is an editor's remote half. ``machine``: the local machine that this process
    belongs to; then the servers and programs of others on its host do not count."""
    processes = {process.pid: process for process in _processes(root / "proc")}
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    servers = {
        process.pid
        for process in processes.values()
        if process.name in _SERVERS and _is_of(root, process.pid, machine)
    }
    quiet = [
        _quiet_s(root, processes[pid].terminal, now())
        for server in servers - {1}  # process 1, to which orphans of a container fall, is left out
        for pid in children.get(server, [])
        if pid not in servers and not _is_own(root, pid, children)
    ]
    jupyter = any(
        process.name.startswith("jupyter") and _is_of(root, process.pid, machine)
        for process in processes.values()
    )
    return SessionLook(min(quiet, default=NOBODY), jupyter)


def _processes(proc: Path) -> list[_Process]:
    found = []
    for name in filter(str.isdigit, os.listdir(proc)):
        try:
            text = (proc / name / "stat").read_text("utf-8", "replace")
        except OSError:  # the process has ended
            continue
        command, _, rest = text.partition("(")[2].rpartition(")")
        facts = rest.split()
        if len(facts) > 4:  # fewer: the process ended meanwhile
            found.append(_Process(int(name), command, int(facts[1]), int(facts[4])))
    return found


def _is_of(root: Path, pid: int, machine: str) -> bool:
    """Whether a process belongs to the machine; without a mark, all do."""
    if not machine:
        return True
    try:
        environment = (root / "proc" / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # another account's process, or it has ended
        return False
    return f"{MACHINE_VARIABLE}={machine}".encode() in environment


def _is_own(root: Path, pid: int, children: dict[int, list[int]]) -> bool:
    """Whether the process is a connection of torpor's, or of a program which has just ended."""
    try:
        argv = (root / "proc" / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return True
    if any(mark in argv for mark in _OWN):
        return True
    below = children.get(pid, [])
    return bool(below) and all(_is_own(root, child, {}) for child in below)


def _quiet_s(root: Path, terminal: int, now: float) -> int:
    """Seconds since someone typed on the terminal; the kernel notes it to 8 s."""
    major, minor = terminal >> 8 & 0xFFF, terminal & 0xFF | terminal >> 12 & 0xFFF00
    if major not in _TERMINALS:
        return 0
    number = (major - _TERMINALS[0]) * 256 + minor
    try:
        return max(0, int(now - (root / "dev/pts" / str(number)).stat().st_atime))
    except OSError:  # another container's terminal
        return 0
