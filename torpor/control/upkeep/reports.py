"""The reports of the upkeep flows: small, typed, without secrets, under 64 KiB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torpor.control.reports import MOST_ROWS, HibernateReport, Report, Row, WorkspaceReport
from torpor.control.upkeep.retention import Judged
from torpor.shared.values import SnapshotId, WorkspaceName


class HasRow(Protocol):
    """What a table shows as a row."""

    def row(self) -> Row: ...


class Table(WorkspaceReport, frozen=True):
    """Rows about snapshots; ``count`` is the number of all rows, also of those that are not
    shown."""

    heading: str
    count: int
    shown: list[Row]

    def title(self) -> str:
        return self.heading

    @classmethod
    def of(cls, workspace: WorkspaceName, heading: str, entries: Sequence[HasRow]) -> Table:
        shown = [entry.row() for entry in entries[:MOST_ROWS]]
        return cls(workspace, heading, len(entries), shown)

    def rows(self) -> list[Row]:
        """The table; its last row says how much is left out."""
        more = self.count - len(self.shown)
        if not self.shown:
            return [{"result": "nothing"}]
        if not more:
            return self.shown
        columns = list(self.shown[0])
        rest = {columns[0]: f"and {more:,} more: flows.procedures.listing has them all in Python"}
        return [*self.shown, {name: rest.get(name, "") for name in columns}]


def pinning(workspace: WorkspaceName, snapshot: SnapshotId, now: str) -> Table:
    """The result of pinning or unpinning."""
    return Table(workspace, f"Snapshot {snapshot}", 1, [{"snapshot": snapshot, "now": now}])


class BackupReport(WorkspaceReport, frozen=True):
    """A new verified snapshot, and what retention did. A dry run took and deleted nothing:
    ``snapshot`` is then None, and ``verdicts`` are what the next backup would decide."""

    snapshot: SnapshotId | None
    hibernated: HibernateReport | None
    verdicts: list[Judged]
    deleted: list[SnapshotId]

    @property
    def dry_run(self) -> bool:
        return self.snapshot is None

    def title(self) -> str:
        if self.dry_run:
            going = sum(not verdict.kept for verdict in self.verdicts)
            return (
                f"Workspace {self.workspace}: the next backup would keep "
                f"{len(self.verdicts) - going} snapshots, itself included, and delete {going}"
            )
        return (
            f"Workspace {self.workspace} backed up as {self.snapshot}; "
            f"{len(self.deleted)} old snapshots deleted"
        )

    def rows(self) -> list[Row]:
        """One row for each snapshot: whether it stays, and why; at most 200."""
        rows = [
            {
                "snapshot": verdict.snapshot,
                "kept": "yes" if verdict.kept else self._gone(verdict),
                "because": "; ".join(verdict.reasons) or "no rule keeps it",
            }
            for verdict in self.verdicts
        ]
        return Table(self.workspace, "", len(rows), rows[:MOST_ROWS]).rows()

    def _gone(self, verdict: Judged) -> str:
        if self.dry_run:
            return "no: it would be deleted"
        return "deleted" if verdict.snapshot in self.deleted else "pinned or gone meanwhile"


class EachReport(Report, frozen=True):
    """What happened to each Workspace block of the installation, by the block's name."""

    heading: str
    results: dict[str, str]

    def title(self) -> str:
        return self.heading

    def rows(self) -> list[Row]:
        if not self.results:
            return [{"result": "the installation has no Workspace block"}]
        return [{"workspace block": block, "result": said} for block, said in self.results.items()]


class PathReport(WorkspaceReport, frozen=True):
    """A file or directory that was restored onto a machine and compared, byte for byte."""

    snapshot: SnapshotId
    path: str
    machine: str
    restored_to: str
    files: int
    bytes: int
    stored_bytes: int
    warnings: list[str]
    seconds: dict[str, float]
    moved_aside: str = ""  # the new name of what was in the place before

    def title(self) -> str:
        return f"{self.path} of snapshot {self.snapshot} is at {self.restored_to}"

    def rows(self) -> list[Row]:
        phases = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        was = f"what was there is {self.moved_aside}"
        return [
            {"what": "snapshot", "value": self.snapshot},
            {"what": "path", "value": self.path},
            {"what": "machine", "value": self.machine},
            {"what": "restored to", "value": self.restored_to},
            *([{"what": "moved aside", "value": was}] if self.moved_aside else []),
            {"what": "files", "value": f"{self.files:,}"},
            {"what": "bytes", "value": f"{self.bytes:,}, fetched as {self.stored_bytes:,}"},
            {"what": "warnings", "value": "; ".join(self.warnings) or "none"},
            {"what": "seconds by phase", "value": phases},
        ]
