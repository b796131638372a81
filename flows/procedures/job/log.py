"""The log of a job's command, piece by piece in the log of the run."""

from __future__ import annotations

from typing import Final

from tasks.jobs import look_at_command
from tasks.runner import runner
from torpor.control.jobs.log_lines import Lines
from torpor.control.remote.seam import Agent
from torpor.shared.wire.job import JobLook

MOST_LOG_BYTES: Final = 64 * 1024
"""Of the log, in one look."""


def show_log(session: Agent, job: str, offset: int, lines: Lines, node: str = "") -> JobLook:
    """Show the next piece of the log from ``offset``: its end, where the log grows faster than it
    can be shown. ``node`` comes before each line."""
    look = look_at_command(session, job, offset, MOST_LOG_BYTES)
    behind = look.bytes - look.offset
    if behind > MOST_LOG_BYTES:
        for line in lines.skip(behind - MOST_LOG_BYTES):
            runner().log.info("%s%s", node, line)
        look = look_at_command(session, job, look.bytes - MOST_LOG_BYTES, MOST_LOG_BYTES)
    for line in lines.unread(look.unread):
        runner().log.warning("%s%s", node, line)
    for line in lines.feed(look.text, end=look.state.state != "running"):
        runner().log.info("%s%s", node, line)
    return look
