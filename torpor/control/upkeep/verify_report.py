"""The report of a verify: a verdict on each snapshot, and what can still be restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from torpor.control.reports import Row, WorkspaceReport
from torpor.control.upkeep.verification import SnapshotVerdict, Verification
from torpor.shared.values import SnapshotId

Depth = Literal["quick", "full", "drill"]
MOST_VERDICTS: Final = 20
"""The most verdicts that a report lists. Counts are always complete."""
MOST_NAMED: Final = 200
"""The most snapshots of each kind that a report names: the newest."""
_PATHS_IN_ROW: Final = 5


class VerifyReport(WorkspaceReport, frozen=True):
    """Bytes are stored bytes. Lists name the newest snapshots; counts are complete."""

    depth: Depth
    snapshots: list[SnapshotId]
    snapshot_count: int
    whole: list[SnapshotId]
    restorable: list[SnapshotId]
    damaged: list[SnapshotVerdict]  # the first of them
    damaged_count: int
    objects: int
    bytes: int
    unproven: int  # packs that were not read and whose MD5 the store does not show
    seconds: dict[str, float]

    @classmethod
    def of(
        cls,
        depth: Depth,
        found: Verification,
        verdicts: Sequence[SnapshotVerdict],
        seconds: dict[str, float],
    ) -> VerifyReport:
        damaged = [verdict for verdict in verdicts if not verdict.whole]
        return cls(
            workspace=found.workspace,
            depth=depth,
            snapshots=[verdict.snapshot for verdict in verdicts][:MOST_NAMED],
            snapshot_count=len(verdicts),
            whole=[verdict.snapshot for verdict in verdicts if verdict.whole][:MOST_NAMED],
            restorable=[verdict.snapshot for verdict in verdicts if verdict.restorable][
                :MOST_NAMED
            ],
            damaged=damaged[:MOST_VERDICTS],
            damaged_count=len(damaged),
            objects=found.objects,
            bytes=found.bytes,
            unproven=len(found.unproven),
            seconds=seconds,
        )

    @property
    def failed(self) -> bool:
        return self.damaged_count > 0

    def title(self) -> str:
        """One sentence: what is wrong, and what can still be restored."""
        if not self.failed:
            return (
                f"all {self.snapshot_count} snapshots of workspace {self.workspace} are whole: "
                f"{self.objects:,} objects, {self.bytes:,} bytes{self._unproven()}"
            )
        worst = self.damaged[0]
        left = (
            f"the newest that can be restored whole is {self.restorable[0]}"
            if self.restorable
            else "none can be restored whole; use restore-path to save single files"
        )
        return (
            f"{self.damaged_count} of {self.snapshot_count} snapshots of workspace "
            f"{self.workspace} are damaged, first {worst.snapshot}: {_state(worst)}; {left}"
        )

    def rows(self) -> list[Row]:
        """One row for each snapshot that is named."""
        spelled = {verdict.snapshot: verdict for verdict in self.damaged}
        rows = []
        for snapshot in self.snapshots:
            verdict = spelled.get(snapshot)
            state = "whole" if snapshot in self.whole else "damaged"
            rows.append(
                {
                    "snapshot": snapshot,
                    "state": _state(verdict) if verdict else f"{state}{self._unproven()}",
                    "files": ", ".join(verdict.paths[:_PATHS_IN_ROW]) if verdict else "",
                    "objects": ", ".join(verdict.objects[:_PATHS_IN_ROW]) if verdict else "",
                }
            )
        return rows

    def _unproven(self) -> str:
        if not self.unproven:
            return ""
        return f", but the store hides the MD5 of {self.unproven:,} packs: a full verify reads them"


def _state(verdict: SnapshotVerdict) -> str:
    if verdict.fault:
        return verdict.fault
    if not verdict.damaged_files:
        return (
            f"every file can be restored, {verdict.damaged_objects:,} objects differ from what "
            "was written"
        )
    return (
        f"{verdict.damaged_files:,} of {verdict.files:,} files are lost or may be, "
        f"in {verdict.damaged_objects:,} objects"
    )
