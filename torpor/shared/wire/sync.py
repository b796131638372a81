"""The requests of a sync, and their answers. Lists hold the first names; counts are complete."""

from __future__ import annotations

import msgspec

from torpor.shared.values import Grant, SnapshotId
from torpor.shared.wire.request import Count, Names, Nothing, OfRun, Snapshot
from torpor.shared.wire.restore import Checked, OfSnapshot, RestorePart


class Intent(msgspec.Struct, frozen=True):
    """What a sync would do; nothing has been written.

    ``last``: the snapshot that the machine held. ``staged``: files that are made again, perhaps
    from parts on the disk. ``kept``: changed after an earlier run of this sync began to write.
    """

    last: Snapshot | None
    roots: list[str]
    files: Count
    bytes: Count
    left_out: Count
    staged: Count
    removed_count: Count
    kept: Names
    discarded: Names
    discarded_count: Count


class BeginSync(OfSnapshot[Intent], frozen=True):
    """Look at the disk and plan the sync. ``stored``: the workspace's snapshots in the store.
    UnsavedWork names what would be lost, and files that go while a program has them open for
    writing, unless ``discard_local``."""

    op = "sync.begin"
    exclude: list[str]
    stored: list[SnapshotId]
    discard_local: bool


class SyncPlan(msgspec.Struct, frozen=True):
    """What was copied on the machine, and what to fetch."""

    copied_bytes: Count
    stored_bytes: Count
    parts: list[RestorePart]


class StageSync(OfRun[SyncPlan], frozen=True):
    """Make the new files beside the tree, from what is on the machine; plan the rest."""

    op = "sync.stage"
    max_parts: int


class SyncPart(OfRun[Nothing], frozen=True):
    """Fetch from the store, check and stage what the packs hold and the machine does not."""

    op = "sync.part"
    packs: list[Grant]


class Changed(msgspec.Struct, frozen=True):
    """The tree has become the snapshot."""

    warnings: Names


class FinishSync(OfRun[Changed], frozen=True):
    """Read every staged file back from the disk, then change the tree."""

    op = "sync.finish"


class CheckSync(OfRun[Checked], frozen=True):
    """Compare the files that were changed with the snapshot; ``full``: every byte of every file."""

    op = "sync.check"
    full: bool


class EndSync(OfRun[Nothing], frozen=True):
    """Give the workspace back."""

    op = "sync.end"
