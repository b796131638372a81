"""The last lines that a command wrote, without the secrets of its stack."""

from __future__ import annotations

from collections import deque
from typing import Final

from torpor.control.variables import Secrets

LAST_LINES: Final = 20
_SHOWN: Final = 500
"""Most characters of each line."""
_OPEN: Final = 2000
"""Most characters that are kept of a line without an end, unless a secret is longer."""


class LastLines:
    """Takes the output piece by piece. Every secret is hidden before anything is cut, because half
    of one would not be found."""

    def __init__(self, secrets: Secrets) -> None:
        self._hidden = secrets.hidden_in
        self._most = max([_OPEN, *map(len, secrets.forms)])
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._open = ""
        self._skips = False

    def skip(self) -> None:
        """Note that a piece was left out. The lines at its ends may hold parts of a secret."""
        self._open, self._skips = "", True

    def add(self, text: str) -> None:
        if self._skips:
            _, end, text = text.partition("\n")
            self._skips = not end
        *whole, last = self._hidden(self._open + text).split("\n")
        self._lines.extend(line[:_SHOWN] for line in whole)
        self._open = last[-self._most :]

    def text(self) -> str:
        lines = [*self._lines, self._open[:_SHOWN]]
        return "\n".join(lines[-LAST_LINES:]).strip() or "nothing"
