"""Which snapshots a retention keeps, and why. Pure: nothing is read and nothing is deleted here.

The rules are restic's (``forget --keep-*``, https://restic.readthedocs.io/en/stable/060_forget.html):

* ``last``: the newest N snapshots.
* ``hourly``, ``daily``, ``weekly``, ``monthly``, ``yearly``: for the last N such periods *in which
  there is a snapshot*, the newest snapshot of each. Periods without one do not count, so a machine
  that sleeps for a month loses nothing by it.
* Each rule looks at all snapshots on its own; one that any rule keeps is kept. (borg and Proxmox
  differ: there a snapshot that one rule keeps does not count for the next.)
* While a rule has not found as many as it wants in the workspace, it keeps the oldest snapshot too,
  so that history reaches back as far as it can.

Periods begin where a clock in ``timezone`` says so; weeks begin on Monday (ISO 8601).

The rules look at the whole workspace, and at each line of descent alone, so that the snapshots of
one machine displace none of another machine that works beside it. A line is what a tip goes on
from: 400 daily wakes, each on a new machine, are one line. A line that neither ends on a rented
machine nor within the window is no longer judged alone: its snapshots grow old with those of the
workspace, but for its tip, which stays. An unverified snapshot displaces no verified one: the rules
look at the verified ones alone, too.

What the rules would delete stays while it has work that no other snapshot has (lineage.py), and
while it alone holds what newer ones miss (superseded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from torpor.control.time_zones import zone_named
from torpor.shared.errors import InvalidInput
from torpor.shared.format.lineage import Lineage, Work, chain
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

    def window_s(self) -> float:
        """Seconds after its newest snapshot for which a line is judged alone: as far back as the
        longest rule looks."""
        spans = {rule: count * _SECONDS[rule] for rule, count in self.counts().items()}
        return max({**spans, "last": _MONTH_S if self.last else 0.0}.values())


class Taken(msgspec.Struct, frozen=True):
    """A snapshot as retention sees it. ``agent``: what its machine calls itself, as in the
    manifest; empty if the manifest cannot be read. ``machine``: as its provider or its user names
    it; empty where nobody knows."""

    snapshot: SnapshotId
    stored_unix: float  # by the store's clock
    verified: bool
    agent: str
    machine: str = ""
    lineage: Lineage | None = None  # None: its manifest says none
    autosave: bool = False  # its machine made it on its schedule, so it satisfies no rule


class Judged(msgspec.Struct, frozen=True):
    """Whether one snapshot stays; without ``reasons`` it is deleted."""

    snapshot: SnapshotId
    reasons: list[str]

    @property
    def kept(self) -> bool:
        return bool(self.reasons)


def judge(
    taken: Sequence[Taken],
    retention: Retention,
    pinned: Mapping[SnapshotId, str],
    saves: Mapping[SnapshotId, str] = {},
    rented: Mapping[str, float] = {},
) -> list[Judged]:
    """A verdict for each snapshot, newest first. The newest, the newest verified one, the pinned
    and all tips are always kept, and so is the newest of each machine that is rented. ``saves``:
    the saves of open jobs, with the ids of the jobs, which delete them; they are kept, and satisfy
    no rule. ``rented``: when each machine that is rented now was asked for, by the store's
    clock."""
    newest_first = sorted(taken, key=lambda entry: entry.snapshot, reverse=True)
    reasons: dict[SnapshotId, list[str]] = {entry.snapshot: [] for entry in newest_first}
    for line, words in ((newest_first, "newest"), (_verified(newest_first), "newest verified")):
        if line and not reasons[line[0].snapshot]:
            reasons[line[0].snapshot].append(words)
    for entry in newest_first:
        found = reasons[entry.snapshot]
        if entry.snapshot in pinned:
            found.append(f"pinned: {pinned[entry.snapshot]}")
        if entry.snapshot in saves:
            found.append(f"save of job {saves[entry.snapshot]}")
        if entry.autosave:
            found.append("its machine made it by itself")
        if not entry.agent:
            found.append("its manifest cannot be read")
    if not any(retention.counts().values()):
        for found in reasons.values():
            found.append("no retention is set")
        return [Judged(snapshot, found) for snapshot, found in reasons.items()]
    ruled = [entry for entry in newest_first if entry.snapshot not in saves and not entry.autosave]
    counts = {entry.snapshot for entry in ruled}
    for line in (ruled, _verified(ruled)):
        for snapshot, rule in _ruled(line, retention):
            _add(reasons[snapshot], rule, rule)
    for name, line in _lines(newest_first, retention.window_s(), rented):
        counted = [entry for entry in line if entry.snapshot in counts]
        for part in (counted, _verified(counted)):
            if part and not reasons[part[0].snapshot]:
                reasons[part[0].snapshot].append(f"newest of machine {name}")
            for snapshot, rule in _ruled(part, retention, and_oldest=False):
                _add(reasons[snapshot], rule, f"{rule} of machine {name}")
    _keep_the_only_ones(newest_first, reasons)
    return [Judged(snapshot, found) for snapshot, found in reasons.items()]


def _keep_the_only_ones(
    newest_first: Sequence[Taken], reasons: Mapping[SnapshotId, list[str]]
) -> None:
    """Keep the snapshots with work that no other staying snapshot is known to have, because another
    machine stored it, or the same machine before a sync. Only names count: of the snapshot, or of
    existing ones that it names."""
    lines = {
        snapshot.snapshot: snapshot.lineage or Lineage.unknown(snapshot.snapshot)
        for snapshot in newest_first
    }
    sure = {snapshot.snapshot for snapshot in _verified(newest_first)}
    work = Work()
    for snapshot, line in lines.items():
        for one in chain(line, lines.get) if reasons[snapshot] and snapshot in sure else ():
            work.add(one)
    for snapshot, line in lines.items():
        if not reasons[snapshot] and not work.has(line):
            reasons[snapshot].append("no other snapshot has its work")
            for one in chain(line, lines.get) if snapshot in sure else ():
                work.add(one)


def _verified(taken: Sequence[Taken]) -> list[Taken]:
    return [entry for entry in taken if entry.verified]


def _add(reasons: list[str], rule: str, words: str) -> None:
    if not any(reason.startswith(rule) for reason in reasons):
        reasons.append(words)


class _Line(NamedTuple):
    """A line of descent. ``name``: of the machine of its tip."""

    name: str
    taken: list[Taken]  # newest first


def _lines(
    newest_first: Sequence[Taken], window_s: float, rented: Mapping[str, float]
) -> Iterator[_Line]:
    """Each tip with its ancestors, if the tip's machine is rented or the tip was stored within the
    window; and the line of the newest snapshot of each rented machine. A snapshot whose machine
    only its manifest names may be of any rented machine that no snapshot names."""
    lines = {one.snapshot: one.lineage or Lineage.unknown(one.snapshot) for one in newest_first}
    older = {name for line in lines.values() for name in line.names}
    by_time = sorted(newest_first, key=lambda one: (one.stored_unix, one.snapshot), reverse=True)
    latest_unix = by_time[0].stored_unix if by_time else 0.0
    named = {one.machine for one in newest_first}
    nameless = [asked_unix for name, asked_unix in rented.items() if name not in named]
    seen: set[str] = set()
    for one in by_time:
        line, machine = lines[one.snapshot], one.machine or one.agent
        is_tip = one.snapshot not in older and (
            line.content == one.snapshot or line.content not in older
        )
        is_rented = one.machine in rented or (
            not one.machine and any(asked_unix <= one.stored_unix for asked_unix in nameless)
        )
        if not (is_rented and machine not in seen) and not (
            is_tip and (is_rented or latest_unix - one.stored_unix <= window_s)
        ):
            continue
        seen.add(machine)
        work = Work(chain(line, lines.get))
        yield _Line(machine, [other for other in newest_first if work.names(other.snapshot)])


def _ruled(
    taken: Sequence[Taken], retention: Retention, *, and_oldest: bool = True
) -> Iterator[tuple[SnapshotId, str]]:
    """The snapshots, newest first, that the rules keep, each with the rule."""
    newest_first = [entry.snapshot for entry in taken]
    zone = retention.zone()
    for rule, count in retention.counts().items():
        for snapshot in _kept_by(newest_first, count, rule, zone, and_oldest):
            period = "" if rule == "last" else f" {_period(snapshot, rule, zone)}"
            yield snapshot, rule + period


def _kept_by(
    newest_first: Sequence[SnapshotId], count: int, rule: str, zone: ZoneInfo, and_oldest: bool
) -> list[SnapshotId]:
    kept: list[SnapshotId] = []
    last_period = ""
    for number, snapshot in enumerate(newest_first):
        if len(kept) == count:
            break
        period = str(number) if rule == "last" else _period(snapshot, rule, zone)
        if period != last_period or (and_oldest and number == len(newest_first) - 1):
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
    # an hour that comes twice, at the end of summer time, counts as two
    "hourly": lambda at: at.strftime("%Y-%m-%d %H:00 %z"),
    "daily": lambda at: at.strftime("%Y-%m-%d"),
    "weekly": _week,
    "monthly": lambda at: at.strftime("%Y-%m"),
    "yearly": lambda at: at.strftime("%Y"),
}
"""The text that names the period of a moment."""

_DAY_S: Final = 86_400.0
_MONTH_S: Final = 31 * _DAY_S
_SECONDS: Final = {
    "last": 0.0,  # this rule has no period; a month counts, see ``window_s``
    "hourly": 3600.0,
    "daily": _DAY_S,
    "weekly": 7 * _DAY_S,
    "monthly": _MONTH_S,
    "yearly": 366 * _DAY_S,
}
"""Seconds of each period."""
