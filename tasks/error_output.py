"""How an error of ours is shown: in a run's logs and at a script's end, by its message alone.

The message names the object, the cause and the next step (torpor/shared/errors.py). Prefect's
traceback is logged at debug level. Every other exception is a fault in the code and keeps its own.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Final

from torpor.shared.errors import TorporError
from torpor.shared.plain_text import plain

LOGGERS: Final = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
_SHOWN_MOST: Final = 1000
_INTERRUPTED: Final = "torpor: "


def install() -> None:
    """Show errors of ours this way from now on, in this process. A program that has set an
    excepthook of its own keeps it."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _MessageOnly) for one in logger.filters):
            logger.addFilter(_MessageOnly())
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def mark_interrupted(error: KeyboardInterrupt, flow: str) -> None:
    """Show an interrupt at a script's end by one line that says where the flow was interrupted."""
    error.add_note(f"{_INTERRUPTED}{flow} was interrupted; its log says what it has left")


class _MessageOnly(logging.Filter):
    """A log filter: an error of torpor's is logged once in a flow run, by its message; Prefect's
    own record of it goes to debug level."""

    shown: Final[deque[tuple[str, str, str]]] = deque(maxlen=_SHOWN_MOST)
    """(flow run, error, message) of each error that was logged. A flow fails with the same error
    that its task has already logged."""
    lock: Final = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        error = record.exc_info[1] if record.exc_info else None
        run = str(getattr(record, "flow_run_id", ""))
        if not isinstance(error, TorporError):
            self._shorten(record, run)
            return True
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(logging.DEBUG):
            traced = logging.makeLogRecord(vars(record))
            traced.levelno, traced.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            logger.handle(traced)
        name, text = type(error).__name__, str(error)
        record.msg, record.args = f"{name}: {text}", ()
        record.exc_info = record.exc_text = None
        with self.lock:
            if (run, name, text) in self.shown:
                return False
            self.shown.append((run, name, text))
            return True

    def _shorten(self, record: logging.LogRecord, run: str) -> None:
        """Where a record quotes an error that this run has shown, leave only the error's name."""
        line = record.getMessage()
        with self.lock:
            shown = [(name, text) for of, name, text in self.shown if of == run]
        for name, text in shown:
            quoted = repr(text)[1:-1]
            if f"{name}: {quoted}" in line:
                record.msg, record.args = line.replace(f"{name}: {quoted}", name), ()
                return


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, TorporError):
        print(plain(f"torpor: {kind.__name__}: {error}"), file=sys.stderr)
    elif notes := [note for note in getattr(error, "__notes__", []) if _INTERRUPTED in note]:
        print(notes[0], file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
