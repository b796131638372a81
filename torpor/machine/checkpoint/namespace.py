"""A PID and mount namespace of its own for a restored tree, whose numbers are free there.

The namespace's first process restores the tree, and reaps it and what it leaves behind. Outside it
is a child of the process that made it, and when that first process is ended, the kernel ends all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.shared.errors import TorporError

_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
_NO_SET_UID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_KEEP: Final = b"k"
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Namespace(NamedTuple):
    """``first``: its first process, by its id here. It ends with the process that holds ``hold``,
    until that one keeps it."""

    first: int
    hold: int

    def keep(self) -> None:
        """It is on record: from now on it also lives without this process."""
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.hold, _KEEP)
        os.close(self.hold)


def begin(restore: Callable[[], None], root: int) -> Namespace:
    """Call ``restore`` as the first process of new namespaces, and return them once it has
    returned. That process lives until nothing is left in the namespace, and ends with the status of
    ``root``, a process there; 128 and the number of a signal that ended it.

    CheckpointFailed with the words of what ``restore`` raised, or where there can be no namespace.
    Only for a process without threads: it forks twice.
    """
    told, tell = os.pipe()
    bound, hold = os.pipe()
    between = os.fork()
    if between == 0:
        _between(restore, root, tell, bound)
    os.close(tell)
    os.close(bound)
    with open(told, encoding="utf-8", errors="replace") as words:
        said = words.read()
    os.waitpid(between, 0)
    first, _, fault = said.partition("\n")
    if fault or not first:
        os.close(hold)
        if first:
            with suppress(ProcessLookupError):
                os.kill(int(first), signal.SIGKILL)
        raise CheckpointFailed(fault or "the process of the new namespace ended without a word")
    return Namespace(int(first), hold)


def _between(restore: Callable[[], None], root: int, tell: int, bound: int) -> None:
    """The namespace begins with the children of the process that asks for it."""
    try:
        _leave_all_but(tell, bound)
        _call("unshare", _libc.unshare(_NEW_PIDS | _NEW_MOUNTS))
        wait, go = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(go)
            _first(restore, root, tell, wait, bound)
        os.write(tell, f"{first}\n".encode())  # before what the first one says: it waits for us
    except BaseException as error:  # noqa: BLE001  nobody else tells it
        with suppress(OSError):
            os.write(tell, f"\n{error}".encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _first(restore: Callable[[], None], root: int, tell: int, wait: int, bound: int) -> None:
    try:
        threading.Thread(target=_end_with, args=(bound,), daemon=True).start()
        os.read(wait, 1)  # the end of the one between, which has written its line
        os.close(wait)
        os.setsid()
        _mount(b"none", b"/", None, _RECURSIVE | _PRIVATE)
        _mount(b"proc", b"/proc", b"proc", _NO_SET_UID | _NO_DEVICES | _NO_PROGRAMS)
        restore()
    except TorporError as error:
        os.write(tell, str(error).encode("utf-8", "replace"))
        os._exit(1)
    except BaseException as error:  # noqa: BLE001  nobody else tells it
        os.write(tell, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        os._exit(1)
    os.close(tell)
    status = 0
    while True:
        try:
            pid, how = os.wait()
        except ChildProcessError:
            os._exit(status)
        if pid == root:
            code = os.waitstatus_to_exitcode(how)
            status = code if code >= 0 else 128 - code


def _end_with(bound: int) -> None:
    """End the namespace with its maker, unless that one says that it is to be kept."""
    if os.read(bound, 1) != _KEEP:
        os._exit(1)


def _leave_all_but(*kept: int) -> None:
    """Close what the process that forked has open, such as its locks and the pipe that it answers
    through, but for standard error, and hear signals as any program does."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)


def _mount(what: bytes, where: bytes, kind: bytes | None, flags: int) -> None:
    _call("mount", _libc.mount(what, where, kind, flags, None))


def _call(name: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
