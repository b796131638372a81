"""A machine that is rented to read or to restore onto, and that is gone afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Final

import msgspec

from flows.phases import Phases
from tasks.machines import (
    create_machine,
    destroy_created,
    endpoint_of,
    find_offers,
    open_session,
)
from tasks.place import Place
from torpor.ledger import Lease
from torpor.remote.session import Session
from torpor.values import WorkspaceName, workspace_name

LEFT_AFTER_S: Final = 24 * 3600
"""A drill that began so long ago was killed: its machine holds nobody's work, and is ended."""
_SUFFIX: Final = "-drill"
_LONGEST: Final = 63


@contextmanager
def drill_machine(place: Place, phases: Phases) -> Iterator[Session]:
    """A fresh machine as the workspace wants it, under a name of its own, so that no wake and no
    hibernate takes it for the workspace's. It is never handed over, and always destroyed."""
    mine = _drilling(place)
    with phases.phase("machine"):
        _end_left(mine)
        offers = find_offers(mine)
        lease = mine.ledger.open_lease(mine.owner, mine.provider.identity)
    try:
        with phases.phase("machine"):
            machine = create_machine(mine, offers, lease, True)
            session = open_session(mine, endpoint_of(machine))
        with session:
            yield session
    finally:
        _end(mine, lease)


def drill_name(workspace: WorkspaceName) -> WorkspaceName:
    """``demo-drill``; of a name that is too long for that, its beginning and a hash."""
    if len(workspace) + len(_SUFFIX) <= _LONGEST:
        return workspace_name(workspace + _SUFFIX)
    mark = "-" + blake2b(workspace.encode(), digest_size=4).hexdigest() + _SUFFIX
    return workspace_name(workspace[: _LONGEST - len(mark)] + mark)


def _drilling(place: Place) -> Place:
    return replace(
        place, spec=msgspec.structs.replace(place.spec, name=drill_name(place.spec.name))
    )


def _end_left(mine: Place) -> None:
    for lease in mine.ledger.unfinished(mine.provider.identity):
        if lease.created_unix < time.time() - LEFT_AFTER_S:
            _end(mine, lease)


def _end(mine: Place, lease: Lease) -> None:
    destroy_created(mine, lease)
    mine.ledger.close_lease(lease.label)
