"""The user's command: a child in a session of its own, which waits until the command is on record.
A supervisor may be killed between the fork and the record. So the child runs the user's program
only after a byte came through a pipe; if the supervisor dies before, the child reads the end of the
pipe and exits."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from typing import Final, NoReturn

from torpor.machine.checkpoint.namespace import Namespace
from torpor.machine.supervisor.processes import ProcessId, identify

NOT_FOUND: Final = 127
NOT_STARTED: Final = 126
"""What a shell gives as the status of a command that it cannot start."""
_GO: Final = b"g"
_RESTORED: Final = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
"""Signals whose handling is reset: otherwise a program would inherit which signals Python, the
supervisor or the starter of the machine ignores."""


class Command:
    """``argv`` in ``folder``, with its output in the file ``log``; started by ``go``."""

    def __init__(
        self,
        argv: list[str],
        folder: str,
        log: int,
        environment: Mapping[str, str],
    ) -> None:
        wait, self._begin = os.pipe()
        self._said, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._begin)
                _become(argv, folder, log, environment, wait, say)
            finally:
                os._exit(NOT_STARTED)
        os.close(wait)
        os.close(say)
        self.id: Final[ProcessId] = identify(pid)

    def go(self) -> str:
        """Let the command run. Returns why it could not be started; empty if it was."""
        try:
            os.write(self._begin, _GO)
        except BrokenPipeError:  # somebody has ended the child: that is the command's end
            return ""
        finally:
            os.close(self._begin)
        with open(self._said, encoding="utf-8", errors="replace") as said:
            return said.read()

    def poll(self) -> int | None:
        """The command's exit status, negative for a signal; None while it runs."""
        pid, status = os.waitpid(self.id.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


class Thawed:
    """A command whose processes went on in a namespace of their own. ``root``: the id of its first
    process there. The namespace's first process is a child of this process, and ends with the
    command's status."""

    def __init__(self, namespace: Namespace, root: int) -> None:
        self.id: Final[ProcessId] = identify(namespace.first)
        self.root = root
        self._namespace = namespace

    def go(self) -> str:
        """Return at once, because the command runs already. From now on it also runs without its
        supervisor."""
        self._namespace.keep()
        return ""

    def poll(self) -> int | None:
        """The command's exit status, 128 and the number for a signal; None while it runs."""
        pid, status = os.waitpid(self.id.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def _become(
    argv: list[str],
    folder: str,
    log: int,
    environment: Mapping[str, str],
    wait: int,
    say: int,
) -> NoReturn:
    """In the child: become the command, or say why not."""
    signal.set_wakeup_fd(-1)
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if os.read(wait, 1) != _GO:
        os._exit(0)
    at_fault, program = f"its folder {folder}", f"{argv[0]!r}"
    try:
        os.chdir(folder)
        at_fault = program
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell, as intended
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        words = f"{at_fault}: {error.strerror}. "
        if missing and at_fault == program and "/" not in argv[0]:
            words += (
                f"PATH is {environment.get('PATH', os.defpath)}: give the program's whole path, or "
                "start it with `bash -lc`, which sets PATH as a login does"
            )
        else:
            words += "Name a program of the machine or of the workspace, and a folder that is there"
        os.write(say, words.encode("utf-8", "backslashreplace"))
        os._exit(NOT_FOUND if missing else NOT_STARTED)
