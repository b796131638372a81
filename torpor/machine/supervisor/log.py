"""The log of a job: a file in the workspace, written by the command and, a line here and there, by
its supervisor. Users may cut it or move it away, and its supervisor cuts one that is too long, and
writes one again that was removed."""

from __future__ import annotations

import codecs
import os
import shutil
import stat
import time
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.shared.errors import InvalidInput
from torpor.shared.values import JOB_LOGS, MIB, PROGRAMS

MOST_BYTES: Final = 1 * MIB
"""Bytes that one request reads at most. A character may need six bytes on the wire, whose lines
hold 16 MiB."""
MOST_LOG_BYTES: Final = 64 * MIB
"""Bytes of the longest log. Each save of the job holds the log, and a program may write for
months."""
_LONGEST_LINE: Final = 64 * 1024
_LEAST_BYTES: Final = 4  # bytes of the longest character


class Piece(NamedTuple):
    text: str
    offset: int  # the offset at which the next read goes on


def open_log(path: str, *, again: bool = False) -> int:
    """Open the log to append, which makes it and its folder, with a .gitignore in a folder of ours.
    ``again``: do not make the folder's parents, which the user may have removed in order to make
    them again. InvalidInput where the log cannot be opened."""
    folder = os.path.dirname(path)
    if again and not os.path.isdir(folder):
        os.mkdir(folder, mode=0o700)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.path.basename(folder) in (JOB_LOGS, PROGRAMS):
        _ignore(folder)
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidInput(f"the log {path} is no file: move it away, or name another one")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class Output:
    """The log as a command writes it. Where somebody removes it (`git clean -fdx`), the command
    writes on into a file without a name: that file is copied to the log's path, as it grows."""

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._fd: Final = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._copied = 0  # of a log without a name: bytes copied; of one with a name: its size

    def keep(self, *, ended: bool = False) -> None:
        """Copy what is new, if the log was removed. Until the command has ``ended``, parents of the
        log's folder are not made again, because the command may do so. OSError or InvalidInput
        where the log cannot be made now."""
        facts = os.fstat(self._fd)
        if facts.st_nlink:
            self._copied = facts.st_size
            return
        removed = not os.path.lexists(self._path)
        if removed:
            self._copied = 0
        elif facts.st_size <= self._copied:
            self._copied = facts.st_size  # the command has cut the log
            return
        with (
            open(open_log(self._path, again=not ended), "wb") as again,
            open(os.dup(self._fd), "rb") as file,
        ):
            file.seek(self._copied)
            shutil.copyfileobj(file, again)
            self._copied = file.tell()
        if removed:
            say(self._path, "the log was removed: its lines up to here are written again")
        if self._copied > MOST_LOG_BYTES:  # the command appends, so it goes on behind the cut
            os.truncate(f"/proc/self/fd/{self._fd}", 0)
            self._copied = 0


def size_of(path: str) -> int:
    """The length of the log; 0 where there is none. OSError where it is unknown."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def say(path: str, words: str) -> None:
    """Append one of torpor's own lines, at the start of a line."""
    fd = open_log(path)
    try:
        os.write(fd, _line(words) if _at_line_start(path) else b"\n" + _line(words))
    finally:
        os.close(fd)


def cut(path: str, most_bytes: int) -> None:
    """Keep the newest half of a log that is longer than ``most_bytes``. It is copied over the older
    half before the file gets shorter, so that a kill or a full disk loses none of it. What the
    command writes during the copy is lost."""
    if size_of(path) <= most_bytes or not os.path.isfile(path):
        return
    with open(path, "r+b") as file:
        file.seek(-(most_bytes // 2), os.SEEK_END)
        file.readline(_LONGEST_LINE)  # drops the line whose beginning is cut off
        kept = file.read()
        file.seek(0)
        file.write(_line(f"older lines are gone: a log is cut at {most_bytes // MIB} MiB"))
        file.write(kept)
        file.truncate()  # the command appends, so it goes on behind the cut


def read(path: str, offset: int, most_bytes: int, began: int, *, whole: bool) -> Piece:
    """The log from ``offset``. A log that is shorter than that was cut or replaced: it is read from
    ``began``, where this attempt began, or from its start if it is shorter than that too.

    Text ends between characters; bytes that are no characters are replaced. ``whole``: nobody
    writes any more, so that the end is not within a character. OSError where the log cannot be
    read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would block
            return Piece("", 0)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = next(at for at in (offset, began, 0) if 0 <= at <= size)
            file.seek(begin)
            data = file.read(max(_LEAST_BYTES, min(most_bytes, MOST_BYTES)))
    except FileNotFoundError:
        return Piece("", 0)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=whole and begin + len(data) >= size)
    return Piece(text, begin + len(data) - len(decoder.getstate()[0]))


def _ignore(folder: str) -> None:
    """Let git leave the folder out."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(OSError):  # the file exists; or the log cannot be written either
        fd = os.open(f"{folder}/.gitignore", flags, 0o600)
        os.write(fd, b"*\n")
        os.close(fd)


def _line(words: str) -> bytes:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return f"torpor: {words} ({stamp} UTC)\n".encode("utf-8", "backslashreplace")


def _at_line_start(path: str) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
