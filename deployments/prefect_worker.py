"""Prefect's worker, which outlives a server that is away for ten minutes.

Prefect's own worker gives up after 75 s where it asks every two seconds, and ends its flow runs.
In a pod that restarts, nothing of them is left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable
from typing import Any, Final

from prefect.cli import app as prefect_command
from prefect.utilities.services import critical_service_loop
from prefect.workers import base

PATIENCE_S: Final = 600.0
_FAILURES: Final = 3
"""After as many, Prefect's loop doubles its interval: the one in ``critical_service_loop``."""


def patient_loop(*, interval: float, backoff: int, **more: Any) -> Awaitable[None]:
    """Prefect's loop, which doubles its interval as often as PATIENCE_S needs."""
    enough = math.ceil(math.log2(PATIENCE_S / (_FAILURES * interval) + 1))
    return critical_service_loop(interval=interval, backoff=max(backoff, enough), **more)


if __name__ == "__main__":
    base.critical_service_loop = patient_loop  # type: ignore[assignment, attr-defined]
    sys.argv = ["prefect", *sys.argv[1:]]
    prefect_command()
