"""Lineage: the earlier snapshots whose work a snapshot has.

A machine's tree goes on from the snapshot to which it was last equal: the one that was woken or
synced there, or the last one that was made of the tree. A new snapshot of the tree has the work of
that snapshot and of all its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec

from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import SnapshotId, learned, snapshot_id

MOST_ANCESTORS: Final = 400
"""The most ancestors that a lineage names: over a year of daily backups, in 12 KB of a manifest and
of a receipt."""
AUTOSAVE: Final = "autosave"
"""The key in a manifest's statistics of an autosave: the machine made the snapshot by itself, and
for no job."""
OWN_SAVE: Final = "own_save"
"""The key in a manifest's statistics of an own save: the machine made the snapshot by itself, for a
job or not."""
MOST_SAVES: Final = 100
"""The most autosaves that a lineage names. Each is soon deleted; if nobody deletes them for half a
day, the named ones name the older ones (``chain``)."""
LINEAGE: Final = "lineage"
"""The key in the manifest's environment record. Readers that do not know the key ignore it."""


class Lineage(msgspec.Struct, frozen=True):
    """``ancestors``: the snapshots that this one goes on from, newest first; the first is its
    parent. They stay named after their deletion. ``whole``: the ancestors reach back to the first
    snapshot; otherwise older ones are unknown and do not count. ``content``: the oldest ancestor
    whose content is equal to this snapshot's, or the snapshot itself, which then has work of its
    own. ``saves``: the autosaves that this one goes on from, newest first; they are not in
    ``ancestors``. ``autosave``: this snapshot is an autosave."""

    snapshot: SnapshotId
    content: SnapshotId
    ancestors: Annotated[list[SnapshotId], msgspec.Meta(max_length=MOST_ANCESTORS)] = []
    whole: bool = True
    saves: Annotated[list[SnapshotId], msgspec.Meta(max_length=MOST_SAVES)] = []
    autosave: bool = False

    @classmethod
    def unknown(cls, snapshot: SnapshotId) -> Lineage:
        """The lineage of a snapshot that does not say what it goes on from. Such a snapshot counts
        as having work of its own."""
        return cls(snapshot, snapshot, whole=False)

    @classmethod
    def after(
        cls,
        before: Lineage | None,
        snapshot: SnapshotId,
        *,
        equal: bool,
        autosave: bool = False,
    ) -> Lineage:
        """The lineage of the next snapshot of a tree whose last one is ``before``; ``equal``: the
        tree has not changed."""
        if before is None:
            return cls(snapshot, snapshot, autosave=autosave)
        ancestors, saves = before.ancestors, before.saves
        if before.autosave:
            saves = [before.snapshot, *saves][:MOST_SAVES]
        else:
            ancestors = [before.snapshot, *ancestors]
        whole = before.whole and len(ancestors) <= MOST_ANCESTORS
        content = before.content if equal else snapshot
        return cls(snapshot, content, ancestors[:MOST_ANCESTORS], whole, saves, autosave)

    @property
    def names(self) -> set[SnapshotId]:
        """Every snapshot that this lineage says its snapshot goes on from."""
        return {*self.ancestors, *self.saves} - {self.snapshot}

    @property
    def parent(self) -> SnapshotId | None:
        return self.ancestors[0] if self.ancestors else None

    def record(self) -> dict[str, Any]:
        """The fact for the environment record of the snapshot's manifest."""
        facts = {"content": self.content, "ancestors": self.ancestors, "whole": self.whole}
        if self.saves or self.autosave:
            facts |= {"saves": self.saves, "autosave": self.autosave}
        return {LINEAGE: facts}


def recorded(manifest: Manifest) -> Lineage | None:
    """The lineage that a manifest says; None where it says none, or where the fact does not fit,
    because a machine wrote it."""
    said = manifest.environment.get(LINEAGE)
    if not isinstance(said, dict):
        return None
    try:
        lineage = msgspec.convert({**said, "snapshot": manifest.snapshot}, learned(Lineage))
        for name in (lineage.content, *lineage.ancestors, *lineage.saves):
            snapshot_id(name)
    except (msgspec.ValidationError, InvalidInput):
        return None
    return lineage


def lineage_of(manifest: Manifest) -> Lineage:
    return recorded(manifest) or Lineage.unknown(manifest.snapshot)


def chain(lineage: Lineage, before: Callable[[SnapshotId], Lineage | None]) -> Iterator[Lineage]:
    """The lineage with the ancestors of its ancestors. Where ``lineage`` does not reach back to the
    first snapshot, or names MOST_SAVES autosaves, the lineage of the oldest named snapshot that
    still exists is added, and so on: a few manifests name a line of thousands. ``before`` returns
    the lineage of a snapshot; None where the snapshot is gone or says none."""
    seen, waiting = {lineage.snapshot}, [lineage]
    while waiting:
        one = waiting.pop()
        yield one
        more_saves = one.saves if len(one.saves) == MOST_SAVES else []
        for names in ([] if one.whole else one.ancestors, more_saves):
            found = (before(name) for name in reversed(names) if name not in seen)
            older = next((of for of in found if of is not None), None)
            if older is not None:
                seen.add(older.snapshot)
                waiting.append(older)


class Work:
    """The work that some snapshots have together: their own, and that of the snapshots that their
    lineages name. A snapshot that no lineage names may be another machine's, and does not count."""

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        self._named: set[SnapshotId] = set()
        for lineage in lineages:
            self.add(lineage)

    def add(self, lineage: Lineage) -> None:
        self._named.update((lineage.snapshot,), lineage.ancestors, lineage.saves)

    def names(self, snapshot: SnapshotId) -> bool:
        """Whether a lineage names the snapshot. Contents are not compared."""
        return snapshot in self._named

    def among(self, wanted: set[SnapshotId]) -> set[SnapshotId]:
        """The ``wanted`` snapshots that a lineage names. Contents are not compared."""
        return self._named & wanted

    def has(self, lineage: Lineage) -> bool:
        return self.names(lineage.snapshot) or self.names(lineage.content)
