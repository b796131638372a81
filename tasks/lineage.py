"""The steps that look for work that a snapshot lacks, and the warnings about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.step import step
from tasks.workspace import StoredWorkspace
from torpor.control.upkeep.lineage import SnapshotLines, StoredState, lacking, named
from torpor.shared.format.lineage import Lineage
from torpor.shared.values import SnapshotId, WorkspaceName


@step("look for work elsewhere")
def look_for_work_elsewhere(
    opened: StoredWorkspace,
    line: Lineage,
    since: SnapshotId | None = None,
    lines: SnapshotLines | None = None,
) -> list[StoredState]:
    """The tips of other lines of the workspace; ``since``: only newer ones. ``lines``: the lines as
    the caller has just listed them, this one included."""
    return lacking(opened.store, opened.spec.name, opened.seal, line, since, lines=lines)


def lacks(
    workspace: WorkspaceName,
    snapshot: SnapshotId,
    others: Sequence[StoredState],
    holds: Callable[[StoredState], str] = lambda one: "",
) -> list[str]:
    """The warning that a snapshot lacks what the others hold; empty without others. ``holds``: text
    about what another one holds that the snapshot lacks."""
    if not others:
        return []
    return [
        f"snapshot {snapshot} lacks the work in {named(others, holds)}: "
        f"`torpor wake {workspace} --snapshot ID` brings it; delete or pin it to hear no more of it"
    ]


def is_behind(line: Lineage, others: Sequence[StoredState]) -> list[str]:
    """The warning that the stored machine lacks newer work; empty where it lacks none."""
    if not others:
        return []
    before = f"snapshot {line.parent}" if line.parent else "no snapshot"
    takes = f"A wake takes {line.snapshot}, which the store received last"
    if any(line.content in other.line.names for other in others):
        takes = f"{line.snapshot} has no work of its own, so a wake takes newer work"
    return [
        f"this machine goes on from {before} and lacks newer work: {named(others)}. {takes}; to go "
        "on from another, wake or sync to it by name"
    ]
