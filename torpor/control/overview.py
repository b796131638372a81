"""What a person wants to know of all workspaces at one look."""

from __future__ import annotations

import msgspec

from torpor.control.reports import Report, Row
from torpor.shared.values import SnapshotId


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """One workspace. ``usd_h`` is what its machines cost now, ``month_usd`` what they cost in this
    month at most, ``asleep_usd_day`` what the store asks for its newest snapshot, ``stored_bytes``
    what the store holds of that snapshot, ``new_bytes`` the uncompressed bytes that were new in it;
    None: unknown. ``sleeps``: when its machines are hibernated by themselves. ``coming``: the next
    run that a schedule starts for it. ``trouble``: why nothing, or not all, that is on record of it
    is known; ``unseen``: why its machines cannot be looked at."""

    block: str
    state: str = ""
    machines: list[str] = []
    usd_h: float = 0.0
    month_usd: float | None = None
    newest: SnapshotId | None = None
    newest_age_s: float | None = None
    asleep_usd_day: float | None = None
    stored_bytes: int | None = None
    new_bytes: int | None = None
    jobs: int = 0
    sleeps: str = ""
    coming: str = ""
    trouble: str = ""
    unseen: str = ""

    def row(self) -> Row:
        return {
            "workspace": self.block,
            "state": self.state or "not known",
            "$/h": f"{self.usd_h:.3f}" if self.machines else "",
            "$ this month": "" if self.month_usd is None else f"{self.month_usd:.2f}",
            "age": "" if self.newest_age_s is None else _age(self.newest_age_s),
            "jobs": str(self.jobs or ""),
            "sleeps after": self.sleeps,
            "note": self.trouble or self.unseen,
            "newest snapshot": self.newest or "",
            "next schedule": self.coming,
            "machines": ", ".join(self.machines),
        }

    def words(self) -> str:
        """What the workspace's machines cost a day, and what it would cost asleep."""
        asleep = _asleep([self])
        where = f"on {', '.join(self.machines)}"
        return f"{self.block} {where}: {self.usd_h * 24:.2f} $ a day{asleep}"


class Overviews(Report, frozen=True):
    """All workspaces of an installation. ``watching``: when `watch` looks next, or that it does
    not; empty where that is not known."""

    workspaces: list[Overview]
    watching: str = ""

    @property
    def awake(self) -> list[Overview]:
        """The workspaces on machines, each once even if it has several blocks."""
        return [*{tuple(seen.machines): seen for seen in self.workspaces if seen.machines}.values()]

    def title(self) -> str:
        said = f"Workspaces: {len(self.workspaces)}, awake: {len(self.awake)}"
        costs = f": {self.costs()}" if self.awake else ""
        return f"{said}{costs}{f'. {self.watching}' if self.watching else ''}"

    def costs(self) -> str:
        """What the awake workspaces cost together, and what they would cost asleep."""
        total = sum(seen.usd_h for seen in self.awake)
        least = "at least " if any(one.trouble or one.unseen for one in self.workspaces) else ""
        return f"{least}{total:.3f} $/h, {total * 24:.2f} $ a day{_asleep(self.awake)}"

    def rows(self) -> list[Row]:
        return [seen.row() for seen in self.workspaces]


def _asleep(workspaces: list[Overview]) -> str:
    """What these workspaces would cost asleep; None where that is unknown of one of them."""
    known = [seen.asleep_usd_day for seen in workspaces if seen.asleep_usd_day is not None]
    if not known or len(known) < len(workspaces):
        return ""
    return f"; asleep {sum(known):.2f} $ a day" if sum(known) >= 0.01 else "; asleep under 0.01 $"


def _age(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
