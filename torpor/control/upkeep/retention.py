"""Which snapshots a retention keeps, and why. Pure: nothing is read and nothing is deleted here.

The rules are restic's (``forget --keep-*``, https://restic.readthedocs.io/en/stable/060_forget.html):

* ``last``: the newest N snapshots.
* ``hourly``, ``daily``, ``weekly``, ``monthly``, ``yearly``: for the last N such periods *in which
  there is a snapshot*, the newest snapshot of each. Periods without one do not count, so a machine
  that sleeps for a month loses nothing by it.
* Each rule looks at all snapshots on its own; one that any rule keeps is kept. (borg and Proxmox
  differ: there a snapshot that one rule keeps does not count for the next.)
* While a rule has not found as many as it wants, it keeps the oldest snapshot too, so that history
  reaches back as far as it can.

Periods begin where a clock in ``timezone`` says so; weeks begin on Monday (ISO 8601).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from torpor.control.zones import zone_named
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId, made_at

MOST_KEPT: Final = 10_000


class Retention(msgspec.Struct, frozen=True):
    """How many snapshots of each kind to keep. With every number 0, nothing is deleted."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        for rule, count in self.counts().items():
            if not 0 <= count <= MOST_KEPT:
                raise InvalidInput(f"keep_{rule} is {count}: use 0 to {MOST_KEPT}; 0 is no rule")
        self.zone()

    def counts(self) -> dict[str, int]:
        """The number that each rule wants."""
        return {rule: getattr(self, rule) for rule in _PERIODS}

    def zone(self) -> ZoneInfo:
        """The time zone of days; InvalidInput for a name that this host does not know."""
        return zone_named(self.timezone)


class Verdict(msgspec.Struct, frozen=True):
    """Whether one snapshot stays; without ``reasons`` it is deleted."""

    snapshot: SnapshotId
    reasons: list[str]

    @property
    def kept(self) -> bool:
        return bool(self.reasons)


def judge(
    snapshots: Sequence[SnapshotId],
    retention: Retention,
    pinned: Mapping[SnapshotId, str],
    saves: Mapping[SnapshotId, str] = {},
) -> list[Verdict]:
    """A verdict for each snapshot, newest first. The newest and the pinned are always kept.
    ``saves``: those of open jobs, with the ids of the jobs, which delete them; they are kept, and
    count for no rule."""
    newest_first = sorted(snapshots, reverse=True)
    reasons: dict[SnapshotId, list[str]] = {snapshot: [] for snapshot in newest_first}
    if newest_first:
        reasons[newest_first[0]].append("newest")
    for snapshot in newest_first:
        if snapshot in pinned:
            reasons[snapshot].append(f"pinned: {pinned[snapshot]}")
        if snapshot in saves:
            reasons[snapshot].append(f"save of job {saves[snapshot]}")
    counts = retention.counts()
    if not any(counts.values()):
        for found in reasons.values():
            found.append("no retention is set")
        return [Verdict(snapshot, found) for snapshot, found in reasons.items()]
    zone = retention.zone()
    ruled = [snapshot for snapshot in newest_first if snapshot not in saves]
    for rule, count in counts.items():
        for snapshot in _kept_by(ruled, count, rule, zone):
            period = "" if rule == "last" else f" {_period(snapshot, rule, zone)}"
            reasons[snapshot].append(rule + period)
    return [Verdict(snapshot, found) for snapshot, found in reasons.items()]


def _kept_by(
    newest_first: Sequence[SnapshotId], count: int, rule: str, zone: ZoneInfo
) -> list[SnapshotId]:
    kept: list[SnapshotId] = []
    last_period = ""
    for number, snapshot in enumerate(newest_first):
        if len(kept) == count:
            break
        period = str(number) if rule == "last" else _period(snapshot, rule, zone)
        if period != last_period or number == len(newest_first) - 1:
            kept.append(snapshot)
            last_period = period
    return kept


def _period(snapshot: SnapshotId, rule: str, zone: ZoneInfo) -> str:
    return _PERIODS[rule](made_at(snapshot).astimezone(zone))


def _week(at: datetime) -> str:
    year, week, _ = at.isocalendar()
    return f"{year}-W{week:02}"


_PERIODS: Final[dict[str, Callable[[datetime], str]]] = {
    "last": str,
    "hourly": lambda at: at.strftime("%Y-%m-%d %H:00 %z"),  # an hour that comes twice is two
    "daily": lambda at: at.strftime("%Y-%m-%d"),
    "weekly": _week,
    "monthly": lambda at: at.strftime("%Y-%m"),
    "yearly": lambda at: at.strftime("%Y"),
}
"""What names the period that a moment lies in."""
