"""A machine that is rented to read or to restore onto, and destroyed afterwards."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Final

from flows.procedures.rented_machine import machine_under
from tasks.machines import end_scratch_machines
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Session
from torpor.shared.errors import TorporError
from torpor.shared.values import DRILL, reserved_name

LEFT_AFTER_S: Final = 24 * 3600
"""A drill that began this many seconds ago was killed: its machine holds no work, and is
destroyed."""


def drill_machine(opened: OpenWorkspace) -> AbstractContextManager[Session]:
    """A new machine for one drill, which is destroyed at the end."""
    return machine_under(opened, reserved_name(DRILL, opened.spec.name))


def end_left_drills(opened: OpenWorkspace) -> None:
    """Destroy the machines of drills that were killed more than a day ago. A failure is only
    logged, because nothing depends on it."""
    drills = opened.under(reserved_name(DRILL, opened.spec.name))
    try:
        end_scratch_machines(drills, before_unix=time.time() - LEFT_AFTER_S)
    except TorporError as error:
        runner().log.warning("what a killed drill left was not ended: %s", error)
