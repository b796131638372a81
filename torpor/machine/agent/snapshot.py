"""The agent's half of a snapshot: passes of walking and storing, then the manifest."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from torpor.machine.agent.environment import record_environment
from torpor.machine.agent.gpu import open_gpu
from torpor.machine.agent.log import LOG_FILE, Log
from torpor.machine.agent.machine import machine_id
from torpor.machine.agent.runs import WORKERS, Run
from torpor.machine.agent.sync import drop_staged
from torpor.machine.pipeline.buffers import PackBuffers
from torpor.machine.pipeline.chunks import ChunkTable, Located, Place
from torpor.machine.pipeline.contents import Contents
from torpor.machine.pipeline.digests import PackDigests
from torpor.machine.pipeline.journal import Journal, Record
from torpor.machine.pipeline.numbers import Numbers
from torpor.machine.pipeline.upload import PACK_BYTES, PartStored, Source, packs_needed, store_part
from torpor.machine.tree.plan import Job, cut, share_out
from torpor.machine.tree.walk import (
    Held,
    Signature,
    Walk,
    compile_excludes,
    resolve_roots,
    walk,
)
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import AgentLost, SnapshotDamaged, StoreMissing, WorkspaceInvalid
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import (
    FILE,
    HARDLINK,
    Entry,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from torpor.shared.format.names import pack_id_of, pack_key
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.protocol import Call

SHOWN: Final = 20
"""How many names a result spells out; the count is always whole."""


class Known(NamedTuple):
    """An earlier snapshot of the workspace: its root hash, and leave to read its manifest."""

    root: bytes
    bytes: int
    grant: Grant


class SnapshotRun(Run):
    """One snapshot being made. Operations of one run come one after the other, but for parts."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._home = home
        self._journal = Journal(self.state.journal)
        self._table = ChunkTable()
        self._buffers = PackBuffers(PACK_BYTES)
        self._digests = PackDigests()
        self._gpu = GpuTrial(
            lambda: open_gpu(home),
            encoding_cores(),
            lambda words: Log(home / LOG_FILE).write(f"run {run}: {words}"),
        )
        self._filling = threading.Lock()
        self._begun_packs: set[ObjectKey] = set()
        self._walk: Walk | None = None
        self._source: Source | None = None
        self._parts: list[list[Job]] = []
        self._pass = 0
        self._fresh: set[tuple[int, bytes]] = set()
        self._begun: dict[str, Any] | None = None
        self._committed: tuple[SnapshotId, bytes, bytes] | None = None
        self._entries: list[Entry] = []
        self._signatures: list[Signature | None] = []

    def begin(
        self,
        roots: Sequence[str],
        exclude: Sequence[str],
        key: bytes | None,
        known: Sequence[Known],
        compression: Compression,
    ) -> dict[str, Any]:
        """Resolve the roots and take up what earlier runs left; ``known`` are the workspace's
        snapshots, newest first. Once a run."""
        if self._begun is not None:
            return self._begun
        if self.state.restore_journal.exists():
            raise WorkspaceInvalid(
                f"workspace {self.workspace} is only half on this machine: a restore of it never "
                "finished. Wake it here again, which takes up where that stopped; a snapshot now "
                "would keep the half"
            )
        self._settle_sync()
        self._roots = resolve_roots(roots)
        self._named_roots = list(roots)
        self._excluded = compile_excludes(exclude)
        self._seal = Seal(key)
        self._known = list(known)
        effort = Effort(smallest=compression.smallest)
        self._encoder = Encoder(effort, self._gpu if compression.gpu else None)
        index = self.state.load_index(self._roots, self._seal, {one.root for one in known})
        self._held: list[dict[bytes, Held]]
        if index is not None:
            self._table.adopt(index.manifest.chunks, index.manifest.packs)
            self._held = index.held
            self._known = [one for one in known if one.root != index.root]
        else:
            self._held = [{} for _ in self._roots]
        self._resumable = {pack_key(self.workspace, r.pack.id): r for r in self._journal.read()}
        self._begun = {
            "roots": [os.fsdecode(root) for root in self._roots],
            "environment": record_environment(),
            "resumable": [
                {"key": key, "bytes": r.pack.size, "md5": r.pack.md5.hex()}
                for key, r in self._resumable.items()
            ],
        }
        return self._begun

    def scan(
        self,
        number: int,
        max_parts: int,
        part_bytes: int,
        resumed: Sequence[ObjectKey],
        lost: Sequence[ObjectKey],
        accepted: Sequence[str],
        call: Call,
    ) -> dict[str, Any]:
        """Walk the roots and plan what has to be read. ``lost`` packs are gone from the store."""
        self._take_up([self._resumable[key] for key in resumed if key in self._resumable])
        if lost:
            self._table.lose({pack_id_of(key) for key in lost})
            self._drop_unplaced(everything=True)
        else:
            self._drop_unplaced(everything=False)
        seen = walk(self._roots, self._held, self._excluded, lambda: self.check(call))
        if seen.unread and self._known:
            self._learn(call)
        self._held = seen.held
        jobs = cut(seen.unread, self._roots)
        contents = Contents(seen.unread, jobs, self._held, seen.started_ns)
        self._fresh.update((u.entry.root, u.entry.path) for u in seen.unread)
        self._source = Source(
            self._roots,
            seen.unread,
            self._seal,
            self._table,
            contents,
            Numbers(self._roots, seen.unread),
            self._journal,
            self._buffers,
            self._digests,
            self._encoder,
        )
        self._walk, self._pass = seen, number
        self._parts = share_out(jobs, max_parts, part_bytes)
        is_accepted = compile_excludes(accepted)
        names = [
            u.entry.path for u in seen.unread if not (is_accepted and is_accepted(u.entry.path))
        ]
        return {
            "files": sum(e.kind == FILE for e in seen.entries),
            "bytes": self._bytes(seen),
            "entries": len(seen.entries),
            "skipped": len(seen.skipped),
            "read_files": len(seen.unread),
            "read_bytes": sum(job.length for job in jobs),
            "unaccepted_count": len(names),
            "unaccepted": [_shown(name) for name in names[:SHOWN]],
            "parts": [
                {
                    "part": n,
                    "bytes": sum(job.length for job in part),
                    "packs": packs_needed(sum(job.length for job in part)),
                }
                for n, part in enumerate(self._parts)
            ],
        }

    def part(self, number: int, part: int, grants: Sequence[Grant], call: Call) -> dict[str, Any]:
        """Store one part of pass ``number``; a pass that this agent did not plan does nothing
        (the agent was started anew), and the next pass finds what is missing."""
        if number != self._pass or self._source is None or not 0 <= part < len(self._parts):
            return {"part": part, "lost": True, **_wire(PartStored())}

        def progress(report: PartStored) -> None:
            call.emit({"bytes": report.bytes, "stored_bytes": report.stored_bytes})

        report = store_part(
            self._parts[part],
            self._source,
            self.transfer(call),
            self._unused(grants),
            progress=progress,
            check=lambda: self.check(call),
        )
        return {"part": part, "lost": False, **_wire(report)}

    def packs(self) -> dict[str, Any]:
        """Every pack that the manifest will name."""
        entries, _ = self._compose()
        _, _, packs = self._table.compact(entries)
        return {
            "packs": [
                {"key": pack_key(self.workspace, p.id), "bytes": p.size, "md5": p.md5.hex()}
                for p in packs
            ]
        }

    def commit(
        self,
        snapshot: SnapshotId,
        parent: SnapshotId | None,
        created_unix: int,
        statistics: dict[str, int],
        accepted: Sequence[str],
        grant: Grant,
        call: Call,
    ) -> dict[str, Any]:
        """Write the manifest. The same snapshot again sends the same bytes again."""
        if self._committed is None or self._committed[0] != snapshot:
            self._entries, self._signatures = self._compose()
            skipped = self._walk.skipped if self._walk else []
            entries, chunks, packs = self._table.compact(self._entries)
            if not any(e.path for e in entries):
                raise WorkspaceInvalid(
                    f"workspace {self.workspace} on this machine has become empty while it was "
                    f"read ({', '.join(self._named_roots)}): no snapshot was made; is a disk "
                    "unmounted?"
                )
            files = [e for e in entries if e.kind == FILE]
            counted = {
                "files": len(files),
                "bytes": sum(e.size for e in files),
                "stored_bytes": sum(c.stored for c in chunks),
                **statistics,
            }
            manifest = Manifest(
                self.workspace,
                snapshot,
                parent,
                self.id,
                created_unix,
                machine_id(self._home),
                self._named_roots,
                entries,
                chunks,
                packs,
                skipped,
                record_environment(),
                counted,
            )
            check_manifest(manifest, f"snapshot {snapshot}")  # what a reader refuses is not written
            blob, root = encode_manifest(manifest, self._seal)
            self._entries = entries
            self._committed = (snapshot, blob, root)
        _, blob, root = self._committed
        md5 = hashlib.md5(blob, usedforsecurity=False).digest()
        self.transfer(call).put(grant, [blob], md5)
        is_accepted = compile_excludes(accepted)
        changed = [e.path for e in self._entries if e.changed]
        names = [path for path in changed if not (is_accepted and is_accepted(path))]
        files = [e for e in self._entries if e.kind == FILE]
        return {
            "root": root.hex(),
            "manifest_bytes": len(blob),
            "files": len(files),
            "bytes": sum(e.size for e in files),
            "changed_count": len(changed),
            "unaccepted_count": len(names),
            "unaccepted": [_shown(name) for name in names[:SHOWN]],
            "encoding": self._encoder.words,
        }

    def confirm(self, accepted: Sequence[str], call: Call) -> dict[str, Any]:
        """Walk once more: does the disk still equal what was committed?"""
        seen = walk(self._roots, self._held, self._excluded, lambda: self.check(call))
        committed = {(e.root, e.path): e for e in self._compose()[0]}
        changed = [u.entry.path for u in seen.unread]
        unread = {(u.entry.root, u.entry.path) for u in seen.unread}
        for entry in seen.entries:
            held = committed.pop((entry.root, entry.path), None)
            if held is not entry and held != entry and (entry.root, entry.path) not in unread:
                changed.append(entry.path)
        changed.extend(path for _, path in committed)
        is_accepted = compile_excludes(accepted)
        names = [path for path in changed if not (is_accepted and is_accepted(path))]
        return {
            "changed_count": len(changed),
            "unaccepted_count": len(names),
            "unaccepted": [_shown(name) for name in names[:SHOWN]],
        }

    def reread(self, grants: Sequence[Grant], call: Call) -> dict[str, Any]:
        """Read packs of the manifest whole; names those that are not as written."""
        _, _, packs = self._table.compact(self._compose()[0])
        sizes = {pack_key(self.workspace, p.id): p for p in packs}
        wrong = []
        for grant in grants:
            pack = sizes[grant.key]
            slices = [
                Range(at, min(CHUNK_BYTES, pack.size - at))
                for at in range(0, pack.size, CHUNK_BYTES)
            ]
            md5 = hashlib.md5(usedforsecurity=False)
            for data in self.transfer(call).get_ranges(grant, slices):
                self.check(call)
                md5.update(data)
            if md5.digest() != pack.md5:
                wrong.append(grant.key)
        return {"wrong": wrong}

    def finish(self, committed: bool) -> None:
        """Keep the index when the snapshot is known to be good, and give the workspace back."""
        if committed and self._committed is not None:
            _, blob, root = self._committed
            self.state.save_index(blob, root, self._roots, self._signatures)
            self._journal.clear()
        self.end("finished")

    def _settle_sync(self) -> None:
        """Refuse a tree that a sync has half changed; clear away what one has only prepared."""
        record = self.state.sync_record()
        if record is None:
            return
        if record.mixed:
            raise WorkspaceInvalid(
                f"workspace {self.workspace} on this machine is half of it snapshot "
                f"{record.snapshot}: a sync to that never finished. Sync to it again, which takes "
                "up where that stopped; a snapshot now would keep the half"
            )
        drop_staged(record)
        self.state.clear_sync_record()

    def _unused(self, grants: Sequence[Grant]) -> Iterator[Grant]:
        """Grants for packs that no request of this run has begun: a pack is written once, also
        when a request comes again while the first one is still at work."""
        for grant in grants:
            with self._filling:
                if grant.key in self._begun_packs:
                    continue
                self._begun_packs.add(grant.key)
            yield grant

    def _give_back(self) -> None:
        super()._give_back()
        self._buffers.drop()
        self._gpu.close()

    def _take_up(self, records: Sequence[Record]) -> None:
        for record in records:
            self._table.know(record.located, [record.pack])
        self._resumable = {}

    def _learn(self, call: Call) -> None:
        """Read the workspace's earlier manifests: what they hold is not stored again."""
        for known in self._known:
            try:
                blob = next(self.transfer(call).get_ranges(known.grant, [Range(0, known.bytes)]))
            except StoreMissing:
                continue  # deleted since the run began: what it held is stored anew
            manifest, root = decode_manifest(bytes(blob), self._seal, known.grant.key)
            if root != known.root:
                raise SnapshotDamaged(
                    f"{known.grant.key} is not the snapshot that the control side read: it was "
                    "changed in the store, where manifests are written once"
                )
            check_manifest(manifest, known.grant.key)
            self._table.know(
                (
                    Located(
                        c.name,
                        c.plain,
                        Place(manifest.packs[c.pack].id, c.encoding, c.offset, c.stored),
                    )
                    for c in manifest.chunks
                ),
                manifest.packs,
            )
        self._known = []

    def _drop_unplaced(self, *, everything: bool) -> None:
        """Forget files whose chunks never reached the store: they are read again."""
        if everything:
            paths = {(r, path) for r, held in enumerate(self._held) for path in held}
        else:
            paths = self._fresh
        for root, path in paths:
            held = self._held[root].get(path)
            if held and any(
                e.chunk >= 0 and not self._table.has_place(e.chunk) for e in held.entry.extents
            ):
                del self._held[root][path]

    def _bytes(self, seen: Walk) -> int:
        new = sum(u.signature.size for u in seen.unread)
        return new + sum(e.size for e in seen.entries if e.kind == FILE)

    def _compose(self) -> tuple[list[Entry], list[Signature | None]]:
        """The entries of the last walk with their content; what vanished since is left out."""
        if self._walk is None:
            raise AgentLost(
                f"run {self.id} has not scanned since the agent was started anew: make a pass"
            )
        if not self._walk.unread or self._source is None:
            return self._walk.entries, self._walk.signatures
        unread = {(u.entry.root, u.entry.path) for u in self._walk.unread}
        entries: list[Entry] = []
        signatures: list[Signature | None] = []
        gone = self._source.contents.gone
        for entry, signature in zip(self._walk.entries, self._walk.signatures, strict=True):
            if entry.kind == FILE and (entry.root, entry.path) in unread:
                held = self._held[entry.root].get(entry.path)
                if held is None:
                    if (entry.root, entry.path) in gone:
                        continue
                    raise AgentLost(
                        f"{_shown(entry.path)} was not read in pass {self._pass}: a part of it was "
                        "lost; make another pass"
                    )
                entries.append(held.entry)
                signatures.append(held.signature)
            elif entry.kind == HARDLINK and (entry.root, entry.target) in gone:
                continue
            else:
                entries.append(entry)
                signatures.append(signature)
        return entries, signatures


def encoding_cores() -> int:
    """How many cores may encode at once: each worker is one thread."""
    return min(WORKERS, len(os.sched_getaffinity(0)))


def _wire(report: PartStored) -> dict[str, Any]:
    return {
        "files": report.files,
        "bytes": report.bytes,
        "new_bytes": report.new_bytes,
        "stored_bytes": report.stored_bytes,
        "packs": report.packs,
        "changed_count": report.changed_count,
        "changed": report.changed,
        "seconds": {
            "read": report.seconds.read,
            "hash": report.seconds.hash,
            "encode": report.seconds.encode,
            "put": report.seconds.put,
        },
    }


def _shown(path: bytes) -> str:
    return path.decode(errors="backslashreplace")
