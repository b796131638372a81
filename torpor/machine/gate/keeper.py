"""The keeper: answers the calls of a command that runs while its files are restored.

A call goes on at once, unless it names a file that the restore has not given its name yet, or
lists a directory in which such files are missing. It then waits, and the restore is asked for these
first. Where nothing moves any more, or the restore ends without them, it ends with EIO.

The keeper is a thread of the supervisor, which is an ancestor of all that it answers for: so it may
read their memory. When the restore has ended, it lets everything pass. It serves a friendly command
and protects nothing from a hostile one: a name may change between the look and the call.

Without the keeper every such call ends with ENOSYS. So no fault ends it: a call that cannot be
judged goes on, and ``note`` hears why.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from torpor.machine.gate.calls import CWD, NO_FOLLOW, Argument, Machine
from torpor.machine.gate.listener import Listener, Notice
from torpor.machine.gate.record import GateRecord

STILL_S: Final = 300.0
"""A restore in which nothing has moved for this long counts as failed until something moves."""
_TICK_MS: Final = 20
_LOOK_S: Final = 0.5
_PAGE: Final = 4096
_MOST_NAME: Final = 4096  # PATH_MAX
_FIRST_LINE: Final = 256  # what the kernel reads of a script
_MOST_SCRIPTS: Final = 4
_FAULT_S: Final = 0.02
"""After a call that could not be received: a fault that comes again must not fill a core."""
_KERNEL: Final = 1 << 63
"""From this address on memory is the kernel's: no call has a name there."""


class Keeper:
    """Serves one listener until no process that it listens to is left. ``note`` hears of faults."""

    def __init__(
        self,
        listener: Listener,
        machine: Machine,
        record: GateRecord,
        note: Callable[[str], None],
        still_s: float = STILL_S,
    ) -> None:
        self._listener = listener
        self._machine = machine
        self._names = Awaited(record, still_s)
        self._waiting: dict[Notice, set[int]] = {}
        self._note = note
        self._noted: set[tuple[str, type[Exception]]] = set()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._listener.fd, select.POLLIN)
        try:
            while True:
                for _, event in poll.poll(_TICK_MS if self._waiting else None):
                    if event & select.POLLIN:
                        with self._faults_noted("a call could not be received", _FAULT_S):
                            self._hear()
                    elif event & (select.POLLHUP | select.POLLERR):
                        return
                if self._waiting:
                    self._look_again()
        finally:
            self._listener.close()

    def _hear(self) -> None:
        notice = self._listener.receive()
        if notice is None:
            return
        with self._faults_noted("the restore's record could not be read"):
            self._names.look_sometimes()
        if self._names.all_given:
            self._listener.go_on(notice)
        else:
            self._judge(notice)

    def _judge(self, notice: Notice) -> None:
        """Let a call go on, or have it wait."""
        missing: set[int] = set()
        with self._faults_noted("a call goes on that could not be judged"):
            try:
                missing = self._missing(notice)
            except OSError:  # the process ends, or lets nobody look at it
                missing = set()
        if not missing:
            self._listener.go_on(notice)
        elif self._listener.is_valid(notice):  # else the name was another process's
            self._waiting[notice] = missing
            self._want(missing)

    def _look_again(self) -> None:
        with self._faults_noted("the restore's record could not be read"):
            self._names.look()
        for notice, missing in list(self._waiting.items()):
            with self._faults_noted("a call that waits could not be answered"):
                if not self._names.lacks(missing):
                    del self._waiting[notice]
                    self._judge(notice)
                elif self._names.never_come:
                    del self._waiting[notice]
                    self._listener.refuse(notice, errno.EIO)
                elif not self._listener.is_valid(notice):  # a signal has ended it
                    del self._waiting[notice]
                else:
                    self._want(missing)  # if that failed before

    def _want(self, missing: set[int]) -> None:
        """Without it they come in their turn."""
        with self._faults_noted("the restore could not be asked for a file"):
            self._names.want(missing)

    @contextmanager
    def _faults_noted(self, words: str, pause_s: float = 0.0) -> Iterator[None]:
        """Go on after a fault; one of a kind is noted."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the command would get ENOSYS for every file
            if (words, type(error)) not in self._noted:
                self._noted.add((words, type(error)))
                self._note(f"{words}: {error!r}")
            time.sleep(pause_s)

    def _missing(self, notice: Notice) -> set[int]:
        """The names that the call has to wait for."""
        call = self._machine.calls[notice.call]
        if call.lists:
            place = os.readlink(b"/proc/%d/fd/%d" % (notice.thread, notice.arguments[0]))
            return self._names.below(place)
        follows = call.follows
        if call.flags is not None and notice.arguments[call.flags] & NO_FOLLOW:
            follows = False
        found: set[int] = set()
        for argument in call.names:
            path = _path(notice, argument)
            for name in _with_interpreters(path) if call.runs else [path]:
                if name and (number := self._names.number(name, follows)) is not None:
                    found.add(number)
        return found


class Awaited:
    """The names that a restore has still to give."""

    def __init__(self, record: GateRecord, still_s: float) -> None:
        self._record = record
        self._still_s = still_s
        began = record.began()
        self._by_number = {} if began is None else dict(began.names)
        self._numbers = {name: number for number, name in self._by_number.items()}
        self._below: dict[bytes, set[int]] = {}
        for number, name in self._by_number.items():
            self._below.setdefault(os.path.dirname(name), set()).add(number)
        self._asked: set[int] = set()
        self._moved_ns = record.moved_ns()
        self._moved_at = self._looked_at = time.monotonic()
        self._ended = False
        self.look()

    @property
    def all_given(self) -> bool:
        return self._ended and not self._by_number

    @property
    def never_come(self) -> bool:
        return self._ended or time.monotonic() - self._moved_at > self._still_s

    def look_sometimes(self) -> None:
        if not self._ended and time.monotonic() - self._looked_at > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Hear of what was given."""
        self._looked_at = time.monotonic()
        moved_ns = self._record.moved_ns()  # before what was given: in the end it comes after
        if moved_ns != self._moved_ns:
            self._moved_ns, self._moved_at = moved_ns, self._looked_at
        for number in self._record.given.new():
            name = self._by_number.pop(number, None)
            if name is not None:
                del self._numbers[name]
                self._below[os.path.dirname(name)].discard(number)
        self._ended = moved_ns is None

    def number(self, path: bytes, follows: bool) -> int | None:
        """The number of a name that is missing. Pending names do not exist on the disk, so a name
        that does is complete."""
        try:
            (os.stat if follows else os.lstat)(path)
        except FileNotFoundError:
            if follows and os.path.islink(path):
                return self._numbers.get(os.path.realpath(path))
            return self._numbers.get(_real(path))
        return None

    def below(self, directory: bytes) -> set[int]:
        """What is missing in a directory."""
        return set(self._below.get(directory, ()))

    def lacks(self, numbers: set[int]) -> bool:
        return not numbers.isdisjoint(self._by_number)

    def want(self, numbers: set[int]) -> None:
        """Ask the restore for these first."""
        if not numbers <= self._asked:
            self._record.want(sorted(numbers - self._asked))
            self._asked |= numbers


def _real(path: bytes) -> bytes:
    """The whole path, without symlinks but for one at its end."""
    directory, name = os.path.split(path.rstrip(b"/"))
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.path.join(os.readlink(b"/proc/self/fd/%d" % place), name)
    finally:
        os.close(place)


def _path(notice: Notice, argument: Argument) -> bytes:
    """The name that the call has, as this process reaches it; empty for none."""
    name = _text(notice.thread, notice.arguments[argument.path])
    if not name or name.startswith(b"/"):
        return name
    directory = CWD
    if argument.directory is not None:
        directory = notice.arguments[argument.directory] & 0xFFFFFFFF
        directory -= (directory & 0x80000000) << 1
    if directory == CWD:
        return b"/proc/%d/cwd/%s" % (notice.thread, name)
    return b"/proc/%d/fd/%d/%s" % (notice.thread, directory, name)


def _text(thread: int, address: int) -> bytes:
    """A text of another process's memory, which ends with a zero byte."""
    text = b""
    if address >= _KERNEL:
        return text
    memory = os.open(b"/proc/%d/mem" % thread, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(text) < _MOST_NAME:
            size = _PAGE - (address + len(text)) % _PAGE
            data = os.pread(memory, size, address + len(text))
            end = data.find(b"\0")
            if end >= 0 or not data:
                return text + data[: max(end, 0)]
            text += data
    finally:
        os.close(memory)
    return b""  # too long for a name


def _with_interpreters(path: bytes) -> Iterator[bytes]:
    """A program, and what its first line names, which the kernel opens without another call."""
    for _ in range(_MOST_SCRIPTS):
        yield path
        try:
            line = _first_line(path)
        except OSError:
            return
        words = line[2:].split()
        if not line.startswith(b"#!") or not words or not words[0].startswith(b"/"):
            return
        path = words[0]


def _first_line(path: bytes) -> bytes:
    """What a regular file begins with; empty for a FIFO or device, which is not even opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return b""
    program = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(program, _FIRST_LINE).partition(b"\n")[0]
    finally:
        os.close(program)
