"""The workspace's files and the chunks in the store, as far as a run knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from torpor.machine.agent.state import Index
from torpor.machine.pipeline.chunks import ChunkPlace, ChunkTable, Located
from torpor.machine.pipeline.journal import Record
from torpor.machine.tree.names import HELD, Names
from torpor.machine.tree.walk import Walk
from torpor.shared.errors import AgentLost, SnapshotDamaged, StoreMissing
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import HARDLINK, Entry, Manifest, decode_manifest
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import ObjectKey
from torpor.shared.wire.snapshot import KnownSnapshot


class KnownFiles:
    """What a run knows of the workspace's files and of chunks in the store; grows from pass to
    pass. ``held``: the names, with the content of files that were read; ``before``: those of the
    last snapshot here, else of the workspace's newest, until a walk.

    ``index``: the tree as this machine last knew it, if the store has it; ``resumable``: packs that
    earlier runs stored.
    """

    def __init__(
        self,
        roots: Sequence[str],
        index: Index | None,
        snapshots: Sequence[KnownSnapshot],
        resumable: dict[ObjectKey, Record],
        before: Names | None,
    ) -> None:
        self.table = ChunkTable()
        self.held = Names(len(roots))
        self._roots = roots
        self._resumable = resumable
        self._snapshots = list(snapshots)
        if index is not None:
            self.table.adopt(index.manifest.chunks, index.manifest.packs)
            self.held = index.held
            self._snapshots = [
                snapshot for snapshot in snapshots if snapshot.root != index.root.hex()
            ]
        self.before = before
        self.newest_roots: list[str] = []  # roots of the newest snapshot, if nothing else is known

    def take_up(self, resumed: Sequence[ObjectKey]) -> None:
        """Name the ``resumable`` packs that the store still has. Once a run."""
        for key in resumed:
            if key in self._resumable:
                record = self._resumable[key]
                self.table.know(record.located, [record.pack])
        self._resumable = {}

    def lose(self, packs: Sequence[ObjectKey]) -> None:
        """Forget the chunks in these packs, and files whose chunks never reached the store, so that
        they are read again."""
        if packs:
            self.table.lose({pack_id_of(key) for key in packs})
        if lost := self.table.without_place():
            for position in range(len(self.held)):
                if any(extent.chunk in lost for extent in self.held.entry(position).extents):
                    self.held.drop(position)

    def saw(self, seen: Walk) -> None:
        """A walk has ended; its unread files are read next."""
        self.held, self.before = seen.names, Names(len(self._roots))

    def learn(self, seal: Seal, transfer: Transfer) -> None:
        """Read the workspace's earlier manifests, once a run: their chunks are not stored again."""
        for known in self._snapshots:
            try:
                blob = next(transfer.get_ranges(known.grant, [Range(0, known.bytes)]))
            except StoreMissing:
                continue  # deleted since the run began: its chunks are stored again
            manifest, root = decode_manifest(bytes(blob), seal, known.grant.key)
            if root.hex() != known.root:
                raise SnapshotDamaged(
                    f"{known.grant.key} is not the snapshot that the control side read: it was "
                    "changed in the store, where manifests are written once"
                )
            check_manifest(manifest, known.grant.key)
            if self.before is None:
                self.before = _held_by(manifest, self._roots)
                self.newest_roots = manifest.roots
            packs = manifest.packs
            self.table.know(
                (
                    Located(
                        c.name,
                        c.plain,
                        ChunkPlace(packs[c.pack].id, c.encoding, c.offset, c.stored),
                    )
                    for c in manifest.chunks
                ),
                packs,
            )
        self._snapshots = []

    def complete(self, seen: Walk, gone: set[int]) -> Names:
        """The names of a walk, with the content that was read since, without those ``gone`` ones
        that did not come back.

        AgentLost if a file was not read: make another pass.
        """
        names = seen.names.settled()
        missing = {p for p in seen.unread.positions if not names.marks[p] & HELD}
        for position in missing:
            if position not in gone:
                path = names.entries[position].path
                raise AgentLost(
                    f"{path.decode(errors='backslashreplace')} was not read in the last "
                    "pass: a share of it was lost; make another pass"
                )
        if not missing:
            return names
        files = {(e.root, e.path) for e in map(names.entries.__getitem__, missing)}
        links = {
            position
            for position, entry in enumerate(names.entries)
            if entry.kind == HARDLINK and (entry.root, entry.target) in files
        }
        return names.without(missing | links)


def _held_by(manifest: Manifest, roots: Sequence[str]) -> Names:
    """What a snapshot holds of ``roots``."""
    numbers = {root: number for number, root in enumerate(roots)}
    there = [numbers.get(root, -1) for root in manifest.roots]
    entries: Iterable[Entry] = manifest.entries
    if there != list(range(len(there))):
        entries = (
            msgspec.structs.replace(entry, root=there[entry.root])
            for entry in manifest.entries
            if there[entry.root] >= 0
        )
    return Names.of(len(roots), entries)
