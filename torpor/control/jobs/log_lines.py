"""A job's log as people read it: all of it, or in a flow run's log, bounded in its rate and in its
size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torpor.control.variables import Secrets
from torpor.shared.plain_text import plain

MOST_LINES: Final = 40
"""The most lines of one look: Prefect keeps each as a record of its database."""
MOST_CHARS: Final = 500
"""The most characters of a line."""
MOST_SHOWN: Final = 20_000
"""The most lines of one run."""


class LogLines:
    """Cuts text into lines, in which ``secrets`` are hidden. ``where``: the file with the whole
    log."""

    def __init__(self, where: str, secrets: Secrets | None = None) -> None:
        self._where = where
        self._secrets = secrets or Secrets()
        self._longest_secret = max(map(len, self._secrets.forms), default=0)
        self._rest = ""
        self._skips = False
        self._shown = 0
        self._unread = ""

    def unread(self, why: str) -> Iterator[str]:
        """Say once why the log cannot be read; an empty text says that it can."""
        if why and why != self._unread:
            yield f"the log {self._where} cannot be read: {why}. The command does not depend on it"
        self._unread = why

    def skip(self, count: int) -> Iterator[str]:
        """Leave out this many bytes of the log, and the line in which they end: it may hold half of
        a secret."""
        self._rest, self._skips = "", True
        if self._shown < MOST_SHOWN:
            yield f"... {count:,} bytes are left out here; all are in {self._where}"

    def feed(self, text: str, *, end: bool = False) -> Iterator[str]:
        """The lines to show of the next piece of the log; with ``end`` also an unfinished one."""
        if self._skips:
            _, line_end, text = text.partition("\n")
            self._skips = not line_end
        *lines, self._rest = self._secrets.hidden_in(self._rest + text).split("\n")
        if end and self._rest:
            lines.append(self._rest)
            self._rest = ""
        if (cut := len(self._rest) - self._longest_secret) > MOST_CHARS:
            lines.append(self._rest[:cut])
            self._rest = self._rest[cut:]
        room = max(0, min(MOST_LINES, MOST_SHOWN - self._shown))
        left_out = max(0, len(lines) - room)
        if left_out and self._shown < MOST_SHOWN:
            yield f"... {left_out} lines are left out here; all are in {self._where}"
        for line in lines[left_out:]:
            self._shown += 1
            yield _short(line)
        if room and self._shown >= MOST_SHOWN:
            yield f"... no more lines of this run are shown here; all are in {self._where}"


class Text:
    """All of a log, piece by piece, with its ``secrets`` hidden. ``where``: the file with it."""

    def __init__(self, where: str, secrets: Secrets | None = None) -> None:
        self._where = where
        self._secrets = secrets or Secrets()
        self._longest_secret = max(map(len, self._secrets.forms), default=0)
        self._rest = ""
        self._skips = False

    def skip(self, count: int) -> str:
        """Leave out this many bytes of the log, and the line in which they end; returns the text
        that says so."""
        shown, self._rest, self._skips = self.feed("", end=True), "", True
        return f"{shown}\n... {count:,} bytes are left out here; all are in {self._where}\n"

    def feed(self, text: str, *, end: bool = False) -> str:
        """The text that can be shown with the next piece. It ends at the end of a line, or of a
        state of a progress bar, so that no half of a secret is shown; with ``end`` anywhere."""
        if self._skips:
            _, line_end, text = text.partition("\n")
            self._skips = not line_end
        text = self._secrets.hidden_in(self._rest + text)
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if end:
            cut = len(text)
        elif len(text) - cut > MOST_CHARS + self._longest_secret:
            cut = len(text) - self._longest_secret
        self._rest = text[cut:]
        return text[:cut]


def _short(line: str) -> str:
    line = plain(line.rpartition("\r")[2] or line)  # a progress bar overwrites its line
    return line if len(line) <= MOST_CHARS else f"{line[:MOST_CHARS]} ..."
