"""Output on a terminal: text folded between words, and a line that says what a command waits for. A
pipe and a file get each line whole, and no line about waits."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, TextIO

from torpor.shared.plain_text import plain

TICK_S: Final = 1.0
NOTED_S: Final = 2.0
"""Seconds from which a wait is shown with its seconds."""
CLEARED: Final = "\r\x1b[K"
SHOWN_S: Final = 0.5
"""Seconds after which a wait is shown."""
_WORD: Final = re.compile(r"\s*(?:\S*`[^`]*`\S*|\S+)")
"""A word with the blanks before it. A command between backticks counts as one word, so that it can
be copied whole."""
_LABEL: Final = re.compile(r" *(?:\S+ {2,})?")
"""The begin of a line of a list; the further lines into which it is folded are indented by it."""
_MOST_HANGING: Final = 24


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text, to standard output unless another stream is given, as ``folded`` shows it. The
    text may quote a machine, so control characters are escaped."""
    stream = stream or sys.stdout
    clear = CLEARED if Waiting.shown and rewrites(stream) else ""
    print(clear + folded(plain(text), stream), file=stream, flush=True)


def folded(text: str, stream: TextIO | None) -> str:
    """Text with each long line folded between words for a terminal; as it is for a pipe. A process
    that was started with a closed stream has None of it."""
    if stream is None or not stream.isatty():
        return text
    return "\n".join(_folded_line(line, columns(stream)) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    if wide(line) <= width:
        return line
    label = _LABEL.match(line)
    hanging = label.end() if label and label.end() <= _MOST_HANGING else 0
    lines, room = [""], width
    for word in _WORD.findall(line):
        if lines[-1] and wide(lines[-1]) + wide(word) > room:
            lines.append(" " * hanging + word.lstrip())
        else:
            lines[-1] += word
    return "\n".join(lines)


def wide(text: str) -> int:
    """The columns that a terminal needs for this text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """The text, cut to this many columns."""
    if wide(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width)


def columns(stream: TextIO) -> int:
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return max(2, int(wanted))
    try:
        return max(2, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def rewrites(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that can rewrite a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Waiting:
    """Shows on a terminal what a command waits for, and for how long, while this context lasts. The
    line is removed at the end. ``words`` may be replaced meanwhile."""

    shown = False
    """Whether the line of a Waiting is on the terminal now."""

    def __init__(self, words: str, stream: TextIO | None = None) -> None:
        self.words = words
        self._stream = stream or sys.stderr
        self._over = threading.Event()
        self._shows = threading.Thread(target=self._show, name="waiting", daemon=True)

    def __enter__(self) -> Waiting:
        if rewrites(self._stream):
            self._shows.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._shows.ident is not None:
            self._shows.join()

    def line(self, took_s: float) -> str:
        return self.words + (f", {took_s:.0f} s" if took_s >= NOTED_S else "")

    def _show(self) -> None:
        began = time.monotonic()
        wait_s = SHOWN_S
        while not self._over.wait(wait_s):
            line = cut(self.line(time.monotonic() - began), columns(self._stream) - 1)
            Waiting.shown = True
            self._write(CLEARED + line)
            wait_s = TICK_S
        if wait_s == TICK_S:
            self._write(CLEARED)
            Waiting.shown = False

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more, such as after a hang-up
            self._stream.write(text)
            self._stream.flush()
