"""The steps of a job whose machine may have to save by itself."""

from __future__ import annotations

import secrets
from typing import Final

from tasks.runner import runner
from tasks.step import step
from tasks.workspace import StoredWorkspace
from torpor.control.jobs.standby import book_for, newest_whole
from torpor.control.remote.seam import Agent
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import SnapshotId, StoredSnapshot

STANDBY_S: Final = 180.0
"""An agent that has not answered after this time hangs. The request may have to pass a slow line:
it has up to 16 MiB."""


@step("stand by")
def stand_by(
    opened: StoredWorkspace,
    session: Agent,
    job: str,
    basis: SnapshotId | None,
    manifest: Manifest | None = None,
) -> None:
    """Hand the machine all it needs to save by itself for the next hour. ``basis``: the newest
    snapshot of this machine, or what it was woken from; ``manifest``: its manifest, if at hand."""
    book = book_for(opened.store, opened.spec, opened.key, job, basis, manifest)
    request_id = f"{runner().run}:standby:{secrets.token_hex(8)}"
    session.call(book, request_id=request_id, within_s=STANDBY_S)


@step("find newest save")
def newest_save(opened: StoredWorkspace, verified: SnapshotId | None) -> StoredSnapshot | None:
    """The newest snapshot that is whole in the store; a machine may have made it by itself after
    the one that was ``verified``. None if there is none."""
    spec = opened.spec
    found, refused = newest_whole(opened.store, spec.name, opened.seal, verified, spec.restorable)
    for error in refused:
        runner().log.warning("a newer snapshot is not used: %s", error)
    return found
