"""Lineage: the earlier snapshots whose work a snapshot has.

A machine's tree goes on from what it was last equal to: what was woken or synced there, or the last
snapshot of it. A snapshot of it has the work of that one, and of all that that one went on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec

from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import SnapshotId, learned, snapshot_id

MOST_ANCESTORS: Final = 400
"""Over a year of daily backups; 12 KB of a manifest and of a receipt."""
AUTOSAVE: Final = "autosave"
"""In a manifest's statistics: a machine made it by itself, and for no job."""
OWN_SAVE: Final = "own_save"
"""In a manifest's statistics: the machine made the snapshot by itself."""
MOST_SAVES: Final = 100
"""Autosaves, each of which is superfluous soon. Where nobody deletes them for half a day, older
ones are named by these (``chain``)."""
LINEAGE: Final = "lineage"
"""Its name in the environment record, where a reader of any torpor takes it for a fact more."""


class Lineage(msgspec.Struct, frozen=True):
    """``ancestors``: what a snapshot goes on from, newest first; its parent is the first. They stay
    named after their deletion. ``whole``: they reach back to the first; else it has older ones that
    nobody knows, and that count for nothing. ``content``: the oldest of them that is equal to the
    snapshot, or the snapshot itself: then it has work of its own. ``saves``: the autosaves that it
    goes on from, newest first; they are no ancestors. ``autosave``: it is one."""

    snapshot: SnapshotId
    content: SnapshotId
    ancestors: Annotated[list[SnapshotId], msgspec.Meta(max_length=MOST_ANCESTORS)] = []
    whole: bool = True
    saves: Annotated[list[SnapshotId], msgspec.Meta(max_length=MOST_SAVES)] = []
    autosave: bool = False

    @classmethod
    def unknown(cls, snapshot: SnapshotId) -> Lineage:
        """A snapshot that does not say what it goes on from: it is known to have its own work."""
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
        """The next snapshot of a tree that goes on from ``before``; ``equal``: with no change."""
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
        """Every snapshot that it says it goes on from."""
        return {*self.ancestors, *self.saves} - {self.snapshot}

    @property
    def parent(self) -> SnapshotId | None:
        return self.ancestors[0] if self.ancestors else None

    def record(self) -> dict[str, Any]:
        """What the environment record of its manifest keeps."""
        facts = {"content": self.content, "ancestors": self.ancestors, "whole": self.whole}
        if self.saves or self.autosave:
            facts |= {"saves": self.saves, "autosave": self.autosave}
        return {LINEAGE: facts}


def recorded(manifest: Manifest) -> Lineage | None:
    """The lineage that a manifest says; None where it says none. A machine writes it, so what does
    not fit is none."""
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
    """The lineage, and where that does not reach back to the first, or names as many autosaves as
    it may, the ones of the oldest of these that still exist, and so on: a line of thousands of
    snapshots is named by a few of them. ``before``: the lineage of a snapshot; None where that is
    gone or says none."""
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
    """The work that some snapshots have together: theirs, and that of what they name. Nothing else:
    what a lineage does not name may be another machine's."""

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        self._named: set[SnapshotId] = set()
        for lineage in lineages:
            self.add(lineage)

    def add(self, lineage: Lineage) -> None:
        self._named.update((lineage.snapshot,), lineage.ancestors, lineage.saves)

    def names(self, snapshot: SnapshotId) -> bool:
        """Whether it has the work of a snapshot, by the name alone."""
        return snapshot in self._named

    def among(self, wanted: set[SnapshotId]) -> set[SnapshotId]:
        """Those of the ``wanted`` whose work it has, by the name alone."""
        return self._named & wanted

    def has(self, lineage: Lineage) -> bool:
        return self.names(lineage.snapshot) or self.names(lineage.content)
