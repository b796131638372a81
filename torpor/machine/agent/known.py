"""The workspace's files and the chunks in the store, as far as a run knows them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torpor.machine.agent.state import Index
from torpor.machine.pipeline.chunks import ChunkPlace, ChunkTable, Located
from torpor.machine.pipeline.journal import Record
from torpor.machine.tree.walk import Held, Holding, Signature, Walk
from torpor.shared.errors import AgentLost, SnapshotDamaged, StoreMissing
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, HARDLINK, Entry, Manifest, decode_manifest
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import ObjectKey
from torpor.shared.wire.snapshot import KnownSnapshot


class KnownFiles:
    """Grows from pass to pass. ``held``: for each root, the entries of files that were read;
    ``before``: the same of the last snapshot here, else of the workspace's newest, until a walk.

    ``index``: the tree as this machine last knew it, if the store has it; ``resumable``: packs that
    earlier runs stored.
    """

    def __init__(
        self,
        roots: Sequence[str],
        index: Index | None,
        snapshots: Sequence[KnownSnapshot],
        resumable: dict[ObjectKey, Record],
        before: Holding | None,
    ) -> None:
        self.table = ChunkTable()
        self.held: list[dict[bytes, Held]] = [{} for _ in roots]
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
        self.newest_roots: list[str] = []  # of the newest snapshot, if nothing else is known

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
        lost = self.table.without_place()
        for held in self.held if lost else []:
            for path in [
                p for p, h in held.items() if any(e.chunk in lost for e in h.entry.extents)
            ]:
                del held[path]

    def saw(self, seen: Walk) -> None:
        """A walk has ended; its unread files are read next."""
        self.held, self.before = seen.held, []

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

    def entries(
        self, seen: Walk, gone: Container[tuple[int, bytes]]
    ) -> tuple[list[Entry], list[Signature | None]]:
        """The entries of a walk, with the content that was read since, without ``gone`` files.

        AgentLost if a file was not read: make another pass.
        """
        if not seen.unread:
            return seen.entries, seen.signatures
        unread = {(u.entry.root, u.entry.path) for u in seen.unread}
        entries: list[Entry] = []
        signatures: list[Signature | None] = []
        for entry, signature in zip(seen.entries, seen.signatures, strict=True):
            if entry.kind == FILE and (entry.root, entry.path) in unread:
                held = self.held[entry.root].get(entry.path)
                if held is None:
                    if (entry.root, entry.path) in gone:
                        continue
                    raise AgentLost(
                        f"{entry.path.decode(errors='backslashreplace')} was not read in the last "
                        "pass: a part of it was lost; make another pass"
                    )
                entries.append(held.entry)
                signatures.append(held.signature)
            elif entry.kind == HARDLINK and (entry.root, entry.target) in gone:
                continue
            else:
                entries.append(entry)
                signatures.append(signature)
        return entries, signatures


def _held_by(manifest: Manifest, roots: Sequence[str]) -> list[dict[bytes, Held]]:
    """What a snapshot holds of each of ``roots``."""
    held: dict[str, dict[bytes, Held]] = {root: {} for root in roots}
    for entry in manifest.entries:
        if (of := held.get(manifest.roots[entry.root])) is not None:
            of[entry.path] = Held(None, entry)
    return list(held.values())
