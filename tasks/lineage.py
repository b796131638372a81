"""The steps that look for work that a snapshot lacks, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.step import step
from tasks.workspace import StoredWorkspace
from torpor.control.upkeep.lineage import Other, lacking, named
from torpor.shared.format.lineage import Lineage
from torpor.shared.values import SnapshotId


@step("look for work elsewhere")
def look_for_work_elsewhere(
    opened: StoredWorkspace, line: Lineage, since: SnapshotId | None = None
) -> list[Other]:
    """The ends of other lines of the workspace; ``since``: newer ones alone."""
    return lacking(opened.store, opened.spec.name, line, since)


def lacks(snapshot: SnapshotId, others: Sequence[Other]) -> list[str]:
    """The warning that a snapshot lacks what the others have; empty without any."""
    if not others:
        return []
    return [
        f"snapshot {snapshot} lacks the work in {named(others)}: name that to get it; delete or "
        "pin it to hear no more of it"
    ]


def is_behind(line: Lineage, others: Sequence[Other]) -> list[str]:
    """The warning that a machine was stored which lacks newer work; empty without any."""
    if not others:
        return []
    before = f"snapshot {line.parent}" if line.parent else "no snapshot"
    return [
        f"this machine goes on from {before} and lacks newer work: {named(others)}. A wake takes "
        f"{line.snapshot}, the newest; to go on from the other work, wake or sync to that by name"
    ]
