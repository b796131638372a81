"""The console of a flow run, which is a pipe to its worker."""

from __future__ import annotations

import logging
import os
import sys

from prefect.logging.handlers import PrefectConsoleHandler


class RunConsole(PrefectConsoleHandler):
    """Prefect's console, but a run whose worker was killed goes on without it.

    The pipe is broken then, and the next message would end the run: rich raises SystemExit.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except SystemExit:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
