"""Runs a command of the user on the machine, within a run."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Final, NamedTuple

from torpor.shared.errors import HookFailed, InvalidInput

_IN_MEMORY: Final = "/dev/shm"  # noqa: S108 - the file has no name there
_TAIL_BYTES: Final = 4096
_MOST_BYTES: Final = 1 << 20
_POLL_S: Final = 0.2


class Hook(NamedTuple):
    """A command of the user: its name in messages, and the setting that holds it."""

    name: str
    setting: str


QUIESCE: Final = Hook("quiesce hook", "`quiesce` in the workspace block")
RESUME: Final = Hook("resume command", "`resume` in the workspace block")
SAVE: Final = Hook("save command", "`save` of the job, or `quiesce` in the workspace block")


def run_hook(
    argv: list[str], timeout_s: float, check: Callable[[], None], hook: Hook = QUIESCE
) -> str:
    """Run the command and wait for it; what it leaves in the background may go on.

    A program's path may begin with ~/. Returns the end of what it printed. HookFailed where it
    cannot start, fails or takes too long; one that takes too long, or that runs when ``check``
    raises, is ended with its process group.
    """
    if not argv:
        raise InvalidInput(f"the {hook.name} is an empty list: give a program and its arguments")
    named = f"the {hook.name} {argv[0]!r}"
    started = time.monotonic()
    with _unnamed_file(named) as file:
        words = _Words(file)
        process = _start(argv, file, named, hook)
        try:
            while process.poll() is None:
                check()
                words.trim()
                if time.monotonic() - started > timeout_s:
                    raise HookFailed(
                        f"{named} took longer than {timeout_s:.0f} s and was ended: raise its "
                        "time limit, or make it finish"
                    )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        tail = words.last()
    if process.returncode != 0:
        raise HookFailed(
            f"{named} ended with status {process.returncode} and printed: "
            f"{tail.strip() or 'nothing'}. Fix it, or remove {hook.setting}"
        )
    return tail


def _start(argv: list[str], output: IO[bytes], named: str, hook: Hook) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [os.path.expanduser(argv[0]), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=os.path.expanduser("~"),
            start_new_session=True,
        )
    except OSError as error:
        raise HookFailed(
            f"{named} cannot be started on the machine: {error.strerror}. Correct {hook.setting}: "
            "a program on the machine, and its arguments"
        ) from None


def _unnamed_file(named: str) -> IO[bytes]:
    """A file for the hook's output. A pipe without a reader would block or end a server that the
    hook started. On disk, or in memory when the disk is full: hibernate must work then too."""
    with suppress(OSError):
        return _with_room(None)
    try:
        return _with_room(_IN_MEMORY)
    except OSError as error:
        raise HookFailed(
            f"{named} was not started: the machine has no room for its output, neither "
            f"on the disk nor in {_IN_MEMORY} ({error.strerror}). Free some space"
        ) from None


def _with_room(folder: str | None) -> IO[bytes]:
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        os.posix_fallocate(file.fileno(), 0, _MOST_BYTES)
        os.ftruncate(file.fileno(), 0)
        stack.pop_all()
    return file


class _Words:
    """The end of a file to which other processes append. ``trim`` cuts off the rest while they
    run."""

    def __init__(self, file: IO[bytes]) -> None:
        self._fd = file.fileno()
        self._before = b""
        # every process that inherits the descriptor shares its flags
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)

    def trim(self) -> None:
        if os.fstat(self._fd).st_size > _MOST_BYTES:
            self._before = self._end()
            os.ftruncate(self._fd, 0)

    def last(self) -> str:
        return (self._before + self._end())[-_TAIL_BYTES:].decode(errors="replace")

    def _end(self) -> bytes:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
