"""Prefect's worker in a pod. It outlives a server that is away for ten minutes, and its flow runs
record their end before the pod's.

Prefect's own worker gives up after 75 s where it asks every two seconds, and leaves its runs alone
when it ends. With the pod they would be killed, and count as running for ever.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Awaitable
from typing import Any, Final

from prefect.cli import app as prefect_command
from prefect.utilities.services import critical_service_loop
from prefect.workers import base

from torpor.control.processes import all_processes, end_processes

PATIENCE_S: Final = 600.0
_FAILURES: Final = 3
"""After as many, Prefect's loop doubles its interval: the one in ``critical_service_loop``."""
_MARK: Final = "PREFECT__WORKER_NAME"
"""Prefect sets it in the processes of runs, which hand it on to all that they start."""


def patient_loop(*, interval: float, backoff: int, **more: Any) -> Awaitable[None]:
    """Prefect's loop, which doubles its interval as often as PATIENCE_S needs."""
    enough = math.ceil(math.log2(PATIENCE_S / (_FAILURES * interval) + 1))
    return critical_service_loop(interval=interval, backoff=max(backoff, enough), **more)


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
    sys.argv = ["prefect", *sys.argv[1:]]
    try:
        prefect_command()
    finally:
        end_runs(os.environ.get("POD_NAME", ""))  # the worker's name (deployments/chart/torpor)
