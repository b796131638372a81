"""Which state of a workspace is the newest, and which work a snapshot lacks.

A snapshot descends from what its lineage names, which its machine has written down before the
manifest is sent. A *tip* is a snapshot from which no other one descends, and that has work of its
own: one that is equal to what it began from is no tip. Within a line of descent the tip is the
newest, whatever its name and whenever the store received it. Between lines, the tip that the store
received last is: by the store's clock, never by names, which are signed up to half a day before, or
by machines' clocks. Of what machines saved by themselves, the names tell the machine that was given
up from its successor. Snapshots from before there were lineages are one line, in the store's order.

Everybody who wants the newest state asks ``choose_newest``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torpor.control.reports import moment
from torpor.control.safety import check_whole
from torpor.control.store.catalog import Catalog
from torpor.control.store.manifests import ReadManifest, stored_snapshot
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import Receipt
from torpor.control.upkeep.pins import pin_times
from torpor.shared.errors import (
    ManifestInvalid,
    SnapshotError,
    SnapshotMissing,
    StoreCorrupt,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import Lineage, Work, chain
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, StoredObject, StoredSnapshot, WorkspaceName

_NAMED: Final = 3


class StoredState(NamedTuple):
    """A snapshot as a choice sees it. ``stored_unix``: when the store received it. ``machine``: its
    provider's or its user's name for it, or else its own. ``own``: the machine made the snapshot by
    itself; ``autosave``: on its schedule."""

    snapshot: SnapshotId
    stored_unix: float
    line: Lineage
    agent: str
    machine: str
    verified: bool = True
    own: bool = False
    autosave: bool = False
    compared: bool = False

    @property
    def is_old(self) -> bool:
        """Whether the snapshot does not say what it goes on from."""
        return not self.line.whole and not self.line.ancestors

    @property
    def is_read(self) -> bool:
        """Whether the snapshot's manifest could be read."""
        return bool(self.agent)


class JobLineage(NamedTuple):
    """The line of a job. ``since``: its newest save. ``agents`` and ``machines``: its machines'
    names for themselves, and their providers' names for them."""

    since: SnapshotId | None
    agents: frozenset[str]
    machines: frozenset[str]

    def has(self, one: StoredState) -> bool:
        """Whether a machine of the job made the snapshot."""
        return one.agent in self.agents or one.machine in self.machines


class Refused(NamedTuple):
    """A newer snapshot that is not used, and why."""

    one: StoredState
    error: SnapshotError


class NewestState(NamedTuple):
    """``snapshot``: the newest state, whose ``manifest`` was read and whose packs are there; None
    if no snapshot is whole. ``refused``: newer ones of its line, or of lines that the store
    received later, that are not whole. ``aside``: the tips of other lines, whose work it lacks."""

    snapshot: StoredSnapshot | None
    manifest: Manifest | None
    refused: list[Refused]
    aside: list[StoredState]


def choose_newest(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    paths: Sequence[str] | None = None,
    own: JobLineage | None = None,
    *,
    saves: bool = True,
) -> NewestState:
    """The newest state of the workspace, or of a job's ``own`` line; without ``saves``, autosaves
    do not count. It is the tip if that is whole in the store and names no other directories than
    ``paths``, and otherwise its nearest such ancestor. If a line has none, the next line is tried.
    Raises what the store raises, and StoreCorrupt where its listing lacks the job's newest save. No
    pack is read: a restore checks each hash."""
    lines = SnapshotLines.of(store, workspace, seal)
    if own is not None and own.since is not None:
        lines.check_listed(store, workspace, own.since)
    tips = lines.tips()
    mine = None if own is None else lines.job_tip(own, tips)
    # an autosave on top of them would keep them from being tips
    of_runs = tips if saves else lines.tips(saves=False)
    others = [*of_runs, *(tip for tip in tips if tip not in of_runs)]
    first = [mine] if mine else _given_up_last(of_runs)
    refused: list[Refused] = []
    tried: set[SnapshotId] = set()
    for tip in first:
        for one in lines.down(tip):
            if one.snapshot in tried or (one.autosave and not saves):
                continue
            tried.add(one.snapshot)
            try:
                found = stored_snapshot(store, workspace, lines.there[one.snapshot])
                manifest = check_whole(store, found, seal, paths)
            except SnapshotMissing:
                continue  # the snapshot was deleted meanwhile
            except SnapshotError as error:
                refused.append(Refused(one, error))
                continue
            aside = lines.aside(one.line, others)
            lines.keep()
            return NewestState(found, manifest, refused, aside)
    return NewestState(None, None, refused, [])


def sure_save(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    own: JobLineage,
    paths: Sequence[str] | None = None,
) -> StoredSnapshot | None:
    """The newest snapshot of a job's own line, for which a machine with newer work may be ended;
    None if there is none. Raises the error of a newer one that is not whole, and SnapshotMissing if
    the store does not have the job's newest save, because an older one is not enough."""
    newest = own.since
    if newest is not None and store.head(manifest_key(workspace, newest)) is None:
        raise SnapshotMissing(
            f"{store.address} does not have snapshot {newest}, the newest save of the job of "
            f"workspace {workspace}: its machine was not ended, as an older save has less"
        )
    chosen = choose_newest(store, workspace, seal, paths, own)
    if chosen.refused:
        raise chosen.refused[0].error
    return chosen.snapshot


def lacking(
    store: ObjectStore,
    workspace: WorkspaceName,
    seal: Seal,
    mine: Lineage,
    since: SnapshotId | None = None,
    *,
    saves: bool = True,
    lines: SnapshotLines | None = None,
) -> list[StoredState]:
    """The tips whose work ``mine`` lacks, the newest first; ``since``: only of what the store
    received later, or has a later name, than that one; ``saves`` as in ``choose_newest``;
    ``lines``: as the caller has just listed them, with ``mine``.
    It reads a small object for each tip that is verified, and the manifest of each other one."""
    lines = lines or SnapshotLines.of(store, workspace, seal)
    aside = lines.aside(mine, lines.tips(since, mine=mine, saves=saves))
    lines.keep()
    return aside


def _keep_nothing() -> None:
    """Remember nothing, for snapshots that are in no store."""


class SnapshotLines:
    """The snapshots of a workspace by descent. ``times``: when the store received each. ``read``
    reads one, and returns None where it was deleted meanwhile. ``pins``: the snapshots that users
    have pinned. Each snapshot is read at most once. One that a newer snapshot names is read only
    where a line is not whole. ``keep`` remembers what was read for the next look."""

    def __init__(
        self,
        times: Mapping[SnapshotId, float],
        read: Callable[[SnapshotId], StoredState | None],
        pins: frozenset[SnapshotId] = frozenset(),
        there: Mapping[SnapshotId, StoredObject] = {},
        keep: Callable[[], None] = _keep_nothing,
    ) -> None:
        self._times = dict(times)
        self._reads = read
        self.pins = pins
        self.there = there
        self.keep = keep
        self._known: dict[SnapshotId, StoredState | None] = {}
        self._works: dict[SnapshotId, Work] = {}
        self._before: dict[SnapshotId, SnapshotId | None] = {}
        self._after: dict[SnapshotId | None, list[SnapshotId]] = {}
        self._equals: dict[SnapshotId, list[SnapshotId]] = {}

    @classmethod
    def of(
        cls,
        store: ObjectStore,
        workspace: WorkspaceName,
        seal: Seal,
        has_read: ReadManifest | None = None,
    ) -> SnapshotLines:
        """The lines that two listings show. ``has_read``: a manifest that the caller has read."""
        catalog = Catalog(store, workspace, has_read)
        there = catalog.manifests

        def read(snapshot: SnapshotId) -> StoredState | None:
            receipt = catalog.receipt(snapshot)
            if receipt is not None:
                return _verified(there[snapshot], snapshot, receipt)
            return _unverified(catalog, snapshot, seal)

        times = {snapshot: found.modified_unix for snapshot, found in there.items()}
        pins = frozenset(pin_times(store, workspace))
        return cls(times, read, pins, there, catalog.keep)

    def check_listed(
        self, store: ObjectStore, workspace: WorkspaceName, snapshot: SnapshotId
    ) -> None:
        """StoreCorrupt where the store has a snapshot that its listing lacks: it may lack more."""
        if snapshot not in self._times and store.head(manifest_key(workspace, snapshot)):
            raise StoreCorrupt(
                f"{store.address} has snapshot {snapshot} of workspace {workspace}, but its "
                "listing lacks it, so which snapshot is the newest is not known: try again; if the "
                "listing stays incomplete, have the store repaired"
            )

    def tips(
        self,
        since: SnapshotId | None = None,
        *,
        mine: Lineage | None = None,
        saves: bool = True,
    ) -> list[StoredState]:
        """The tips, the one that the store received last first; without those that ``mine`` names.
        ``since`` as in ``lacking``, ``saves`` as in ``choose_newest``."""
        found: list[StoredState] = []
        named = set() if mine is None else {mine.snapshot, *mine.names}
        for snapshot in sorted(self._times, key=self._order, reverse=True):
            if snapshot in named or not self._is_after(snapshot, since):
                continue
            one = self._read(snapshot)
            if one is not None and (saves or not one.autosave):
                found.append(one)
                named |= one.line.names
        return self._unreplaced(found) or found[:1]  # machines that lie may name each other

    def aside(self, mine: Lineage, tips: Sequence[StoredState]) -> list[StoredState]:
        """The tips whose work ``mine`` lacks, without pinned ones, which were put aside on
        purpose."""
        others = [one for one in tips if one.snapshot not in self.pins]
        if not any(one.snapshot != mine.snapshot for one in others):
            return []
        work, old = self._work(mine), self._times.get(mine.snapshot, 0.0)
        return [
            one
            for one in others
            if not work.has(one.line)
            and not (one.is_old and not mine.whole and one.stored_unix <= old)
        ]

    def job_tip(self, own: JobLineage, tips: Sequence[StoredState]) -> StoredState | None:
        """The newest snapshot of a job's own line: its newest save, or what a machine of the job
        stored on top of that. If that save was deleted, another snapshot of its machines. None
        where the store has none of these."""
        if own.since is None:
            return next((one for one in tips if own.has(one)), None)
        base = self._read(own.since) if own.since in self._times else None
        before = {own.since} if base is None else {own.since, *base.line.names}
        later = [
            self._read(snapshot)
            for snapshot in self._times
            if snapshot not in before and self._is_after(snapshot, own.since)
        ]
        mine = [] if base is None else [base]
        for one in later:
            for_a_job = one is not None and one.own and not one.autosave
            if one is not None and own.since in one.line.names and (for_a_job or own.has(one)):
                mine.append(one)
        if not mine:
            stored = map(self._read, self._times)
            mine = [one for one in stored if one is not None and own.has(one)]
        ends = self._unreplaced(mine)
        ends.sort(key=lambda one: self._order(one.snapshot), reverse=True)
        return next(iter(_given_up_last(ends) or mine), None)

    def goes_on_from(self, snapshot: SnapshotId, since: SnapshotId) -> bool:
        """Whether a snapshot is ``since``, or is known to descend from it."""
        one = self._read(snapshot) if snapshot in self._times else None
        return snapshot == since or (one is not None and self._work(one.line).names(since))

    def before(self, snapshot: SnapshotId) -> SnapshotId | None:
        """The nearest existing and readable snapshot from which this one says it goes on, or one
        that is equal to such a snapshot that is gone. None where nothing is known."""
        if snapshot not in self._before:
            one = self._read(snapshot) if snapshot in self._times else None
            self._before[snapshot] = None if one is None else self._nearest(one)
        return self._before[snapshot]

    def after(self, snapshot: SnapshotId) -> list[SnapshotId]:
        """The snapshots that go on from this one, with none between; oldest first."""
        if not self._after:
            for other in self.oldest_first(self._times):
                self._after.setdefault(self.before(other), []).append(other)
        return [*self._after.get(snapshot, [])]

    def heirs(self, snapshot: SnapshotId) -> list[SnapshotId]:
        """The snapshots that go on from a snapshot. For a snapshot without work of its own from
        which nothing goes on, the snapshots that are equal to it."""
        if after := self.after(snapshot):
            return after
        one = self._read(snapshot) if snapshot in self._times else None
        if one is None or one.line.content == snapshot:
            return []
        same = self.equal_to(snapshot)
        return [] if same is None else [same]

    def equal_to(self, snapshot: SnapshotId) -> SnapshotId | None:
        """Another existing snapshot that is known to be equal: the one of which this one is a
        copy."""
        one = self._read(snapshot) if snapshot in self._times else None
        if one is None:
            return None
        if one.line.content != snapshot and one.line.content in self._times:
            return one.line.content
        same = (name for name in self._equal(one.line.content) if name != snapshot)
        return next(same, None)

    def going_back(self, snapshot: SnapshotId) -> Iterator[StoredState]:
        """The existing snapshots from which a snapshot goes on, newest first."""
        seen = {snapshot}
        while (before := self.before(snapshot)) is not None and before not in seen:
            seen.add(snapshot := before)
            if (one := self._read(before)) is not None:
                yield one

    def only_for(self, snapshots: Iterable[SnapshotId]) -> list[SnapshotId]:
        """The snapshots from which only these go on, with these: the rest of their lines, back to
        where another line began or to a pinned snapshot. Oldest first."""
        chosen = {*snapshots}
        for last in [*chosen]:
            at = last
            for one in self.going_back(last):
                others = {*self.after(at), *self.after(one.snapshot)} - chosen
                if others or one.snapshot in self.pins:
                    break
                chosen.add(at := one.snapshot)
        return self.oldest_first(chosen)

    def newest_autosaves(self) -> list[SnapshotId]:
        """The autosaves from which no other autosave goes on."""
        own = {one for one in self._times if (of := self._read(one)) is not None and of.autosave}
        older = {one.snapshot for newest in own for one in self.going_back(newest)}
        return self.oldest_first(own - older)

    def exists(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._times

    def are_equal(self, one: SnapshotId, other: SnapshotId) -> bool:
        """Whether both snapshots are known to hold the same, because a machine that changed nothing
        stored one of them."""
        found = [self._read(name) for name in (one, other) if name in self._times]
        return len({None if of is None else of.line.content for of in found}) == 1 == len(found) - 1

    def is_verified(self, snapshot: SnapshotId) -> bool:
        one = self._read(snapshot) if snapshot in self._times else None
        return one is not None and one.verified

    def oldest_first(self, snapshots: Iterable[SnapshotId]) -> list[SnapshotId]:
        """The existing ones of these snapshots, in the order in which the store received them."""
        return sorted((one for one in snapshots if one in self._times), key=self._order)

    def remove(self, snapshot: SnapshotId) -> None:
        """Note that the snapshot was deleted."""
        del self._times[snapshot]
        changed = [one for one, before in self._before.items() if before == snapshot]
        for one in {snapshot, *changed}:
            self._before.pop(one, None)
        self._after = {}

    def _nearest(self, one: StoredState) -> SnapshotId | None:
        (of_older, older), (_, save) = (
            next(
                ((name, found) for name in names if (found := self._instead(name, one))),
                (None, None),
            )
            for names in (one.line.ancestors, one.line.saves)
        )
        if of_older is None or save is None:
            return older or save
        newer = self._read(save)
        return save if newer is not None and self._work(newer.line).names(of_older) else older

    def _instead(self, name: SnapshotId, of: StoredState) -> SnapshotId | None:
        """The snapshot of that name, or one that is equal to it if it is gone; none where ``of`` is
        equal to it, too, and stands beside it."""
        if name in self._times:
            one = self._read(name)
            return name if one is not None and one.is_read and name != of.snapshot else None
        return None if of.line.content == name else next(iter(self._equal(name)), None)

    def _equal(self, content: SnapshotId) -> list[SnapshotId]:
        """The existing snapshots that are equal to a snapshot."""
        if not self._equals:
            for snapshot in self.oldest_first(self._times):
                one = self._read(snapshot)
                if one is not None:
                    self._equals.setdefault(one.line.content, []).append(snapshot)
        return [one for one in self._equals.get(content, []) if one in self._times]

    def down(self, tip: StoredState) -> Iterator[StoredState]:
        """The tip and its ancestors that exist, each before what it descends from."""
        yield tip
        last = tip
        saves = [name for name in tip.line.saves if name in self._times]
        older = [name for name in tip.line.ancestors if name in self._times]
        while saves or older:
            save = self._read(saves[0]) if saves else None
            is_next = save is not None and not (older and older[0] not in save.line.names)
            one = self._read((saves if is_next or not older else older).pop(0))
            if one is not None:
                yield (last := one)
        if last.is_old:
            before = [
                name for name in self._times if self._order(name) < self._order(last.snapshot)
            ]
            for name in sorted(before, key=self._order, reverse=True):
                if (one := self._read(name)) is not None and one.is_old:
                    yield one

    def _unreplaced(self, found: Sequence[StoredState]) -> list[StoredState]:
        """Those of the found snapshots that no other one replaces. Each is compared with those that
        name it, and an old one with the last: thousands of lines need not be compared two by
        two."""
        wanted = {name for one in found for name in (one.snapshot, one.line.content)}
        having: dict[SnapshotId, list[StoredState]] = {}
        for one in found:
            for name in self._work(one.line).among(wanted):
                having.setdefault(name, []).append(one)
        known = [one for one in found if not one.line.whole]
        last = max(known, key=lambda one: one.stored_unix, default=None)
        return [
            one
            for one in found
            if not any(
                self._replaces(other, one)
                for other in (
                    *having.get(one.snapshot, ()),
                    *having.get(one.line.content, ()),
                    *([last] if last is not None and one.is_old else ()),
                )
            )
        ]

    def _replaces(self, one: StoredState, other: StoredState) -> bool:
        """Whether ``other`` is no tip because of ``one``."""
        if one.snapshot == other.snapshot:
            return False
        if other.is_old and not one.line.whole and one.stored_unix >= other.stored_unix:
            return True
        if not self._work(one.line).has(other.line):
            return False
        if not self._work(other.line).has(one.line):
            return True
        # They are equal. All equal ones need one order: otherwise three of them, one of which the
        # store received late, would replace one another in a circle, and none would be the newest.
        return self._order(one.snapshot) > self._order(other.snapshot)

    def _work(self, line: Lineage) -> Work:
        if line.snapshot not in self._works:
            self._works[line.snapshot] = Work(chain(line, self._line))
        return self._works[line.snapshot]

    def _line(self, snapshot: SnapshotId) -> Lineage | None:
        one = self._read(snapshot) if snapshot in self._times else None
        return None if one is None else one.line

    def _read(self, snapshot: SnapshotId) -> StoredState | None:
        if snapshot not in self._known:
            self._known[snapshot] = self._reads(snapshot)
        return self._known[snapshot]

    def _order(self, snapshot: SnapshotId) -> tuple[float, SnapshotId]:
        return self._times[snapshot], snapshot

    def _is_after(self, snapshot: SnapshotId, since: SnapshotId | None) -> bool:
        """Whether a snapshot was stored after another, or has a later name: a copy of a store has
        other times, and a late save has an earlier name."""
        if since is None:
            return True
        return snapshot > since or self._times[snapshot] > self._times.get(since, 0.0)


def _given_up_last(tips: list[StoredState]) -> list[StoredState]:
    """The tips, with the successors of machines that were given up first. A machine that was given
    up may live on and save until its grants end. Its successor's grants are newer, and so is the
    time in the names that the control side has signed for them: where the store received a
    machine's own save last, the own saves of all machines are sorted by their names."""
    if not tips or not tips[0].own:
        return tips
    own = sorted((one for one in tips if one.own), key=lambda one: one.snapshot, reverse=True)
    return [*own, *(one for one in tips if not one.own)]


def also_in(
    receipts: Mapping[SnapshotId, Receipt],
) -> dict[SnapshotId, SnapshotId | None]:
    """The newest other snapshot that has the work of each; None where none is known to."""
    lines = {
        snapshot: receipt.line or Lineage.unknown(snapshot)
        for snapshot, receipt in sorted(receipts.items(), reverse=True)
    }
    wanted = {name for line in lines.values() for name in (line.snapshot, line.content)}
    having: dict[SnapshotId, list[SnapshotId]] = {}
    for snapshot, line in lines.items():
        for name in Work([line]).among(wanted):
            having.setdefault(name, []).append(snapshot)
    return {
        snapshot: max(
            (
                other
                for of in (snapshot, line.content)
                for other in having.get(of, ())
                if other != snapshot
            ),
            default=None,
        )
        for snapshot, line in lines.items()
    }


def named(
    others: Sequence[StoredState], holds: Callable[[StoredState], str] = lambda one: ""
) -> str:
    """For messages: the first snapshots, with machine and time, and what each ``holds``."""
    words = [
        f"{one.snapshot} of machine {one.machine} ({moment(one.stored_unix)}"
        f"{'' if one.verified else ', never verified'}{holds(one)})"
        for one in others[:_NAMED]
    ]
    more = len(others) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def _verified(found: StoredObject, snapshot: SnapshotId, receipt: Receipt) -> StoredState:
    return StoredState(
        snapshot,
        found.modified_unix,
        receipt.line or Lineage.unknown(snapshot),
        receipt.agent,
        receipt.machine or receipt.agent,
        own=receipt.autosave,
        autosave=receipt.autosave,
        compared=bool(receipt.made_by),
    )


def _unverified(catalog: Catalog, snapshot: SnapshotId, seal: Seal) -> StoredState | None:
    """The state of an unverified snapshot, by its manifest. One whose manifest cannot be read
    counts as going on from nothing, and as having work of its own."""
    unix = catalog.manifests[snapshot].modified_unix
    try:
        said = catalog.said(snapshot, seal)
    except SnapshotMissing:
        return None
    except (ManifestInvalid, WrongKey):
        return StoredState(
            snapshot, unix, Lineage(snapshot, snapshot), "", "unknown", verified=False
        )
    line = said.lineage or Lineage.unknown(snapshot)
    return StoredState(snapshot, unix, line, said.agent, said.agent, False, said.own, said.autosave)
