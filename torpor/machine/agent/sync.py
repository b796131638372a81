"""The agent's half of a sync: look, stage, fetch what is missing, change the tree, check.

Until ``finish`` nothing existing on the disk changes, and a later run finds what a killed run has
staged. From then on the tree mixes two snapshots. The record in the workspace's state says so until
the check finds the tree whole; until then no other run may use the tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import (
    SHOWN,
    Goal,
    check_space,
    checked,
    first_few,
    restore_parts,
    shown,
)
from torpor.machine.agent.manifests import Wanted, read_wanted
from torpor.machine.agent.runs import AgentRun, seal_of
from torpor.machine.agent.state import SyncRecord
from torpor.machine.pipeline.download import FetchPlan, restore_part
from torpor.machine.tree.abilities import FilesystemAbilities
from torpor.machine.tree.apply import TreeChanger
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.changes import Changes, Staged, going, leave_out, plan_changes, touching
from torpor.machine.tree.directories import Directories
from torpor.machine.tree.flags import forbidding
from torpor.machine.tree.mappings import sync_disk
from torpor.machine.tree.names import Names, Signature, packed_signatures
from torpor.machine.tree.staging import TOKEN_BYTES, Staging, staged_names
from torpor.machine.tree.survey import OTHER, Name, Saved, Survey, survey
from torpor.machine.tree.walk import (
    absolute_root,
    compile_excludes,
    overlapping,
    walk,
)
from torpor.machine.tree.writers import written
from torpor.shared.errors import AgentLost, StillChanging, UnsavedWork, WorkspaceInvalid
from torpor.shared.format.lineage import lineage_of
from torpor.shared.format.manifest import HOLE, Entry, EntryId, Extent, Manifest
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor.shared.wire.request import Nothing
from torpor.shared.wire.restore import Checked
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

Excluded = Callable[[bytes], bool] | None


class _Begun(NamedTuple):
    """What a look at the disk found, and the changes that make it the snapshot."""

    answer: Intent
    wanted: Wanted
    goal: Goal  # the snapshot without what is excluded or kept
    names: list[dict[bytes, Name]]
    changes: Changes
    record: SyncRecord
    before: SyncRecord | None  # of an earlier run that never ended
    discard_local: bool


class _Staged(NamedTuple):
    """New files, made beside the tree as far as the machine has their content."""

    answer: SyncPlan
    files: list[Staged]
    directories: Directories
    staging: Staging
    plan: FetchPlan
    abilities: list[FilesystemAbilities]


class _Changed(NamedTuple):
    """The tree, in which every name has changed."""

    answer: Changed
    attributes: Attributes


class SyncRun(AgentRun):
    """A run that makes an existing tree equal to a snapshot: begun, staged, fetched in parts,
    changed, compared."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._begun: _Begun | None = None
        self._staged: _Staged | None = None
        self._changing = False  # from the first change of the directories on
        self._changed: _Changed | None = None

    def begin(self, request: BeginSync, call: Call) -> Intent:
        """Look at the disk and plan the sync; writes nothing. Once a run.

        Raises UnsavedWork, naming what would be lost, unless ``discard_local``.
        """
        if self._begun is None:
            self._begun = self._begin(request, call)
        return self._begun.answer

    def stage(self, request: StageSync, call: Call) -> SyncPlan:
        """Make the new files beside the tree, from what stands here already, and plan what has to
        be fetched. Once a run."""
        if self._staged is None:
            self._staged = self._stage(self._has_begun(), request.max_parts, call)
        return self._staged.answer

    def part(self, request: SyncPart, call: Call) -> Nothing:
        """Fetch, check and stage what the granted packs hold and the disk does not."""
        staged = self._has_staged()
        restore_part(
            staged.plan,
            self._has_begun().goal.seal,
            self.transfer(call),
            request.packs,
            staged.staging,
            None,
            progress=call.moved,
            check=partial(self.check, call),
        )
        return Nothing()

    def finish(self, request: FinishSync, call: Call) -> Changed:
        """Read back every staged file, then change the tree. Once a run."""
        return self._finish(call).answer

    def compare(self, request: CheckSync, call: Call) -> Checked:
        """Compare what was changed with the snapshot; with ``full`` everything, every byte."""
        begun, changed = self._has_begun(), self._finish(call)
        untouched = {} if request.full else begun.changes.untouched
        entries = begun.goal.manifest.entries
        looked = [number for number in range(len(entries)) if number not in untouched]
        compared = begun.goal.of([entries[number] for number in looked]).compare(
            call,
            partial(self.check, call),
            full=request.full,
            attributes=changed.attributes,
        )
        if not compared.differences:
            signatures = dict(zip(looked, compared.signatures, strict=True))
            self._complete(begun, signatures | begun.changes.untouched)
        return checked(compared)

    def _begin(self, request: BeginSync, call: Call) -> _Begun:
        discard_local = request.discard_local
        self.state.check_not_half_restored(", then sync")
        seal = seal_of(request.key)
        wanted = read_wanted(request, seal, self.transfer(call))
        targets = _resolved(wanted.manifest.roots)
        before = self.state.sync_record()
        mine = None if before is None or not before.is_of(wanted.root, targets) else before
        if before is not None and before.mixed and mine is None and not discard_local:
            raise self.state.half_synced(
                before, " first, which continues it; or accept the loss with `discard_local`"
            )
        resumed = mine is not None and mine.mixed
        excluded = _excluded(request.exclude, before)
        target = _saved(wanted.manifest, excluded)
        goal = Goal(wanted.manifest, targets, seal)
        last, found = self._look(goal, target, request, excluded, resumed, call)
        kept = set(found.unsaved) if resumed and not discard_local else set()
        lost = [] if resumed else found.unsaved + found.removed
        if lost and not discard_local:
            raise UnsavedWork(_refusal(lost, found, last))
        if kept:
            entries = leave_out(target.entries, lambda root, path: (root, path) in kept)
            target = Saved(entries, target.chunks)
        goal = goal.of(target.entries)
        names = [
            {path: name for path, name in there.items() if (root, path) not in kept}
            for root, there in enumerate(found.names)
        ]
        staged_before = [] if mine is None else mine.staged
        changes = plan_changes(
            target,
            names,
            targets,
            {(root, path): holder for root, path, holder in staged_before},
            owners=os.geteuid() == 0,
        )
        programs = _programs(changes, names, targets)
        if not discard_local:
            _check_nothing_in_the_way(changes, request.snapshot)
            _check_not_written(programs, before)
        _check_no_flags(touching(changes, names), targets, before)
        lost = [*dict.fromkeys([*lost, *programs])]
        _check_space(goal, changes, {(root, path) for root, path, _ in staged_before})
        record = SyncRecord(
            os.urandom(TOKEN_BYTES) if mine is None else mine.token,
            request.snapshot,
            wanted.root,
            targets,
            before is not None and before.mixed,
            sorted({*staged_before, *(_staged_name(file) for file in changes.staged)}),
        )
        files, size = goal.totals
        answer = Intent(
            last=last,
            roots=[os.fsdecode(target) for target in targets],
            files=files,
            bytes=size,
            left_out=len(wanted.manifest.entries) - len(goal.manifest.entries),
            staged=len(changes.staged),
            removed_count=len(changes.removed),
            kept=[_name(path) for _, path in sorted(kept)[:SHOWN]],
            discarded=[_name(path) for _, path in lost[:SHOWN]],
            discarded_count=len(lost),
        )
        return _Begun(answer, wanted, goal, names, changes, record, before, discard_local)

    def _look(
        self,
        goal: Goal,
        target: Saved,
        request: BeginSync,
        excluded: Excluded,
        resumed: bool,
        call: Call,
    ) -> tuple[SnapshotId | None, Survey]:
        """The snapshot that this machine held last, and what is on the disk."""
        index = self.state.load_index(goal.targets, goal.seal, None)
        last = None if index is None else index.manifest.snapshot
        held = Names(len(goal.targets)) if index is None else index.held
        for folder in goal.targets:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        check = partial(self.check, call)
        return last, survey(
            walk(goal.targets, held, excluded, check),
            None if index is None else _saved(index.manifest, excluded),
            target,
            goal.targets,
            goal.seal,
            last_is_stored=last in request.stored,
            owners=os.geteuid() == 0,
            strict=not resumed,
            check=check,
        )

    def _stage(self, begun: _Begun, max_parts: int, call: Call) -> _Staged:
        able = begun.goal.abilities(self.state.probe_note)
        directories = Directories(begun.goal.targets, "and sync again")
        staging = Staging(begun.record.token, directories)
        self.state.keep_sync_record(begun.record)
        if begun.before is not None and begun.before.token != begun.record.token:
            _remove_staged(begun.before, directories)
        chunks = begun.goal.manifest.chunks
        files = staging.prepare(begun.changes.staged, chunks, begun.goal.seal)
        staging.copy(files, call.moved, partial(self.check, call))
        plan = FetchPlan(_lacking(begun.goal.manifest, files), max_parts, set())
        parts = restore_parts(self.workspace, plan)
        answer = SyncPlan(
            copied_bytes=sum(copy.length for file in files for copy in file.copies),
            stored_bytes=sum(part.stored_bytes for part in parts),
            parts=parts,
        )
        return _Staged(answer, files, directories, staging, plan, able)

    def _finish(self, call: Call) -> _Changed:
        if self._changed is None:
            self._changed = self._change(self._has_begun(), self._has_staged(), call)
        return self._changed

    def _change(self, begun: _Begun, staged: _Staged, call: Call) -> _Changed:
        if self._changing:
            raise WorkspaceInvalid(
                f"run {self.id} was stopped while it changed the directories, which now hold only "
                f"half of snapshot {begun.record.snapshot}: sync to that snapshot again, which "
                "continues it"
            )
        staged.plan.check_fetched(f"run {self.id}", "sync all parts before finish")
        goal, check = begun.goal, partial(self.check, call)
        wrong = staged.staging.verify(
            staged.files, goal.manifest.chunks, goal.seal, call.moved, check
        )
        if wrong:
            raise StillChanging(
                f"{_shown(wrong)}: the files on the machine from which they were made changed "
                "meanwhile. sync changed nothing: sync again"
            )
        for target in goal.targets:
            sync_disk(target)  # a power cut must not leave empty files under new names
        self.state.keep_sync_record(msgspec.structs.replace(begun.record, mixed=True))
        self._changing = True
        changer = TreeChanger(
            begun.names,
            staged.directories,
            staged.staging,
            written_too=begun.discard_local,
            abilities=staged.abilities,
        )
        changes = begun.changes._replace(staged=staged.files)
        changer.apply(changes, goal.manifest.entries, begun.record.staged, check)
        words = "stays: it holds something that is excluded or new"
        warnings = changer.attributes.noted() + [f"{path!r} {words}" for path in changer.kept]
        changer.attributes.unchanged = {
            (root, path): name.settled
            for root, there in enumerate(begun.names)
            for path, name in there.items()
            if name.is_held and name.settled is not None
        }
        return _Changed(Changed(first_few(warnings)), changer.attributes)

    def _complete(self, begun: _Begun, signatures: dict[int, Signature | None]) -> None:
        """The tree equals the snapshot: keep its index, and forget the sync."""
        entries = begun.goal.manifest.entries
        by_place = {(e.root, e.path): n for n, e in enumerate(entries)}
        touched = {(e.root, e.path) for e, _ in begun.changes.touched}  # and read again next time
        kept: list[Signature | None] = []
        for entry in begun.wanted.manifest.entries:
            number = by_place.get((entry.root, entry.path), -1)
            is_same = number >= 0 and entries[number] == entry
            is_safe = is_same and (entry.root, entry.path) not in touched
            kept.append(signatures.get(number) if is_safe else None)
        for target in begun.goal.targets:
            sync_disk(target)
        blob, root, manifest = begun.wanted
        line = lineage_of(manifest)
        self.state.save_index(blob, root, begun.goal.targets, packed_signatures(kept), line=line)
        self.state.clear_sync_record()

    def _has_begun(self) -> _Begun:
        if self._begun is None:
            raise AgentLost(f"run {self.id} has not begun: begin it first")
        return self._begun

    def _has_staged(self) -> _Staged:
        if self._staged is None:
            raise AgentLost(f"run {self.id} has not staged the new files: stage them first")
        return self._staged


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
    if pair := overlapping(resolved):
        raise WorkspaceInvalid(
            f"workspace paths {pair} overlap on the machine: name separate directories in the "
            "workspace block. Nothing was changed"
        )
    return resolved


def _saved(manifest: Manifest, excluded: Excluded) -> Saved:
    entries = manifest.entries
    if excluded is not None:
        entries = leave_out(entries, lambda _, path: excluded(path))
    return Saved(entries, manifest.chunks)


def _excluded(exclude: Sequence[str], before: SyncRecord | None) -> Excluded:
    """What the user excludes, and what a run that was killed has staged."""
    by_user = compile_excludes(exclude)
    if before is None or not before.token:
        return by_user
    staged = staged_names(before.token)
    return staged if by_user is None else lambda path: staged(path) or by_user(path)


def _refusal(lost: Sequence[EntryId], found: Survey, last: SnapshotId | None) -> str:
    there = {*found.unsaved}
    words = [f"{_name(path)}{'' if (r, path) in there else ' (removed)'}" for r, path in lost]
    held = f"snapshot {last}, which it last held" if last else "any snapshot"
    return (
        f"{len(lost)} names on the machine are not as in {held}: {', '.join(first_few(words))}. "
        "Nothing was changed: save them with `save_first`, or accept their loss with "
        "`discard_local`"
    )


def _check_nothing_in_the_way(changes: Changes, snapshot: SnapshotId) -> None:
    paths = [name.entry.path for _, _, name in changes.removed if name.kind == OTHER]
    if paths:
        raise UnsavedWork(
            f"{_shown(paths)}: FIFOs, sockets or devices on the machine stand where snapshot "
            f"{snapshot} has something else, and no snapshot keeps them. Nothing was changed: move "
            "them away, or accept the loss with `discard_local`"
        )


def _programs(
    changes: Changes, names: Sequence[dict[bytes, Name]], targets: Sequence[bytes]
) -> dict[EntryId, str]:
    """The files that go while a program has them open for writing, and which program."""
    full = {os.path.join(targets[root], path): (root, path) for root, path in going(changes, names)}
    return {full[path]: who for path, who in written(list(full)).items()}


def _check_not_written(programs: Mapping[EntryId, str], before: SyncRecord | None) -> None:
    if not programs:
        return
    words = [f"{_name(path)} ({who})" for (_, path), who in programs.items()]
    is_half = before is not None and before.mixed
    raise UnsavedWork(
        "programs on the machine have files open for writing that the sync would replace or "
        f"remove: {', '.join(first_few(words))}. What they write from then on would be in no file. "
        f"{'An earlier run has changed a part already' if is_half else 'Nothing was changed'}: "
        "stop these programs and sync again, or accept the loss with `discard_local`"
    )


def _check_no_flags(
    places: Sequence[EntryId], targets: Sequence[bytes], before: SyncRecord | None
) -> None:
    """Refuse, before anything changes, what the kernel would refuse in the middle."""
    flags = {
        (root, path): forbidding(os.path.join(targets[root], path) if path else targets[root])
        for root, path in places
    }
    words = [f"{_name(path)} (chattr {flag})" for (_, path), flag in flags.items() if flag]
    if not words:
        return
    is_half = before is not None and before.mixed
    raise WorkspaceInvalid(
        "files on the machine that the sync would change have a flag that forbids it, also to "
        f"root: {', '.join(first_few(words))}. "
        f"{'An earlier run has changed a part already' if is_half else 'Nothing was changed'}: "
        "take the flags away (chattr -i -a), and sync again"
    )


def _check_space(goal: Goal, changes: Changes, staged_before: set[EntryId]) -> None:
    """Raise DiskFull unless the new files fit beside the old ones."""
    needed: dict[bytes, int] = {}
    for file in changes.staged:
        entry = file.entry
        if (entry.root, entry.path) not in staged_before:
            target = goal.targets[entry.root]
            needed[target] = needed.get(target, 0) + sum(
                extent.length
                for number, extent in enumerate(entry.extents)
                if extent.chunk != HOLE and (file.patches is None or number in file.patches)
            )
    check_space(
        needed, "the sync, beside the old files,", "make room, then sync again; nothing was changed"
    )


def _lacking(manifest: Manifest, files: Sequence[Staged]) -> Manifest:
    """The snapshot with holes in place of everything that need not be fetched."""
    missing = {file.number: set(file.missing) for file in files}
    entries = [
        msgspec.structs.replace(entry, extents=_with_holes(entry, missing.get(number, set())))
        if entry.extents
        else entry
        for number, entry in enumerate(manifest.entries)
    ]
    return msgspec.structs.replace(manifest, entries=entries)


def _staged_name(file: Staged) -> tuple[int, bytes, bytes]:
    return file.entry.root, file.entry.path, file.holder


def _with_holes(entry: Entry, missing: set[int]) -> tuple[Extent, ...]:
    return tuple(
        extent if number in missing else Extent(HOLE, 0, extent.length)
        for number, extent in enumerate(entry.extents)
    )


def _name(path: bytes) -> str:
    return shown(path) or "the directory itself"


def _shown(paths: Sequence[bytes]) -> str:
    return ", ".join(first_few([_name(path) for path in paths]))
