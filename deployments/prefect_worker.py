"""Prefect's worker in a pod. It outlives a server that is away for ten minutes, and its flow runs
record their end before the pod's.

Prefect's own worker gives up after 75 s where it asks every two seconds. When it is ended, it kills
its runs, which then count as running for ever.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

from prefect.cli import app as prefect_command
from prefect.utilities import processutils
from prefect.utilities.services import critical_service_loop
from prefect.workers import base

from torpor.control.processes import all_processes, end_processes

PATIENCE_S: Final = 600.0
_FAILURES: Final = 3
"""After this many failures in a row, Prefect's loop doubles its interval: the value in
``critical_service_loop``."""
_MARK: Final = "PREFECT__WORKER_NAME"
"""The variable that Prefect sets in the worker, and so in the processes of runs and in all that
they start."""

_ending = threading.Event()


def patient_loop(
    *, workload: Callable[[], Awaitable[object]], interval: float, backoff: int, **more: Any
) -> Awaitable[None]:
    """Prefect's loop, which doubles its interval as often as PATIENCE_S needs, and asks for no run
    while the worker ends."""

    async def ask() -> None:
        if not _ending.is_set():
            await workload()

    enough = math.ceil(math.log2(PATIENCE_S / (_FAILURES * interval) + 1))
    return critical_service_loop(
        workload=ask, interval=interval, backoff=max(backoff, enough), **more
    )


def end_runs_first(pid: int, *_: object) -> None:
    """In place of Prefect's handlers: SIGTERM ends the worker's runs, and then the worker, whose
    process is ``pid``."""

    def end() -> None:
        end_runs(os.environ[_MARK])
        os.kill(pid, signal.SIGINT)

    def handle(*_: object) -> None:
        if not _ending.is_set():
            _ending.set()
            threading.Thread(target=end, name="end runs", daemon=True).start()

    signal.signal(signal.SIGTERM, handle)


def end_runs(worker: str) -> None:
    """End the flow runs that the worker has started, and wait: each tells the server that it has
    crashed."""
    mark = f"{_MARK}={worker}".encode()
    end_processes(
        lambda: [run for run, words in all_processes().items() if mark in words],
        polite_s=PATIENCE_S,
    )


if __name__ == "__main__":
    base.critical_service_loop = patient_loop  # type: ignore[assignment, attr-defined]
    processutils.setup_signal_handlers_worker = end_runs_first  # type: ignore[assignment]
    sys.argv = ["prefect", *sys.argv[1:]]
    prefect_command()
