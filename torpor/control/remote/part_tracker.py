"""Which machine fetches which part from where, when one snapshot goes to many at once. No I/O.

Each part is fetched from the store by one machine and by the others from machines that have it.
Two rates are measured from these transfers alone: a machine's from the store while all machines
use it, and a machine's from its peers. Peers are used only while their rate is the higher one.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, get_args

from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.wire.restore import Peer, RestoredPart, RestorePart, RestorePlan

PeerMode = Literal["auto", "never", "always"]

UPLOADS: Final = 4
"""Parts that a machine passes on at the same time. Few, because a machine that waits soon finds new
holders."""
TRIALS: Final = 4
"""Parts that come from peers before the two rates are compared."""
FIRST_PATIENCE_S: Final = 60.0
"""Seconds to wait for a part that another machine fetches, while no rate is known."""
_POLL_S: Final = 0.5
_TOGETHER: Final = 8  # parts that an agent works on at the same time
_PATIENT: Final = 4
"""Factor by which a peer may be slower than the store before a download from it is stopped, which
loses the chunk under way. The rates show when peers are slower on the whole."""
_KEPT_RATES: Final = 64


class Errand(NamedTuple):
    """One part to fetch for one machine; ``holder`` None: from the store."""

    part: RestorePart
    holder: Member | None
    floor_bytes_s: float
    began: float

    @property
    def peer(self) -> Peer | None:
        return None if self.holder is None else self.holder.peer


class _Lot:
    """One part as all machines know it."""

    def __init__(self, first: bool) -> None:
        self.first = first
        self.holders: list[Member] = []
        self.claimed: Member | None = None
        self.claimed_at = 0.0


class PartTracker:
    """Which machine of a replicate has which part. The control side keeps it. Thread-safe."""

    def __init__(
        self, mode: PeerMode, machines: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if mode not in get_args(PeerMode):
            raise InvalidInput(f"peers is one of {', '.join(get_args(PeerMode))}, not {mode!r}")
        self._mode = mode
        self._machines = max(1, machines)
        self.clock = clock
        self.changed = threading.Condition()
        self.lots: dict[tuple[str, ...], _Lot] = {}
        self._members: list[Member] = []
        self._rates: dict[str, list[float]] = {"store": [], "peers": []}
        self._took_s: list[float] = []
        self._verdict = ""
        self._stopped = False

    @property
    def passing(self) -> bool:
        """Whether machines pass packs on to each other now."""
        if self._mode == "auto" and (self._verdict == "store" or self._too_few):
            return False
        return self._mode != "never" and self._machines > 1

    @property
    def _too_few(self) -> bool:
        """Whether there are fewer parts than machines, so that some must wait at the beginning."""
        return bool(self._members) and len(self.lots) < self._machines

    @property
    def decision(self) -> str:
        """For the report: the decision, its figures, and the share of the bytes from peers."""
        store, peers = self.store_bytes_s, self.peer_bytes_s
        measured = f"{store / 1e6:.1f} MB/s a machine from the store"
        if self._mode == "never":
            return f"from the store only, as asked: {measured}"
        if not self._rates["peers"]:
            why = "too few parts to share" if self._too_few else "no peer was needed"
            return f"from the store only, {why}: {measured}"
        from_peers = sum(member.peer_bytes for member in self._members)
        fetched = from_peers + sum(member.store_bytes for member in self._members)
        measured += f", {peers / 1e6:.1f} from peers; "
        measured += f"{100 * from_peers / max(1, fetched):.0f} % of the bytes came from peers"
        if self._mode == "always":
            return f"passed on by peers, as asked: {measured}"
        if self._verdict == "store":
            return f"passed on by peers until the store was faster: {measured}"
        return f"passed on by peers: {measured}"

    @property
    def store_bytes_s(self) -> float:
        """Stored bytes a second of one machine while all fetch; 0.0 while unknown."""
        return _median(self._rates["store"])

    @property
    def peer_bytes_s(self) -> float:
        return _median(self._rates["peers"])

    def join(self, plan: RestorePlan, peer: Peer | None) -> Member:
        """One more machine, with what it lacks, and where it passes packs on (None: nowhere)."""
        with self.changed:
            for part in plan.parts:
                self.lots.setdefault(_name(part), _Lot(part.first))
            member = Member(self, plan, peer, len(self._members))
            self._members.append(member)
            self.changed.notify_all()
            return member

    def stop(self) -> None:
        """End all waiting: ``next`` raises RunCancelled."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()

    def linger(self, member: Member) -> None:
        """Wait until no member lacks a part that ``member`` may pass on, or all is stopped."""
        with self.changed:
            while member.peer is not None and not self._stopped and self.passing:
                if not any(other.lacking for other in self._members):
                    return
                self.changed.wait(_POLL_S)

    def check(self) -> None:
        if self._stopped:
            raise RunCancelled("the replicate was stopped")

    def share(self, first: bool = False) -> int:
        """How many parts of one kind (those that come first, or the others) a machine fetches from
        the store for all machines, before it takes more."""
        return max(1, sum(lot.first is first for lot in self.lots.values()) // self._machines)

    def patience_s(self) -> float:
        """Seconds to wait for a part that another machine fetches."""
        return 5.0 + 2 * statistics.mean(self._took_s) if self._took_s else FIRST_PATIENCE_S

    def measure(self, source: str, bytes_s: float, took_s: float) -> None:
        """Note a part from ``source`` and the machine's rate meanwhile, and decide again."""
        rates = self._rates[source]
        rates.append(bytes_s)
        del rates[:-_KEPT_RATES]
        if source == "store":
            self._took_s.append(took_s)
            del self._took_s[:-_KEPT_RATES]
        enough = len(self._rates["peers"]) >= TRIALS and self._rates["store"]
        if self._mode == "auto" and self._verdict != "store" and enough:
            self._verdict = "peers" if self.peer_bytes_s > self.store_bytes_s else "store"


class Member:
    """One machine of a replicate: what it lacks, fetches and holds."""

    def __init__(
        self, tracker: PartTracker, plan: RestorePlan, peer: Peer | None, number: int
    ) -> None:
        self.peer = peer
        self.uploads = 0
        self.store_bytes = 0
        self.peer_bytes = 0
        self._tracker = tracker
        self._todo: dict[tuple[str, ...], RestorePart] = {}
        for first in (True, False):
            parts = [part for part in plan.parts if part.first is first]
            # each machine begins at another part
            at = number * tracker.share(first) % max(1, len(parts))
            self._todo |= {_name(part): part for part in [*parts[at:], *parts[:at]]}
        self._active: dict[str, int] = {"store": 0, "peers": 0}
        self._first_lacking = sum(part.first for part in plan.parts)
        self._claims = {True: 0, False: 0}  # of parts that come first, and of others
        self._shared = {True: 0, False: 0}  # of those, how many it has
        self._refused: set[Member] = set()
        self._gone = False

    @property
    def lacking(self) -> bool:
        return not self._gone and bool(self._todo or any(self._active.values()))

    def next(self) -> Errand | None:
        """The next part to fetch; waits for peers. None when no part is left to begin."""
        tracker = self._tracker
        with tracker.changed:
            while self._todo:
                tracker.check()
                errand = self._choose()
                if errand is not None:
                    del self._todo[_name(errand.part)]
                    self._active[_source(errand)] += 1
                    if errand.holder is not None:
                        errand.holder.uploads += 1
                    return errand
                tracker.changed.wait(_POLL_S)
            return None

    def done(self, errand: Errand, restored: RestoredPart) -> bool:
        """Note that the part is on the machine's disk, verified. Returns whether it was the last of
        those that come first."""
        tracker, lot = self._tracker, self._lot(errand.part)
        with tracker.changed:
            self.peer_bytes += restored.peer_bytes
            self.store_bytes += restored.stored_bytes - restored.peer_bytes
            took_s = max(1e-3, tracker.clock() - errand.began)
            source = _source(errand)
            together = min(_TOGETHER, self._active[source])
            self._leave(errand)
            moved = restored.stored_bytes if source == "store" else restored.peer_bytes
            if errand.holder is not None and restored.peer_bytes < restored.stored_bytes:
                self._refused.add(errand.holder)  # the peer is dead or slow, or it sent wrong bytes
            if restored.stored_bytes:
                tracker.measure(source, moved / took_s * together, took_s)
            if restored.kept and self.peer is not None and not self._gone:
                lot.holders.append(self)
            tracker.changed.notify_all()
            self._first_lacking -= errand.part.first
            return errand.part.first and not self._first_lacking

    def failed(self, errand: Errand) -> None:
        """Note that the part was not fetched, so that the next member that asks gets it."""
        with self._tracker.changed:
            self._leave(errand)
            if errand.holder is not None:
                self._refused.add(errand.holder)
            self._todo = {_name(errand.part): errand.part, **self._todo}
            self._tracker.changed.notify_all()

    def leave(self) -> None:
        """Note that the machine is gone or has stopped passing packs on."""
        with self._tracker.changed:
            self._gone = True
            for lot in self._tracker.lots.values():
                if self in lot.holders:
                    lot.holders.remove(self)
                if lot.claimed is self:
                    lot.claimed = None
            self._tracker.changed.notify_all()

    def _choose(self) -> Errand | None:
        todo = sorted(self._todo.values(), key=lambda part: not part.first)
        if not self._tracker.passing:
            return self._errand(todo[0], None)
        groups = [[part for part in todo if part.first is first] for first in (True, False)]
        errands = (self._choose_of(parts, parts[0].first) for parts in groups if parts)
        return next((errand for errand in errands if errand is not None), None)

    def _choose_of(self, parts: Sequence[RestorePart], first: bool) -> Errand | None:
        tracker = self._tracker
        unclaimed = [p for p in parts if self._is_unclaimed(p)]
        if unclaimed and self._claims[first] < tracker.share(first):
            return self._claim(unclaimed[0])
        overdue = None
        for part in parts:
            lot = self._lot(part)
            if lot.claimed is None and not lot.holders:
                continue
            able = [m for m in lot.holders if m is not self and m not in self._refused]
            free = min(able, key=lambda m: m.uploads, default=None)
            if free is not None and free.uploads < UPLOADS:
                return self._errand(part, free)
            waited_s = tracker.clock() - lot.claimed_at
            if not able and (lot.holders or waited_s > tracker.patience_s()):
                overdue = overdue or part
        if unclaimed and self._shared[first] >= tracker.share(first):
            return self._claim(unclaimed[0])
        return None if overdue is None else self._errand(overdue, None)

    def _claim(self, part: RestorePart) -> Errand:
        lot = self._lot(part)
        lot.claimed, lot.claimed_at = self, self._tracker.clock()
        self._claims[part.first] += 1
        return self._errand(part, None)

    def _errand(self, part: RestorePart, holder: Member | None) -> Errand:
        floor = self._tracker.store_bytes_s / _TOGETHER / _PATIENT
        return Errand(part, holder, floor, self._tracker.clock())

    def _is_unclaimed(self, part: RestorePart) -> bool:
        lot = self._lot(part)
        return lot.claimed is None and not lot.holders

    def _leave(self, errand: Errand) -> None:
        self._active[_source(errand)] -= 1
        if errand.holder is not None:
            errand.holder.uploads -= 1
        lot = self._lot(errand.part)
        if lot.claimed is self:
            lot.claimed = None
            self._shared[errand.part.first] += 1

    def _lot(self, part: RestorePart) -> _Lot:
        return self._tracker.lots[_name(part)]


def _name(part: RestorePart) -> tuple[str, ...]:
    return (*map(str, part.pieces), *part.packs)


def _source(errand: Errand) -> str:
    return "store" if errand.holder is None else "peers"


def _median(rates: list[float]) -> float:
    """The median, so that one dead or slow machine does not decide for all."""
    return statistics.median(rates) if rates else 0.0
