"""A machine that is rented to read or to restore onto, and destroyed afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tasks.machines import (
    create_machine,
    end_scratch_machines,
    look_for_offers,
    open_session,
    renting,
)
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.remote.seam import Session
from torpor.shared.errors import TorporError
from torpor.shared.values import DRILL, reserved_name

LEFT_AFTER_S: Final = 24 * 3600
"""A drill that began so long ago was killed: its machine holds no work, and is ended."""


@contextmanager
def drill_machine(opened: OpenWorkspace) -> Iterator[Session]:
    """A new machine that fits the workspace, under a reserved name, so that no wake or hibernate
    uses it. It is never handed over, and always destroyed."""
    mine = _drilling(opened)
    with renting(mine) as held:
        machine = create_machine(held, look_for_offers(mine)).machine
        with open_session(mine, machine) as session:
            yield session


def end_left_drills(opened: OpenWorkspace) -> None:
    """Destroy the machines of drills that were killed more than a day ago. A failure is only
    logged, because nothing depends on it."""
    try:
        end_scratch_machines(_drilling(opened), before_unix=time.time() - LEFT_AFTER_S)
    except TorporError as error:
        runner().log.warning("what a killed drill left was not ended: %s", error)


def _drilling(opened: OpenWorkspace) -> OpenWorkspace:
    return opened.under(reserved_name(DRILL, opened.spec.name))
