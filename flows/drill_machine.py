"""A machine that is rented to read or to restore onto, and destroyed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flows.phases import Phases
from tasks.machines import (
    create_machine,
    end_left,
    end_scratch,
    endpoint_of,
    find_offers,
    open_session,
)
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.remote.session import Session
from torpor.shared.errors import TorporError
from torpor.shared.values import DRILL, reserved_name

LEFT_AFTER_S: Final = 24 * 3600
"""A drill older than this was killed. Its machine holds no work, so it is destroyed."""


@contextmanager
def drill_machine(opened: OpenWorkspace, phases: Phases) -> Iterator[Session]:
    """A new machine that fits the workspace, under a reserved name, so that no wake or hibernate
    uses it. It is never handed over, and always destroyed."""
    mine = _drilling(opened)
    with phases.phase("machine"):
        offers = find_offers(mine)
        lease = mine.ledger.open_lease(mine.owner, mine.provider.identity)
    try:
        with phases.phase("machine"):
            machine = create_machine(mine, offers, lease, True)
            session = open_session(mine, endpoint_of(machine))
        with session:
            yield session
    finally:
        end_scratch(mine, lease)


def end_left_drills(opened: OpenWorkspace) -> None:
    """Destroy the machines of drills that were killed more than a day ago. A failure is only
    logged, because nothing depends on it."""
    try:
        end_left(_drilling(opened), older_s=LEFT_AFTER_S)
    except TorporError as error:
        runner().log.warning("what a killed drill left was not ended: %s", error)


def _drilling(opened: OpenWorkspace) -> OpenWorkspace:
    return opened.under(reserved_name(DRILL, opened.spec.name))
