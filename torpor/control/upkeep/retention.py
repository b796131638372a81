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

The rules look at the whole workspace, and at each of its machines alone, so that the snapshots of
one machine displace none of another machine. A machine that is neither rented nor has a snapshot
within the window is no longer judged alone: an ended machine's snapshots grow old with those of the
workspace. An unverified snapshot displaces no verified one: the rules look at the verified ones
alone, too.

What the rules would delete stays while it has work that no other snapshot has (lineage.py), and
while it alone holds what newer ones miss (last_holders.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from torpor.control.zones import zone_named
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
        """For how long after its newest snapshot a machine is judged alone: as far back as the
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
    autosave: bool = False  # its machine made it on its schedule: it counts for no rule


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
    """A verdict for each snapshot, newest first. The newest, the newest verified one and the pinned
    are always kept, and so are the newest of each machine that is rented or within the window, and
    the one that was stored last.
    ``saves``: those of open jobs, with the ids of the jobs, which delete them; they are kept, and
    count for no rule. ``rented``: when each machine that is rented now was asked for, by the
    store's clock."""
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
    for name, line in _judged_alone(newest_first, retention.window_s(), rented):
        counted = [entry for entry in line if entry.snapshot in counts]
        for part in (counted, _verified(counted)):
            if part and not reasons[part[0].snapshot]:
                reasons[part[0].snapshot].append(f"newest of machine {name}")
            for snapshot, rule in _ruled(part, retention):
                _add(reasons[snapshot], rule, f"{rule} of machine {name}")
        # A clock that was behind named it older. Without it, the machine looks older the next time.
        last = max(counted, key=lambda entry: entry.stored_unix, default=None)
        if last and not reasons[last.snapshot]:
            reasons[last.snapshot].append(f"stored last of machine {name}")
    _keep_the_only_ones(newest_first, reasons)
    return [Judged(snapshot, found) for snapshot, found in reasons.items()]


def _keep_the_only_ones(
    newest_first: Sequence[Taken], reasons: Mapping[SnapshotId, list[str]]
) -> None:
    """Keep what has work that no other snapshot that stays is known to have: what another machine
    stored, or the same one before it was synced back. Only names count, of the snapshot or of those
    that it names and that exist."""
    lines = {
        snapshot.snapshot: snapshot.lineage or Lineage.unknown(snapshot.snapshot)
        for snapshot in _verified(newest_first)
    }
    work = Work()
    for snapshot, line in lines.items():
        for one in chain(line, lines.get) if reasons[snapshot] else ():
            work.add(one)
    for snapshot, line in lines.items():
        if not reasons[snapshot] and not work.has(line):
            reasons[snapshot].append("no other snapshot has its work")
            for one in chain(line, lines.get):
                work.add(one)


def _verified(taken: Sequence[Taken]) -> list[Taken]:
    return [entry for entry in taken if entry.verified]


def _add(reasons: list[str], rule: str, words: str) -> None:
    if not any(reason.startswith(rule) for reason in reasons):
        reasons.append(words)


class _Machine(NamedTuple):
    name: str
    taken: list[Taken]  # newest first


def _judged_alone(
    newest_first: Sequence[Taken], window_s: float, rented: Mapping[str, float]
) -> Iterator[_Machine]:
    """The machines that are rented or have a snapshot within the window. A snapshot whose machine
    only its manifest names may be of any rented machine that no snapshot names."""
    latest_unix = max((entry.stored_unix for entry in newest_first), default=0.0)
    named = {entry.machine for entry in newest_first}
    nameless = [asked_unix for name, asked_unix in rented.items() if name not in named]
    for machine in _machines(newest_first):
        newest_unix = max(taken.stored_unix for taken in machine.taken)
        names = {taken.machine for taken in machine.taken} - {""}
        is_rented = bool(names & rented.keys()) or (
            not names and any(asked_unix <= newest_unix for asked_unix in nameless)
        )
        if is_rented or latest_unix - newest_unix <= window_s:
            yield machine


def _machines(newest_first: Sequence[Taken]) -> list[_Machine]:
    """The snapshots by what their machines call themselves, and again by what the control side
    calls those: a machine that lies about itself, or was cloned, displaces nothing of another."""
    agents: dict[str, list[Taken]] = {}
    machines: dict[str, list[Taken]] = {}
    for entry in newest_first:
        if entry.agent:
            agents.setdefault(entry.agent, []).append(entry)
        if entry.machine:
            machines.setdefault(entry.machine, []).append(entry)
    return [
        *(_Machine(name, taken) for name, taken in machines.items()),
        *(_Machine(_name(agent, taken), taken) for agent, taken in agents.items()),
    ]


def _name(agent: str, taken: Sequence[Taken]) -> str:
    return next((entry.machine for entry in taken if entry.machine), agent)


def _ruled(taken: Sequence[Taken], retention: Retention) -> Iterator[tuple[SnapshotId, str]]:
    """What the rules keep of these, newest first, each with the rule."""
    newest_first = [entry.snapshot for entry in taken]
    zone = retention.zone()
    for rule, count in retention.counts().items():
        for snapshot in _kept_by(newest_first, count, rule, zone):
            period = "" if rule == "last" else f" {_period(snapshot, rule, zone)}"
            yield snapshot, rule + period


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

_DAY_S: Final = 86_400.0
_MONTH_S: Final = 31 * _DAY_S
_SECONDS: Final = {
    "last": 0.0,  # it names no period; a month counts, see ``window_s``
    "hourly": 3600.0,
    "daily": _DAY_S,
    "weekly": 7 * _DAY_S,
    "monthly": _MONTH_S,
    "yearly": 366 * _DAY_S,
}
"""The length of each period."""
