"""The agent's half of a restore: plan, parts, attributes, check."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import (
    SPARE_BYTES,
    Goal,
    check_space,
    checked,
    first_few,
    restore_parts,
)
from torpor.machine.agent.in_use import InUse
from torpor.machine.agent.manifests import Wanted, read_wanted
from torpor.machine.agent.packages import note_wanted, put_back, this_system
from torpor.machine.agent.passing import Passing, PeerFirst
from torpor.machine.agent.runs import AgentRun, seal_of
from torpor.machine.agent.state import Use
from torpor.machine.agent.writing import Writing
from torpor.machine.pipeline.download import (
    FetchPlan,
    Lot,
    RestoreJournal,
    restore_part,
)
from torpor.machine.tree.abilities import FilesystemAbilities
from torpor.machine.tree.absence import is_there
from torpor.machine.tree.compare import Comparison
from torpor.machine.tree.first import NO_FIRST, First, find_first, find_used
from torpor.machine.tree.walk import absolute_root, is_inside, overlapping
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import AgentLost, InvalidInput, RestoreUnfinished
from torpor.shared.format.file_use import recorded_use
from torpor.shared.format.lineage import lineage_of
from torpor.shared.format.manifest import HARDLINK, content_bytes, described
from torpor.shared.format.names import pack_id_of
from torpor.shared.format.packages import packages_in
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor.shared.wire.packages import PackagesBack, PutPackagesBack
from torpor.shared.wire.restore import (
    BeginPath,
    BeginRestore,
    Checked,
    CheckRestore,
    FetchPart,
    Finished,
    FinishFirst,
    FinishRestore,
    RestoredPart,
    RestorePlan,
    Served,
    ServePacks,
)

_POLL_S: Final = 0.2
_STAGE: Final = b".torpor-"
"""The prefix of a directory in each target in which files wait for their names, where something
comes first."""


class Begun(NamedTuple):
    """What was found when the run began. Without ``writing``, an earlier run has restored and
    compared everything, and nothing is written, because the user may have worked here since."""

    answer: RestorePlan
    wanted: Wanted
    goal: Goal
    writing: Writing | None


class RestoreRun(AgentRun):
    """A run that writes one snapshot to this machine: begun, fetched, finished, compared."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._passing = Passing(self.state.folder)
        self._gpu: GpuTrial | None = None
        self._begun: Begun | None = None
        self._finished: Finished | None = None
        self._first = _First()

    def begin(self, request: BeginRestore, call: Call) -> RestorePlan:
        """Read and check the manifest, check the targets, plan what to fetch. Once a run.

        ``resume``: go on with a restore that another run or agent began; that restore may be
        complete.
        """
        if self._begun is None:
            self._begun = self._begin(request, call)
        return self._begun.answer

    def serve(self, request: ServePacks, call: Call) -> Served:
        """Keep what is fetched from now on, in the room that the restore leaves, and pass it on to
        other machines. Once a run."""
        begun = self._has_begun()
        lacking = 0 if begun.writing is None else sum(_lacking(begun.goal, begun.writing.plan))
        room = shutil.disk_usage(self.state.folder).free - lacking - SPARE_BYTES
        server = self._passing.serve(request.host, max(0, min(request.most_bytes, room)))
        return Served(server.port, server.token, server.certificate)

    def part(self, request: FetchPart, call: Call) -> RestoredPart:
        """Fetch, check and write what the granted packs hold and the disk does not. A part is
        defined by its grants, because part numbers change when a restarted agent plans again."""
        begun = self._has_begun()
        if begun.writing is None:
            return RestoredPart(0)
        writing, plan = begun.writing, begun.writing.plan
        fetcher = PeerFirst(
            self.transfer(call), request.peer, self._passing, lambda: call.cancelled() or self.ended
        )
        with self._first.fetching(bool(request.pieces)):
            stored_bytes = restore_part(
                plan,
                begun.goal.seal,
                fetcher,
                request.packs,
                writing.writer,
                writing.journal,
                pieces=request.pieces,
                progress=call.moved,
                check=partial(self.check, call),
                keep=self._passing.keep,
                gpu=self._gpu,
            )
        chunks = begun.goal.manifest.chunks
        packs = [pack_id_of(grant.key) for grant in request.packs]
        lots = [Lot(*lot) for lot in zip(packs, request.pieces or [0] * len(packs), strict=True)]
        kept = all(
            self._passing.holds(lot.pack, [chunks[n].offset for n in plan.chunks_of(*lot)])
            for lot in lots
        )
        return RestoredPart(stored_bytes, fetcher.peer_bytes, kept)

    def first(self, request: FinishFirst, call: Call) -> Checked:
        """Finish what comes first, while the rest is fetched. From then on it may be used."""
        begun = self._has_begun()
        if begun.writing is None:
            return Checked([], 0)
        check = partial(self.check, call)
        with self._first.finishing(check):
            if self._finished is not None:
                return Checked([], 0)
            then = "restore the parts that come first before they are finished"
            begun.writing.plan.check_fetched(f"run {self.id}", then, first=True)
            return checked(begun.writing.finish_first(call, check))

    def finish(self, request: FinishRestore, call: Call) -> Finished:
        """Set attributes, links and directories; every chunk must be there. Once a run."""
        if self._finished is None:
            self._finished = self._finish(self._has_begun())
        return self._finished

    def compare(self, request: CheckRestore, call: Call) -> Checked:
        """Compare the disk with the manifest; with ``full`` every byte is read and hashed."""
        begun = self._has_begun()
        # a restarted agent has set every mode to writable again
        self.finish(FinishRestore(self.id), call)
        if begun.writing is None:
            return Checked([], 0)
        compared, changed = begun.writing.compare(
            call, partial(self.check, call), full=request.full
        )
        self._compared(begun, begun.writing, compared)
        return checked(compared, changed)

    def packages(self, request: PutPackagesBack, call: Call) -> PackagesBack:
        """Put back the packages that the snapshot names. Fewer are missing after that."""
        wanted = packages_in(self._has_begun().wanted.manifest.environment)
        system = this_system(self.home, rented=request.rented)
        try:
            return put_back(system, wanted, partial(self.check, call))
        finally:
            with suppress(OSError):  # on a full disk, what began the restore stays
                note_wanted(self.home, system, wanted)

    def _begin(self, request: BeginRestore, call: Call) -> Begun:
        seal = seal_of(request.key)
        wanted = read_wanted(
            request, seal, self.transfer(call), any_paths=request.roots is not None
        )
        goal = Goal(wanted.manifest, _targets(request, wanted), seal)
        identity = blake3(wanted.root + b"\0".join(goal.targets)).digest()
        journal = RestoreJournal(self.state.restore_journal, identity)
        done = journal.done()
        holds_something = any(_first_name(target) is not None for target in goal.targets)
        if done is not None and not holds_something:
            journal.clear()  # stale journal: the files were removed
            done = None
        if request.resume and done is None and holds_something:
            mirrored = self.state.mirrored(goal.real_targets)
            if mirrored == wanted.root:
                return Begun(self._answer(goal, goal.targets, None), wanted, goal, None)
            self._check_left(journal, mirrored)
        aside: list[str] = []
        # a file of a version whose commands could start before the end
        gate = self.state.folder / "gate"
        if done is None:
            shutil.rmtree(gate, ignore_errors=True)
        elif gate.exists():
            raise RestoreUnfinished(
                f"workspace {self.workspace} on this machine holds an unfinished restore, by an "
                "older torpor, under a command that was started before its files were there, and "
                "nothing else; to go on here, end that command, and empty the directories"
            )
        if done is None:
            if request.aside and not request.resume and self.state.is_new:
                aside = self._move_aside(goal.targets, request.snapshot)
            _check_empty(goal.targets)
            self._settle_sync(goal)
            self.state.keep_use(Use(goal.real_targets, time.time_ns()))
            if request.keep_packages:  # so that a wake that is killed loses no name
                named = packages_in(wanted.manifest.environment)
                note_wanted(self.home, this_system(self.home), named)
        if request.gpu is not None:
            self._gpu = self.trial(request.gpu, goal.targets)
        first = _first(goal, request)
        able = goal.abilities(self.state.probe_note)
        plan = self._plan(goal, request, done or set(), able, first)
        self.state.forget_index()
        in_use = InUse(self.state.folder / "in-use", identity)
        staged = bool(first.ranks) or journal.staged
        stage = _STAGE + identity.hex()[:16].encode() if staged else b""
        writing = Writing(goal, plan, journal, first, in_use, stage, able)
        writing.prepare()
        answer = replace(
            self._answer(goal, goal.targets, plan),
            first=len(first.ranks),
            unmatched=first.unmatched,
            moved_aside=aside,
        )
        return Begun(answer, wanted, goal, writing)

    def _plan(
        self,
        goal: Goal,
        request: BeginRestore | BeginPath,
        done: set[int],
        able: Sequence[FilesystemAbilities],
        first: First = NO_FIRST,
    ) -> FetchPlan:
        """What has to be fetched; DiskFull where it does not fit."""
        plan = FetchPlan(
            goal.manifest, request.max_parts, done, request.part_bytes, first.ranks, first.then
        )
        names = Counter(goal.targets[root] for root in described(goal.manifest.entries).roots)
        check_space(
            dict(zip(goal.targets, _lacking(goal, plan, able), strict=True)),
            "the snapshot",
            "wake on a machine with a larger disk; nothing was written",
            {} if done else names,  # some of the names exist already
        )
        return plan

    def _answer(self, goal: Goal, roots: Sequence[bytes], plan: FetchPlan | None) -> RestorePlan:
        parts = [] if plan is None else restore_parts(self.workspace, plan)
        files, size = goal.totals
        return RestorePlan(
            complete=plan is None,
            roots=[os.fsdecode(root) for root in roots],
            files=files,
            bytes=size,
            stored_bytes=sum(part.stored_bytes for part in parts),
            parts=parts,
        )

    def _finish(self, begun: Begun) -> Finished:
        warnings: list[str] = []
        if begun.writing is not None:
            begun.writing.plan.check_fetched(f"run {self.id}", "restore all parts before finish")
            warnings = first_few(begun.writing.finish())
        decoding = "" if self._gpu is None else self._gpu.words
        return Finished(*begun.goal.totals, warnings, decoding)

    def _compared(self, begun: Begun, writing: Writing, compared: Comparison) -> None:
        """Keep the index of a tree that equals the snapshot; fetch everything again for one that
        differs."""
        if compared.differences:
            writing.begin_again()
            return
        blob, root, manifest = begun.wanted
        self.state.save_index(
            blob,
            root,
            begun.goal.real_targets,
            bytes(compared.signatures.packed),
            line=lineage_of(manifest),
        )
        writing.end()

    def _has_begun(self) -> Begun:
        if self._begun is None:
            raise AgentLost(f"run {self.id} has not begun: begin it first")
        return self._begun

    def _move_aside(self, targets: Sequence[bytes], snapshot: SnapshotId) -> list[str]:
        """Rename the directories that hold something, and make new ones; returns the new names. A
        directory that holds the agent, such as the home, is not renamed."""
        names, agent = [], os.path.realpath(os.fsencode(self.state.folder))
        for place in targets:
            if _first_name(place) is None or is_inside(agent, [os.path.realpath(place)]):
                continue
            try:
                names.append(os.fsdecode(move_aside(place, snapshot)))
            except OSError as cause:  # such as EBUSY for a mount point
                raise InvalidInput(
                    f"target {os.fsdecode(place)} is not empty on the machine and cannot be "
                    f"renamed ({cause.strerror}): wake into another directory"
                ) from None
            os.mkdir(place, 0o755)
        return names

    def _settle_sync(self, goal: Goal) -> None:
        """Drop the record of a sync into these directories, or of one that has only staged files.

        Raise for a tree elsewhere that a sync has half changed, because the record is needed to
        complete that sync.
        """
        record = self.state.sync_record()
        if record is None or record.roots == goal.real_targets:
            self.state.clear_sync_record()
        elif record.mixed:
            raise self.state.half_synced(
                record, " first, which continues it; or empty the directories, and wake it there"
            )

    def _check_left(self, journal: RestoreJournal, mirrored: bytes | None) -> None:
        """Refuse targets that hold the restore of another snapshot, finished or not."""
        if journal.of_another():
            raise RestoreUnfinished(
                f"workspace {self.workspace} on this machine holds an unfinished restore of "
                "another snapshot, and nothing else; to go on here, wake that snapshot, or empty "
                "the directories"
            )
        if mirrored is not None:
            line = self.state.past().line
            named = f"snapshot {line.snapshot}" if line else "another snapshot"
            raise InvalidInput(
                f"an earlier run restored {named} of workspace {self.workspace} on this machine "
                "and did not hand the machine over; the user may work there. Run wake with that "
                "snapshot, which hands the machine over; then hibernate it"
            )

    def _give_back(self) -> None:
        self._passing.close()
        if self._gpu is not None:
            self._gpu.close()
        super()._give_back()


class _First:
    """Keep the first parts apart from their finish.

    A part that is requested again may still write what its repeat has written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts = 0
        self._finishing = False

    @contextmanager
    def fetching(self, first: bool) -> Iterator[None]:
        """Count a first part as at work. A part that begins after the finish finds nothing to
        write."""
        with self._changed:
            self._parts += first
        try:
            yield
        finally:
            with self._changed:
                self._parts -= first
                self._changed.notify_all()

    @contextmanager
    def finishing(self, check: Callable[[], None]) -> Iterator[None]:
        """Wait for the first parts and for another finish; ``check`` may raise RunCancelled."""
        with self._changed:
            while self._parts or self._finishing:
                self._changed.wait(_POLL_S)
                check()
            self._finishing = True
        try:
            yield
        finally:
            with self._changed:
                self._finishing = False
                self._changed.notify_all()


def _first(goal: Goal, request: BeginRestore) -> First:
    """The files that come first: those that the user names, or else those that the snapshot says
    were used."""
    entries = goal.manifest.entries
    if request.first:
        return find_first(entries, request.first)
    return find_used(entries, recorded_use(goal.manifest))


def _targets(request: BeginRestore, wanted: Wanted) -> list[bytes]:
    roots = wanted.manifest.roots
    targets = [os.fsencode(absolute_root(root)) for root in request.roots or roots]
    if len(targets) != len(roots):
        raise InvalidInput(
            f"snapshot {request.snapshot} has {len(roots)} directories ({', '.join(roots)}) and "
            f"{len(targets)} targets were named: name one for each"
        )
    if pair := overlapping([os.path.realpath(target) for target in targets]):
        raise InvalidInput(f"targets {pair} overlap: name separate directories")
    return targets


def _check_empty(targets: Sequence[bytes]) -> None:
    for target in targets:
        shown = os.fsdecode(target)
        if os.path.lexists(target) and not os.path.isdir(target):
            raise InvalidInput(f"target {shown} is a file on the machine: move it away")
        first = _first_name(target)
        if first is not None:
            raise InvalidInput(
                f"target {shown} is not empty on the machine (it holds {first!r}): torpor never "
                "overwrites. Empty it, wake into another directory or machine, or, where the "
                "image of a rented machine has filled it, let a Tuning block say `move_aside`"
            )


def move_aside(place: bytes, snapshot: SnapshotId) -> bytes:
    """Rename a place to ``PLACE.before-SNAPSHOT``, or to that with a number; returns the new
    name."""
    wanted = name = place + b".before-" + snapshot.encode()
    number = 1
    while is_there(name):
        number += 1
        name = b"%s-%d" % (wanted, number)
    os.rename(place, name)
    return name


def _first_name(target: bytes) -> bytes | None:
    """The first name in a directory; None where it is empty, or no directory. A fresh file system
    counts as empty: mkfs makes its ``lost+found``."""
    try:
        with os.scandir(target) as names:
            return next((name.name for name in names if not _is_of_mkfs(name)), None)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_of_mkfs(name: os.DirEntry[bytes]) -> bool:
    """Whether the name is an empty lost+found. One of root's that cannot be listed counts as
    empty."""
    if name.name != b"lost+found" or not name.is_dir(follow_symlinks=False):
        return False
    try:
        return not os.listdir(name.path)
    except PermissionError:
        return name.stat(follow_symlinks=False).st_uid == 0


def _lacking(goal: Goal, plan: FetchPlan, able: Sequence[FilesystemAbilities] = ()) -> list[int]:
    """Plain bytes that are still to be written to each target, with copies instead of hard links
    where a target has none."""
    entries, roots = goal.manifest.entries, len(goal.targets)
    lacking = content_bytes(entries, roots, plan.done)
    copied = [not one.links for one in able]
    if any(copied):
        links = Counter((e.root, e.target) for e in entries if e.kind == HARDLINK)
        for entry in entries:
            if copied[entry.root] and (count := links.get((entry.root, entry.path), 0)):
                lacking[entry.root] += count * content_bytes([entry], roots)[entry.root]
    return lacking
