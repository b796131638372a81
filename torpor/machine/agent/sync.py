"""The agent's half of a sync: look, stage, fetch what is missing, change the tree, check.

Until ``finish`` nothing existing on the disk changes, and a later run finds what a killed run has
staged. From then on the tree mixes two snapshots. The record in the workspace's state says so until
the check finds the tree whole; until then no other run may use the tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.agent.manifests import read_wanted
from torpor.machine.agent.restore import checked, restore_parts, shown
from torpor.machine.agent.runs import AgentRun, seal_of
from torpor.machine.agent.state import Index, SyncRecord
from torpor.machine.pipeline.download import FetchPlan, restore_part
from torpor.machine.tree.apply import TreeChanger
from torpor.machine.tree.changes import Staged, leave_out, plan_changes
from torpor.machine.tree.compare import compare_tree
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.staging import TOKEN_BYTES, Staging, staged_names
from torpor.machine.tree.survey import OTHER, Name, Saved, Survey, survey
from torpor.machine.tree.walk import (
    Signature,
    absolute_root,
    compile_excludes,
    sync_disk,
    walk,
)
from torpor.shared.errors import (
    DiskFull,
    InvalidInput,
    StillChanging,
    UnsavedWork,
    WorkspaceInvalid,
)
from torpor.shared.format.manifest import FILE, HOLE, Entry, Extent, Manifest
from torpor.shared.values import MIB, SnapshotId, WorkspaceName
from torpor.shared.wire.request import Event
from torpor.shared.wire.restore import Checked, RestoredPart
from torpor.shared.wire.sync import (
    BeginSync,
    Changed,
    CheckSync,
    FinishSync,
    Intent,
    StageSync,
    SyncPart,
    SyncPlan,
)

SHOWN: Final = 20
"""The most names in a result or an error. Counts are always complete."""
_SPARE_BYTES: Final = 64 * MIB
"""Bytes left free beyond the content: for directories, metadata, the agent's own files."""

Place = tuple[int, bytes]


class SyncRun(AgentRun):
    """A run that makes an existing tree equal to a snapshot."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._begun: Intent | None = None
        self._planned: SyncPlan | None = None
        self._finished: Changed | None = None
        self._changing = False  # from the first change of the directories on
        self._done: set[int] = set()
        self._before: SyncRecord | None = None
        self._last: SnapshotId | None = None
        self._target: Saved

    def begin(self, request: BeginSync, call: Call) -> Intent:
        """Look at the disk and plan the sync; writes nothing. Once a run.

        Raises UnsavedWork, naming what would be lost, unless ``discard_local``.
        """
        discard_local = request.discard_local
        if self._begun is not None:
            return self._begun
        if self.state.restore_journal.exists():
            raise WorkspaceInvalid(
                f"workspace {self.workspace} is only half restored on this machine: a wake never "
                "finished. Wake it here again, which continues it, then sync"
            )
        self._seal = seal_of(request.key)
        transfer = self.transfer(call)
        self._blob, self._root, self._manifest = read_wanted(request, self._seal, transfer)
        self._targets = _resolved(self._manifest.roots)
        before = self.state.sync_record()
        mine = before is not None and (before.target, before.roots) == (self._root, self._targets)
        if before is not None and before.mixed and not mine and not discard_local:
            raise WorkspaceInvalid(
                f"workspace {self.workspace} on this machine holds only half of snapshot "
                f"{before.snapshot}: a sync to that snapshot never finished. Sync to it again "
                "first, which continues it; or accept the loss with `discard_local`"
            )
        self._before = before
        resumed = before is not None and mine and before.mixed
        found = self._look(request.exclude, request.stored, resumed, call)
        kept = set(found.unsaved) if resumed and not discard_local else set()
        lost = [] if resumed else found.unsaved + found.removed
        if lost and not discard_local:
            raise UnsavedWork(self._refusal(lost, found))
        self._names = _without(found.names, kept)
        entries = self._target.entries
        if kept:
            entries = leave_out(entries, lambda root, path: (root, path) in kept)
            self._target = Saved(entries, self._manifest.chunks)
        mine_staged = before.staged if before is not None and mine else []
        self._changes = plan_changes(
            self._target,
            self._names,
            self._targets,
            {(root, path): holder for root, path, holder in mine_staged},
            owners=os.geteuid() == 0,
        )
        in_the_way = [name.entry for _, _, name in self._changes.removed if name.kind == OTHER]
        if in_the_way and not discard_local:
            raise UnsavedWork(
                f"{_shown([e.path for e in in_the_way])}: FIFOs, sockets or devices on the machine "
                f"stand where snapshot {request.snapshot} has something else, and no snapshot "
                "keeps them. Nothing was changed: move them away, or accept the loss with "
                "`discard_local`"
            )
        self._check_space({(root, path) for root, path, _ in mine_staged})
        staged = self._changes.staged
        self._token = before.token if before is not None and mine else os.urandom(TOKEN_BYTES)
        self._record = SyncRecord(
            self._token,
            request.snapshot,
            self._root,
            self._targets,
            before is not None and before.mixed,
            sorted({*mine_staged, *((s.entry.root, s.entry.path, s.holder) for s in staged)}),
        )
        self._begun = Intent(
            last=self._last,
            roots=[os.fsdecode(target) for target in self._targets],
            files=sum(e.kind == FILE for e in entries),
            bytes=sum(e.size for e in entries),
            left_out=len(self._manifest.entries) - len(entries),
            staged=len(staged),
            removed_count=len(self._changes.removed),
            kept=[_name(path) for _, path in sorted(kept)[:SHOWN]],
            discarded=[_name(path) for _, path in lost[:SHOWN]],
            discarded_count=len(lost),
        )
        return self._begun

    def stage(self, request: StageSync, call: Call) -> SyncPlan:
        """Make the new files beside the tree, from what stands here already, and plan what has to
        be fetched. Once a run."""
        if self._planned is not None:
            return self._planned
        self._directories = Directories(self._targets, "and sync again")
        self._staging = Staging(self._token, self._directories)
        self.state.keep_sync_record(self._record)
        if self._before is not None and self._before.token != self._token:
            _remove_staged(self._before, self._directories)
        staged = self._staging.prepare(self._changes.staged, self._manifest.chunks, self._seal)
        self._changes = self._changes._replace(staged=staged)
        self._staging.copy(staged, lambda size: call.emit(Event(size)), lambda: self.check(call))
        self._plan = FetchPlan(self._lacking(staged), request.max_parts, set())
        parts = restore_parts(self.workspace, self._plan)
        self._planned = SyncPlan(
            copied_bytes=sum(copy.length for s in staged for copy in s.copies),
            stored_bytes=sum(part.stored_bytes for part in parts),
            parts=parts,
        )
        return self._planned

    def part(self, request: SyncPart, call: Call) -> RestoredPart:
        """Fetch, check and stage what the granted packs hold and the disk does not."""
        report = restore_part(
            self._plan,
            self._seal,
            self.transfer(call),
            request.packs,
            self._staging,
            None,
            self._done,
            progress=lambda report: call.emit(Event(report.bytes)),
            check=lambda: self.check(call),
        )
        return RestoredPart(report.stored_bytes)

    def finish(self, request: FinishSync, call: Call) -> Changed:
        """Read back every staged file, then change the tree. Once a run."""
        return self._finish(call)

    def _finish(self, call: Call) -> Changed:
        if self._finished is not None:
            return self._finished
        if self._changing:
            raise WorkspaceInvalid(
                f"run {self.id} was stopped while it changed the directories, which now hold only "
                f"half of snapshot {self._record.snapshot}: sync to that snapshot again, which "
                "continues it"
            )
        missing = [n for n, uses in enumerate(self._plan.uses) if uses and n not in self._done]
        if missing:
            raise InvalidInput(
                f"run {self.id} still lacks {len(missing)} chunks: sync all parts before finish"
            )
        wrong = self._staging.verify(
            self._changes.staged,
            self._manifest.chunks,
            self._seal,
            lambda size: call.emit(Event(size)),
            lambda: self.check(call),
        )
        if wrong:
            raise StillChanging(
                f"{_shown(wrong)}: not what the snapshot has after it was made from files on the "
                "machine, which changed meanwhile. Nothing was changed: sync again"
            )
        for target in self._targets:
            sync_disk(target)  # a power cut must not leave empty files under new names
        self._record = msgspec.structs.replace(self._record, mixed=True)
        self.state.keep_sync_record(self._record)
        self._changing = True
        self._changer = TreeChanger(self._names, self._directories, self._staging)
        self._changer.apply(
            self._changes, self._target.entries, self._record.staged, lambda: self.check(call)
        )
        self._finished = Changed(shown(self._warnings()))
        return self._finished

    def compare(self, request: CheckSync, call: Call) -> Checked:
        """Compare what was changed with the snapshot; with ``full`` everything, every byte."""
        self._finish(call)
        full = request.full
        untouched = {} if full else self._changes.untouched
        entries = self._target.entries
        looked = [n for n in range(len(entries)) if n not in untouched]
        result = compare_tree(
            [entries[n] for n in looked],
            self._manifest.chunks,
            self._targets,
            self._seal,
            full=full,
            owners=os.geteuid() == 0,
            refused_xattrs=self._changer.refused_xattrs,
            progress=lambda size: call.emit(Event(size)),
            check=lambda: self.check(call),
        )
        if not result.differences:
            signatures = dict(zip(looked, result.signatures, strict=True)) | self._changes.untouched
            self._complete(signatures)
        return checked(result)

    def _look(
        self, exclude: Sequence[str], stored: Sequence[SnapshotId], resumed: bool, call: Call
    ) -> Survey:
        excluded = self._excluded(exclude)
        index = self.state.load_index(self._targets, self._seal, None)
        self._last = None if index is None else index.manifest.snapshot
        last, held = _last(index, len(self._targets), excluded)
        self._target = _saved(self._manifest, excluded)
        for target in self._targets:
            os.makedirs(target, mode=0o755, exist_ok=True)
        seen = walk(self._targets, held, excluded, lambda: self.check(call))
        return survey(
            seen,
            held,
            last,
            self._target,
            self._targets,
            self._seal,
            last_is_stored=self._last in stored,
            owners=os.geteuid() == 0,
            strict=not resumed,
            check=lambda: self.check(call),
        )

    def _excluded(self, exclude: Sequence[str]) -> Callable[[bytes], bool] | None:
        """What the user excludes, and what a killed run has staged."""
        by_user = compile_excludes(exclude)
        if self._before is None or not self._before.token:
            return by_user
        staged = staged_names(self._before.token)
        return staged if by_user is None else lambda path: staged(path) or by_user(path)

    def _lacking(self, staged: Sequence[Staged]) -> Manifest:
        """The snapshot with holes in place of everything that need not be fetched."""
        missing = {file.number: set(file.missing) for file in staged}
        entries = [
            msgspec.structs.replace(entry, extents=_with_holes(entry, missing.get(number, set())))
            if entry.extents
            else entry
            for number, entry in enumerate(self._target.entries)
        ]
        return msgspec.structs.replace(self._manifest, entries=entries)

    def _refusal(self, lost: Sequence[Place], found: Survey) -> str:
        there = {*found.unsaved}
        words = [f"{_name(path)}{'' if (r, path) in there else ' (removed)'}" for r, path in lost]
        more = len(words) - SHOWN
        held = f"snapshot {self._last}, which it last held" if self._last else "any snapshot"
        return (
            f"{len(lost)} names on the machine are not as in {held}: {', '.join(words[:SHOWN])}"
            f"{f' and {more} more' if more > 0 else ''}. Nothing was changed: save them with "
            "`save_first`, or accept their loss with `discard_local`"
        )

    def _check_space(self, staged: set[Place]) -> None:
        """Raise DiskFull unless the new files fit beside the old ones."""
        needed: dict[int, tuple[int, int]] = {}
        for file in self._changes.staged:
            entry = file.entry
            if (entry.root, entry.path) not in staged:
                target = self._targets[entry.root]
                device = os.stat(target).st_dev
                size = sum(
                    extent.length
                    for number, extent in enumerate(entry.extents)
                    if extent.chunk != HOLE and (file.patches is None or number in file.patches)
                )
                needed[device] = (needed.get(device, (0, 0))[0] + size, entry.root)
        for size, root in needed.values():
            st = os.statvfs(self._targets[root])
            free = st.f_bavail * st.f_frsize
            if size + _SPARE_BYTES > free:
                raise DiskFull(
                    f"{os.fsdecode(self._targets[root])} has {free:,} bytes free, and the files "
                    f"that change need {size:,} beside the old ones: make room, then sync again; "
                    "nothing was changed"
                )

    def _warnings(self) -> list[str]:
        kept = self._changer.kept
        stay = [f"{path!r} stays: it holds something that is excluded or new" for path in kept]
        return self._changer.warnings + stay

    def _complete(self, signatures: dict[int, Signature | None]) -> None:
        """The tree equals the snapshot: keep its index, and forget the sync."""
        by_place = {(e.root, e.path): n for n, e in enumerate(self._target.entries)}
        touched = {(e.root, e.path) for e, _ in self._changes.touched}  # and read again next time
        kept: list[Signature | None] = []
        for entry in self._manifest.entries:
            number = by_place.get((entry.root, entry.path), -1)
            is_same = number >= 0 and self._target.entries[number] is entry
            is_safe = is_same and (entry.root, entry.path) not in touched
            kept.append(signatures.get(number) if is_safe else None)
        for target in self._targets:
            sync_disk(target)
        self.state.save_index(self._blob, self._root, self._targets, kept)
        self.state.clear_sync_record()


def drop_staged(record: SyncRecord) -> None:
    """Remove the files that a sync staged beside the tree before it changed anything."""
    _remove_staged(record, Directories(record.roots, "and try again"))


def _remove_staged(record: SyncRecord, directories: Directories) -> None:
    staging = Staging(record.token, directories)
    try:
        for root, path, holder in record.staged:
            staging.remove(root, path, holder)
    finally:
        directories.close()


def _resolved(roots: Sequence[str]) -> list[bytes]:
    """Where a snapshot's directories are on this machine; as a snapshot of them resolves them."""
    resolved = [os.path.realpath(os.fsencode(absolute_root(root))) for root in roots]
    home = os.path.realpath(os.fsencode(os.path.expanduser("~")))
    for root, path in zip(roots, resolved, strict=True):
        if path in (b"/", home):
            raise WorkspaceInvalid(
                f"workspace path {root} is {os.fsdecode(path)}: name a directory inside it"
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise WorkspaceInvalid(
                f"workspace path {root} ({os.fsdecode(path)}) is a file on the machine: move it "
                "away"
            )
    return resolved


def _last(
    index: Index | None, count: int, excluded: Callable[[bytes], bool] | None
) -> tuple[Saved | None, Any]:
    if index is None:
        return None, [{} for _ in range(count)]
    return _saved(index.manifest, excluded), index.held


def _saved(manifest: Manifest, excluded: Callable[[bytes], bool] | None) -> Saved:
    entries = manifest.entries
    if excluded is not None:
        entries = leave_out(entries, lambda _, path: excluded(path))
    return Saved(entries, manifest.chunks)


def _without(names: Sequence[dict[bytes, Name]], kept: set[Place]) -> list[dict[bytes, Name]]:
    return [
        {path: name for path, name in there.items() if (root, path) not in kept}
        for root, there in enumerate(names)
    ]


def _with_holes(entry: Entry, missing: set[int]) -> tuple[Extent, ...]:
    return tuple(
        extent if number in missing else Extent(HOLE, 0, extent.length)
        for number, extent in enumerate(entry.extents)
    )


def _name(path: bytes) -> str:
    return path.decode(errors="backslashreplace") or "the directory itself"


def _shown(paths: Sequence[bytes]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(map(_name, paths[:SHOWN])) + (f" and {more} more" if more > 0 else "")
