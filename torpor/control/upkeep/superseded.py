"""What may go: the one rule of deletion, for retention, for the thinning of saves and for jobs.

A snapshot may go only if it is *superseded*: a verified snapshot goes on from it, and what it holds
and its successors lack was deleted by its user. What a machine *missed* (format/missed.py) was not
deleted by its user. The last snapshot that holds missed files is pinned by torpor, and the pin says
what it holds: where a newer snapshot is verified, where a wake brings one, and before a snapshot
goes, as nothing can be compared with it afterwards. So a loss that was found once stays known when
the snapshot that showed it is deleted, or when the bucket is copied. Such a pin ends where the user
deletes the snapshot by its name, or where a later verified one has the missed files again.

Rules 11 and 13 of docs/contributing/safety.md; docs/contributing/lineage.md has a picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from torpor.control.losses import clean, size
from torpor.control.safety import Verified, check_whole
from torpor.control.store.manifests import ReadManifest, find_snapshot, open_manifest
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.packs import stored_packs
from torpor.control.store.receipts import receipt_of
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.control.upkeep.pins import Pin, hold, holds, let_go
from torpor.shared.errors import SnapshotError, SnapshotKept, SnapshotMissing, StoreArchived
from torpor.shared.format.keys import Seal
from torpor.shared.format.missed import MissedFiles, Tree, has_all, holds_all, missed
from torpor.shared.format.names import manifest_key
from torpor.shared.values import ObjectKey, SnapshotId, StoredObject, WorkspaceName

_TREES: Final = 3
"""Trees of files in memory at once: of the snapshot that may go, of a successor, and of the
verified one."""
_MOST_NAME: Final = 80
"""Characters of a file's name in a pin's reason."""


class PinnedSnapshot(NamedTuple):
    """A snapshot that torpor has pinned, and what it alone holds."""

    snapshot: SnapshotId
    reason: str


class Ended(NamedTuple):
    """``deleted``: oldest first. ``held``: those that stay for what they alone hold. ``holds``: all
    that torpor pins now."""

    deleted: list[SnapshotId]
    held: list[PinnedSnapshot]
    holds: Mapping[SnapshotId, Pin]


class Stays(NamedTuple):
    """Why a snapshot may not go. ``missed_in``: the later one that misses what it alone holds."""

    why: str
    missed_in: SnapshotId | None = None


class Succession:
    """The snapshots of a workspace, of which those that are superseded may go. ``proven``:
    snapshots without a receipt that are known to be whole. ``has_read``: a manifest that the caller
    has read, so that it is not read again."""

    def __init__(
        self,
        store: ObjectStore,
        workspace: WorkspaceName,
        seal: Seal,
        proven: Iterable[SnapshotId] = (),
        has_read: ReadManifest | None = None,
    ) -> None:
        self.lines = SnapshotLines.of(store, workspace, seal, has_read)
        self._store = store
        self._workspace = workspace
        self._seal = seal
        self._holds = holds(store, workspace)
        self._read = has_read
        self._proven = set(proven)
        self._whole: dict[SnapshotId, bool] = {}
        self._packs: dict[ObjectKey, StoredObject] | None = None  # listed once
        self._newest: dict[SnapshotId, list[SnapshotId]] = {}
        self._trees: dict[SnapshotId, Tree] = {}  # in the order of their last use

    @classmethod
    def of(cls, store: ObjectStore, verified: Verified, seal: Seal) -> Succession:
        """The succession after a snapshot was ``verified``. SnapshotMissing, and nothing may go,
        where that snapshot is gone."""
        workspace = verified.workspace
        if store.head(manifest_key(workspace, verified.snapshot)) is None:
            raise SnapshotMissing(
                f"snapshot {verified.snapshot} of workspace {workspace} disappeared from "
                f"{store.address} after it was verified: nothing was deleted; run the backup again"
            )
        return cls(store, workspace, seal, [verified.snapshot])

    @property
    def holds(self) -> Mapping[SnapshotId, Pin]:
        """The snapshots that torpor pins at present."""
        return self._holds

    def prove(self, snapshot: SnapshotId) -> bool:
        """Count a whole snapshot as verified; False where it is not whole."""
        if self._is_whole(snapshot):
            self._proven.add(snapshot)
        return snapshot in self._proven

    def hold(self, newest: SnapshotId) -> list[PinnedSnapshot]:
        """Pin the snapshots before ``newest`` that alone hold what it lacks: those from which it
        went on, back to the nearest that its own run has verified. That one was compared with those
        before it in the same way."""
        held: list[PinnedSnapshot] = []
        later = [newest]  # back to the nearest whole one
        for before in self.lines.going_back(newest):
            is_whole = self._is_whole(before.snapshot)
            with suppress(SnapshotMissing):  # another run is deleting it, and has compared it
                for other in later if is_whole else ():
                    held += self._hold_for(before.snapshot, other, [newest])
            if before.compared and is_whole:
                break
            later = [before.snapshot] if is_whole else [before.snapshot, *later]
        self.lines.keep()
        return held

    def release(self, newest: SnapshotId) -> None:
        """End torpor's pins of snapshots from which ``newest``, which is verified, goes on, where
        it has again what was missed."""
        for snapshot, pin in [*self._holds.items()]:
            is_later = snapshot != newest and self.lines.goes_on_from(newest, snapshot)
            if not is_later or self.lines.are_equal(newest, snapshot):
                continue
            with suppress(SnapshotError):
                if self._is_back(snapshot, pin.missed_in, newest):
                    let_go(self._store, self._workspace, snapshot)
                    del self._holds[snapshot]

    def named(self, snapshot: SnapshotId) -> list[PinnedSnapshot]:
        """Pin snapshots before a user's deletion of a snapshot by name, which is deleted whatever
        it alone holds: the one before it, or one that is equal to it (another machine may have
        stored the same again), where that snapshot alone then holds what others lack."""
        if not self.lines.exists(snapshot):
            return []  # its manifest is gone, so nothing can be compared with it any more
        before, equal = self.lines.before(snapshot), self.lines.equal_to(snapshot)
        held: list[PinnedSnapshot] = []
        if before is not None:
            held += self._hold_for(before, snapshot, self._newest_heirs(snapshot))
        self.lines.remove(snapshot)
        self._newest = {}
        for left in (one for one in (before, equal) if one is not None):
            for heir in self.lines.heirs(left):
                held += self._hold_for(left, heir, self._newest_heirs(left))
        return held

    def why_stays(self, snapshot: SnapshotId) -> Stays | None:
        """Why the snapshot may not go; None where it is superseded."""
        newest = [heir for heir in self._newest_heirs(snapshot) if self._is_whole(heir)]
        if not newest:
            return Stays("no verified snapshot has its work")
        try:
            self._tree(snapshot)
        except SnapshotError:
            return Stays("its manifest cannot be read")
        seen, later = {snapshot}, self.lines.heirs(snapshot)
        while later:
            heir = later.pop(0)
            if heir in seen:
                continue
            seen.add(heir)
            found = self._missed(snapshot, heir, newest)
            if found is not None:
                return Stays(_words(found), heir)
            if not self._is_whole(heir):  # it shows what was missed, and holds nothing
                later += self.lines.heirs(heir)
        return None

    def holds_all(self, newest: SnapshotId, snapshot: SnapshotId) -> bool:
        """Whether ``newest`` has each file of a snapshot as it is there. A snapshot that cannot be
        read may hold more."""
        try:
            return holds_all(self._tree(newest), self._tree(snapshot))
        except SnapshotError:
            return False

    def end(self, wanted: Iterable[SnapshotId], why: str) -> Ended:
        """Delete those of the ``wanted`` that are superseded and not pinned; ``why`` is written
        into their deletion records. Snapshots that alone hold something are pinned."""
        ended = Ended([], [], self._holds)
        for snapshot in self.lines.oldest_first(wanted):
            if snapshot in self._holds or snapshot in self.lines.pins:
                continue
            with suppress(SnapshotKept, SnapshotMissing):  # another run is working on it
                stays = self.why_stays(snapshot)
                if stays is not None:
                    if stays.missed_in is not None:
                        ended.held.append(self._pin(snapshot, stays.why, stays.missed_in))
                    continue
                before = self.lines.before(snapshot)
                if before is not None:  # the last time that it can be compared with the one before
                    newest = self._newest_heirs(snapshot)
                    ended.held.extend(self._hold_for(before, snapshot, newest))
                delete_snapshot(self._store, self._workspace, snapshot, why=why)
                ended.deleted.append(snapshot)
                self.lines.remove(snapshot)
        self.lines.keep()
        return ended

    def _hold_for(
        self, before: SnapshotId, other: SnapshotId, newest: Iterable[SnapshotId]
    ) -> list[PinnedSnapshot]:
        """Pin ``before`` for what ``other`` misses of it. SnapshotMissing where ``before`` is
        gone."""
        files = self._missed(before, other, newest)
        if files is None or before in self._holds:
            return []
        return [self._pin(before, _words(files), other)]

    def _pin(self, snapshot: SnapshotId, reason: str, missed_in: SnapshotId) -> PinnedSnapshot:
        made = hold(self._store, self._workspace, snapshot, reason, missed_in)
        self._holds[snapshot] = made
        return PinnedSnapshot(snapshot, made.reason)

    def _is_back(
        self, snapshot: SnapshotId, missed_in: SnapshotId | None, newest: SnapshotId
    ) -> bool:
        """Whether ``newest`` has everything that later snapshots miss of a snapshot."""
        if missed_in is None or not self.lines.exists(missed_in):
            return has_all(self._tree(newest), self._tree(snapshot))
        later = [missed_in, *self.lines.heirs(snapshot)]
        return all(self._missed(snapshot, one, [newest]) is None for one in later)

    def _missed(
        self, before: SnapshotId, other: SnapshotId, newest: Iterable[SnapshotId]
    ) -> MissedFiles | None:
        """What ``other`` misses of what ``before`` holds, where none of the ``newest`` has that
        again. A snapshot that is equal to ``before`` does not count as later, and no wake names it.
        A snapshot that cannot be read does not count."""
        files = None
        with suppress(SnapshotError):
            files = missed(self._tree(before), self._tree(other))
            for one in newest if files is not None else ():
                is_other = one != other and not self.lines.are_equal(one, before)
                if is_other and self._is_whole(one):
                    files = missed(self._tree(before), self._tree(other), self._tree(one))
                if files is None:
                    return None
        return files

    def _newest_heirs(self, snapshot: SnapshotId) -> list[SnapshotId]:
        """The verified snapshots that go on from a snapshot and from which no other verified one
        goes on. For a snapshot from which nothing goes on: those of the snapshots that are equal to
        it, or that snapshot itself."""
        if self.lines.after(snapshot):
            return self._newest_after(snapshot)
        found: list[SnapshotId] = []
        for equal in self.lines.heirs(snapshot):
            others = [heir for heir in self._newest_after(equal) if heir != snapshot]
            found += others or ([equal] if self._is_sure(equal) else [])
        return found

    def _newest_after(self, snapshot: SnapshotId) -> list[SnapshotId]:
        waiting = [snapshot]
        while waiting:  # what goes on from a snapshot is looked at before the snapshot
            one = waiting[-1]
            after = self.lines.after(one)
            new = [other for other in after if other not in self._newest and other not in waiting]
            if new:
                waiting += new
                continue
            waiting.pop()
            found = dict[SnapshotId, None]()
            for other in after:
                beyond = self._newest.get(other) or ([other] if self._is_sure(other) else [])
                found.update(dict.fromkeys(beyond))
            self._newest[one] = [*found]
        return [heir for heir in self._newest[snapshot] if self.lines.exists(heir)]

    def _is_sure(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._proven or self.lines.is_verified(snapshot)

    def _is_whole(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot can be read, and its packs are there, as far as the store shows them.
        False for one whose receipt was withdrawn since the listing: reading its bytes has found
        damage that no listing shows."""
        if snapshot not in self._whole:
            try:
                if snapshot not in self._proven and self.lines.is_verified(snapshot):
                    self._whole[snapshot] = self._has_receipt(snapshot)
                elif snapshot not in self._proven:
                    if self._packs is None:
                        self._packs = stored_packs(self._store, self._workspace)
                    found = find_snapshot(self._store, self._workspace, snapshot)
                    check_whole(self._store, found, self._seal, packs=self._packs)
                self._tree(snapshot)
                self._whole.setdefault(snapshot, True)
            except (SnapshotError, StoreArchived):
                self._whole[snapshot] = False
        return self._whole[snapshot]

    def _has_receipt(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot has a receipt now. The receipt itself is read, because it may have
        been withdrawn since the listing."""
        found = self.lines.there[snapshot]
        return receipt_of(self._store, self._workspace, snapshot, found) is not None

    def _tree(self, snapshot: SnapshotId) -> Tree:
        if snapshot not in self._trees:
            read, found = self._read, self.lines.there.get(snapshot)
            if read is not None and found is not None and read.is_of(found):
                manifest = read.manifest
            else:
                manifest, _ = open_manifest(self._store, self._workspace, snapshot, self._seal)
            self._keep(snapshot, Tree(manifest))
        self._trees[snapshot] = self._trees.pop(snapshot)
        return self._trees[snapshot]

    def _keep(self, snapshot: SnapshotId, tree: Tree) -> None:
        while len(self._trees) >= _TREES:
            del self._trees[next(iter(self._trees))]
        self._trees[snapshot] = tree


def _words(missed: MissedFiles) -> str:
    files = f"{missed.files:,} file{'' if missed.files == 1 else 's'} ({size(missed.size)})"
    names = ", ".join(clean(name)[-_MOST_NAME:] for name in missed.names)
    return f"it alone holds {files} that a later snapshot missed and nobody deleted: {names}"
