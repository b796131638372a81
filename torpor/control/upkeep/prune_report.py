"""The report of a prune: what existed, what will be freed and when, and what was freed."""

from __future__ import annotations

import time

import msgspec

from torpor.control.reports import Row, WorkspaceReport
from torpor.control.upkeep.prune import PackShare, Pruned, PrunePlan, share_of


class PruneReport(WorkspaceReport, frozen=True):
    """Packs and bytes in the store. A dry run freed nothing: ``freed`` is None, and ``to_free`` is
    what the same prune without ``dry_run`` would free now. ``home``: the same of what was stored of
    a home beside the workspace."""

    snapshots: int
    stored: PackShare
    to_free: PackShare
    waiting: PackShare
    next_free_unix: float | None
    to_mark: PackShare
    young: PackShare
    to_retire: PackShare
    rewritten_bytes: int
    retiring: PackShare
    freed: PackShare | None = None
    home: PruneReport | None = None

    @classmethod
    def of_plan(cls, plan: PrunePlan) -> PruneReport:
        return cls(
            workspace=plan.workspace,
            snapshots=plan.snapshots,
            stored=plan.stored,
            to_free=share_of(plan.free),
            waiting=share_of(plan.waiting),
            next_free_unix=plan.next_free_unix,
            to_mark=share_of(plan.unnamed),
            young=plan.young,
            to_retire=share_of(plan.retired),
            rewritten_bytes=plan.rewritten_bytes,
            retiring=share_of(plan.retiring),
        )

    @classmethod
    def of_prune(cls, pruned: Pruned) -> PruneReport:
        return msgspec.structs.replace(cls.of_plan(pruned.plan), freed=pruned.freed)

    @property
    def dry_run(self) -> bool:
        return self.freed is None

    def title(self) -> str:
        return f"Workspace {self.workspace}, {'a dry run' if self.dry_run else 'pruned'}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        would = "would be " if self.dry_run else ""
        rows = [
            ("in the store", f"{_shown(self.stored)}, {self.snapshots:,} snapshots"),
            ("to free now", f"{_shown(self.to_free)}: marked before, and no snapshot names them"),
            ("freed", "nothing: this is a dry run" if self.freed is None else _shown(self.freed)),
            ("waiting for the grace time", f"{_shown(self.waiting)}{self._until()}"),
            (f"{would}marked now", f"{_shown(self.to_mark)} that no snapshot names"),
            ("left alone", f"{_shown(self.young)} that may be an unfinished run's"),
            (
                f"{would}retired now",
                f"{_shown(self.to_retire)} that are mostly dead; the next snapshots store "
                f"{self.rewritten_bytes:,} bytes of them again",
            ),
            ("retired before", f"{_shown(self.retiring)} that older snapshots still name"),
        ]
        mine: list[Row] = [{"what": what, "value": value} for what, value in rows]
        beside = [] if self.home is None else self.home.rows()
        return [*mine, *({**row, "what": f"of a home: {row['what']}"} for row in beside)]

    def _until(self) -> str:
        if self.next_free_unix is None:
            return ""
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.next_free_unix))
        return f", the first from {when}"


def _shown(share: PackShare) -> str:
    return f"{share.packs:,} packs, {share.bytes:,} bytes"
