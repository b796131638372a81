"""The log of a job's command: piece by piece in the log of the run, and whole to who follows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tasks.jobs import look_at_command
from tasks.progress import following
from tasks.runner import runner
from torpor.control.jobs.log_lines import LogLines, Text
from torpor.control.remote.agent import Agent
from torpor.shared.values import MIB
from torpor.shared.wire.job import JobLook

MOST_LOG_BYTES: Final = 64 * 1024
"""Bytes of the log that one look shows at most."""
MOST_FOLLOWED_BYTES: Final = 16 * MIB
"""Bytes of the log that one look shows at most where somebody follows the run. The output of a
command that prints faster is shown with gaps."""
_PIECE_BYTES: Final = 1 * MIB


class ShownLog:
    """The log of one machine's command, as far as it was shown. ``text``: receives the log for the
    follower of the run; None for any machine but the first. ``node``: the prefix of each line."""

    def __init__(self, lines: LogLines, text: Text | None, node: str = "") -> None:
        self._lines = lines
        self._text = text
        self._node = node

    def show(self, session: Agent, job: str, offset: int) -> JobLook:
        """Show the next piece of the log from ``offset``. If the log grows faster than it can be
        shown, only its end is shown."""
        followed = following() is not None and self._text is not None
        most_bytes = MOST_FOLLOWED_BYTES if followed else MOST_LOG_BYTES
        piece_bytes = _PIECE_BYTES if followed else MOST_LOG_BYTES
        look = look_at_command(session, job, offset, piece_bytes)
        behind = look.bytes - look.offset
        self._show(look)
        if behind > most_bytes:
            skipped = behind - most_bytes
            self._say(self._lines.skip(skipped))
            if self._text is not None:
                self._print(self._text.skip(skipped))
            look = look_at_command(session, job, look.bytes - most_bytes, piece_bytes)
            self._show(look)
        until = look.bytes
        while followed and look.text and look.offset < until:
            look = look_at_command(session, job, look.offset, piece_bytes)
            self._show(look)
        return look

    def _show(self, look: JobLook) -> None:
        for line in self._lines.unread(look.unread):
            runner().log.warning("%s%s", self._node, line)
        end = look.state.state != "running" and look.offset >= look.bytes
        self._say(self._lines.feed(look.text, end=end))
        if self._text is not None:
            self._print(self._text.feed(look.text, end=end))

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            runner().log.info("%s%s", self._node, line)

    def _print(self, text: str) -> None:
        follower = following()
        if follower is not None and text:
            follower.prints(text)
