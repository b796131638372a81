"""Seccomp user notifications: a filter on this thread and what it starts, and who answers for it.

A kernel of 5.5 or newer answers ``go on`` by running the call as if there were no filter. A call
whose listener is closed ends with ENOSYS, so a listener must live as long as what it listens to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from torpor.machine.gate.calls import (
    EMPTY_PATH,
    FOREIGN_CALLS,
    IO_URING_SETUP,
    Machine,
    this_machine,
)

_NO_NEW_PRIVILEGES: Final = 38  # of prctl
_SET_FILTER, _GET_SIZES = 1, 3  # of seccomp
_NEW_LISTENER: Final = 8
_ALLOW, _NOTIFY, _REFUSE = 0x7FFF0000, 0x7FC00000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # in seccomp_data, in bytes
_RECEIVE, _SEND, _IS_VALID, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40082104
_WAKE_ON_SAME_CORE: Final = 1  # faster from kernel 6.6 on
_INSTRUCTION: Final = struct.Struct("=HBBI")
_NOTICE: Final = struct.Struct("=QIIiIQ6Q")
_ANSWER: Final = struct.Struct("=QqiI")
_SIZES: Final = struct.Struct("=HHH")
_GO_ON: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Notice(NamedTuple):
    """A call that waits for an answer. ``thread``: the id of the thread that makes it."""

    id: int
    thread: int
    call: int
    arguments: tuple[int, ...]


class Listener:
    """Receives and answers calls. It owns ``fd``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        with suppress(OSError):  # an older kernel
            fcntl.ioctl(fd, _SET_FLAGS, _WAKE_ON_SAME_CORE)

    def receive(self) -> Notice | None:
        """The next call; None where its process is gone. Waits for one."""
        room = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, room)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise
            return None
        number, thread, _, call, _, _, *arguments = _NOTICE.unpack(room)
        return Notice(number, thread, call, tuple(arguments))

    def is_valid(self, notice: Notice) -> bool:
        """Whether the call still waits, so that its thread's id is still that thread's."""
        try:
            fcntl.ioctl(self.fd, _IS_VALID, struct.pack("=Q", notice.id))
        except OSError:
            return False
        return True

    def go_on(self, notice: Notice) -> None:
        self._send(_ANSWER.pack(notice.id, 0, 0, _GO_ON))

    def refuse(self, notice: Notice, error: int) -> None:
        """End the call with this errno."""
        self._send(_ANSWER.pack(notice.id, 0, -error, 0))

    def close(self) -> None:
        os.close(self.fd)

    def _send(self, answer: bytes) -> None:
        with suppress(FileNotFoundError):  # its process is gone
            fcntl.ioctl(self.fd, _SEND, answer)


def listen(machine: Machine, calls: Sequence[int]) -> int:
    """Notify a listener of these calls of the calling thread and of what it starts from now on;
    OSError where that cannot be. Returns the listener's descriptor.

    ``sudo`` and other programs with set-user-ID keep their rights only where this process may
    administer the system. io_uring, which opens files without a call, does not exist any more.
    """
    program = b"".join(_INSTRUCTION.pack(*line) for line in _program(machine, calls))
    held = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(held))
    try:
        return _seccomp(machine, _SET_FILTER, _NEW_LISTENER, head)
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(errno.EACCES, "the kernel does not give up privileges")
    return _seccomp(machine, _SET_FILTER, _NEW_LISTENER, head)


def why_not() -> str:
    """Why this machine has no gate; empty if it has one. Tried on a thread that ends."""
    machine = this_machine()
    if machine is None:
        return f"the gate knows no {os.uname().machine}"
    try:
        if not _may_read_children():
            return "the machine does not let a process read the memory of its children"
    except OSError as error:
        return f"the machine cannot start `sleep`, to try the gate with ({error.strerror})"
    said: list[str] = []
    thread = threading.Thread(target=_try, args=(machine, said), name="gate", daemon=True)
    thread.start()
    thread.join()
    return said[0]


def _try(machine: Machine, said: list[str]) -> None:
    sizes, parent = bytearray(_SIZES.size), os.getppid()
    try:
        _seccomp(machine, _GET_SIZES, 0, sizes)
        listener = Listener(listen(machine, [machine.getppid]))
    except OSError as error:
        said.append(_words(error))
        return
    if _SIZES.unpack(sizes)[:2] != (_NOTICE.size, _ANSWER.size):
        listener.close()
        said.append("the kernel's notifications of system calls are newer than the gate")
        return
    answers = threading.Thread(target=_answer_once, args=(listener,), name="gate", daemon=True)
    answers.start()
    right = _libc.syscall(machine.getppid) == parent
    answers.join()
    said.append("" if right else "the kernel does not go on with a call: it is older than 5.5")


def _may_read_children() -> bool:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
                return bool(os.pread(memory.fileno(), 1, int(maps.partition("-")[0], 16)))
        except (OSError, ValueError):
            return False
        finally:
            child.kill()


def _answer_once(listener: Listener) -> None:
    try:
        with suppress(OSError):  # a kernel that cannot go on with a call
            if (notice := listener.receive()) is not None:
                listener.go_on(notice)
    finally:
        listener.close()


def _words(error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return "another program, such as a container's runtime, listens to system calls already"
    if error.errno in (errno.ENOSYS, errno.EINVAL):
        return "the kernel has no notifications of system calls: they come with Linux 5.5"
    return f"the machine or its container forbids a filter of system calls ({error.strerror})"


def _seccomp(machine: Machine, operation: int, flags: int, data: bytes | bytearray) -> int:
    room = (ctypes.c_char * len(data)).from_buffer_copy(data)
    done: int = _libc.syscall(machine.seccomp, operation, flags, room)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if isinstance(data, bytearray):
        data[:] = room.raw
    return done


def _program(machine: Machine, calls: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Instructions of BPF: code, how many to skip if it is so and if it is not, and a value."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, machine.audit
    yield _RETURN, 0, 0, _ALLOW
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, FOREIGN_CALLS
    yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, 1, IO_URING_SETUP
    yield _RETURN, 0, 0, _REFUSE | errno.ENOSYS
    for number in calls:
        flags = machine.with_flags.get(number)
        if flags is None:
            yield _EQUAL, 0, 1, number
        else:
            yield _EQUAL, 0, 4, number
            yield _LOAD, 0, 0, _ARGUMENTS + 8 * flags
            yield _ANY_BIT, 0, 1, EMPTY_PATH
            yield _RETURN, 0, 0, _ALLOW
        yield _RETURN, 0, 0, _NOTIFY
    yield _RETURN, 0, 0, _ALLOW
