"""How an error of ours is shown: in a run's logs and at a script's end, by its message alone.

The message names the object, the cause and the next step (torpor/shared/errors.py). Prefect's
traceback is logged at debug level. Every other exception is a fault in the code and keeps its own.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Final

from torpor.shared import errors
from torpor.shared.errors import TorporError

LOGGERS: Final = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
_OURS: Final = "|".join(
    name
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, TorporError)
)
_usual_hook: Final = sys.excepthook
_FINISHED: Final = re.compile(r"(Finished in state \w+)\((['\"].*['\"])\)", re.DOTALL)
_FAILED: Final = re.compile(rf"\w+ run encountered an exception:? (({_OURS}): .*)", re.DOTALL)
_SHOWN_MOST: Final = 1000


def install() -> None:
    """Show errors of ours this way from now on, in this process."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _MessageOnly) for one in logger.filters):
            logger.addFilter(_MessageOnly())
    sys.excepthook = _show


class _MessageOnly(logging.Filter):
    """Logs an error of ours once a flow run, as its message; Prefect's record at debug level."""

    shown: Final[deque[tuple[str, str]]] = deque(maxlen=_SHOWN_MOST)
    """Flow runs and messages. A flow fails with the error that its task has logged."""
    lock: Final = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, TorporError):
            _shorten(record)
            return True
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(logging.DEBUG):
            traced = logging.makeLogRecord(vars(record))
            traced.levelno, traced.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            logger.handle(traced)
        message = f"{type(error).__name__}: {error}"
        record.msg, record.args = message, ()
        record.exc_info = record.exc_text = None
        return _is_new(record, message)


def _shorten(record: logging.LogRecord) -> None:
    """Where a run's last line repeats a message that was logged, leave the error's name."""
    finished = _FINISHED.fullmatch(record.getMessage())
    if finished is None:
        return
    try:
        failed = _FAILED.fullmatch(str(ast.literal_eval(finished[2])))
    except (SyntaxError, ValueError):
        return  # not one quoted message
    if failed is not None:
        what = failed[1] if _is_new(record, failed[1]) else failed[2]
        record.msg, record.args = f"{finished[1]}: {what}", ()


def _is_new(record: logging.LogRecord, message: str) -> bool:
    key = (str(getattr(record, "flow_run_id", "")), message)
    with _MessageOnly.lock:
        if key in _MessageOnly.shown:
            return False
        _MessageOnly.shown.append(key)
        return True


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, TorporError):
        print(f"torpor: {kind.__name__}: {error}", file=sys.stderr)
    else:
        _usual_hook(kind, error, traceback)
