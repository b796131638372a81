"""The agent's half of a snapshot: passes of walking and storing, then the manifest."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from torpor.machine.agent.brought import has_started_again, new_directories
from torpor.machine.agent.call import Call
from torpor.machine.agent.environment import record_environment
from torpor.machine.agent.file_use import Files, Noted, ready_before, use_of
from torpor.machine.agent.goal import SHOWN, shown
from torpor.machine.agent.hook import run_hook
from torpor.machine.agent.known import KnownFiles
from torpor.machine.agent.losses import LookBehind
from torpor.machine.agent.machine import machine_id
from torpor.machine.agent.memory import return_freed
from torpor.machine.agent.packages import packages_to_record, this_system
from torpor.machine.agent.passes import Means, Pass, Workers
from torpor.machine.agent.programs import Programs
from torpor.machine.agent.resume import Resumption
from torpor.machine.agent.runs import AgentRun, seal_of
from torpor.machine.agent.state import Index, WorkspaceState
from torpor.machine.agent.sync import drop_staged
from torpor.machine.agent.user_files import UserNamesOnly
from torpor.machine.checkpoint.tree import mark
from torpor.machine.pipeline.buffers import PackBuffers
from torpor.machine.pipeline.contents import Contents
from torpor.machine.pipeline.journal import Journal
from torpor.machine.pipeline.numbers import Numbers
from torpor.machine.pipeline.upload import Source
from torpor.machine.sampler.ring import RING, boot_clock_s, boot_id, newest_sample
from torpor.machine.tree.equality import Equality
from torpor.machine.tree.names import Names
from torpor.machine.tree.plan import cut
from torpor.machine.tree.vanished import Gone, distinct, hidden, missing_places, vanished
from torpor.machine.tree.walk import (
    Walk,
    absolute_root,
    compile_excludes,
    hold_nothing,
    is_inside,
    resolve_roots,
    walk,
)
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import Effort, steps_for
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import (
    AgentLost,
    GrantExpired,
    MachineError,
    ObjectExists,
    WorkspaceBusy,
    WorkspaceInvalid,
)
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.file_use import used_record
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import AUTOSAVE, Lineage, lineage_of
from torpor.shared.format.manifest import (
    FILE,
    Manifest,
    Pack,
    encode_manifest,
)
from torpor.shared.format.missed import Missing, missing_record
from torpor.shared.format.names import pack_id_of, pack_key
from torpor.shared.format.roots import USER_HOME
from torpor.shared.format.sizes import CHUNK_BYTES, PACK_BYTES
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.activity import PERSON, STALE_S
from torpor.shared.wire.losses import LookAtHomes, LookForLosses, Losses, summary
from torpor.shared.wire.request import Event
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    Committed,
    Confirm,
    Confirmed,
    EndSnapshot,
    Froze,
    KnownSnapshot,
    ListPacks,
    Missed,
    PackClaim,
    Packs,
    PassesOutcome,
    Program,
    Quiesce,
    Quiesced,
    Reread,
    RereadPacks,
    SnapshotBegun,
    SnapshotEnded,
    StorePasses,
    Vanished,
)

PAUSE_S: Final = 0.25
"""Seconds between two passes while files change. A file that changed less than 0.1 s before a pass
is unsettled in it (2.1 s where file times are whole seconds), and a small workspace is walked
faster than that."""


class _Begun(NamedTuple):
    """The request that began the run, and what was found then."""

    answer: SnapshotBegun
    roots: list[bytes]
    named_roots: list[str]
    excluded: Callable[[bytes], bool] | None
    programs: Programs
    seal: Seal
    encoder: Encoder
    known: KnownFiles
    # None: the snapshot that the machine held last is unknown, or not stored
    equality: Equality | None
    ready: Files  # files that made an earlier machine ready
    user_files: UserNamesOnly | None  # of a snapshot of a home
    may_be_empty: bool


class _Area(NamedTuple):
    """What a run stores of the machine's disk."""

    roots: list[bytes]
    excluded: Callable[[bytes], bool] | None
    user_files: UserNamesOnly | None  # of a snapshot of a home
    may_be_empty: bool  # the workspace is unused, and torpor made its directories on this machine


class _Earlier(NamedTuple):
    """What the machine has of earlier snapshots. ``own``: the index of the snapshot that it has
    stored or restored last; ``usable``: the index of the snapshot whose chunks this run may refer
    to without reading its manifest; ``known``: those whose manifests it reads."""

    own: Index | None
    usable: Index | None
    known: list[KnownSnapshot]


class _Written(NamedTuple):
    """The manifest of the last commit."""

    snapshot: SnapshotId
    blob: bytes
    root: bytes
    files: int
    size: int  # of all files
    changed: list[bytes]  # paths of files that changed while they were read
    names: Names
    line: Lineage
    use: Noted


class SnapshotRun(AgentRun):
    """A run that makes one snapshot: begun, stored in passes, and committed. Its requests are
    served one at a time."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._journal = Journal(self.state.journal)
        self._resumption = Resumption(self.state.folder)
        self._buffers = PackBuffers(PACK_BYTES)
        self._gpu: GpuTrial | None = None
        self._filling = threading.Lock()
        self._filled_packs: set[ObjectKey] = set()
        self._begun: _Begun | None = None
        self._pass: Pass | None = None
        self._asking: Pass | None = None  # the pass for which grants are asked
        self._passes = 0  # passes that have ended
        self._new_bytes = self._stored_bytes = 0
        self._by_itself = False  # whether the machine saves by itself, without a control side
        self._gone: list[Gone] | None = None  # found by the first pass
        self._had_a_file = False  # whether some pass found a file
        self._missing: list[Missing] = []  # found by the last pass
        self._line: Lineage | None = None  # the lineage that the tree goes on from
        self._written: _Written | None = None
        self._look: LookBehind | None = None
        self._losses: Losses | None = None
        self._sent: set[SnapshotId] = set()

    def begin(
        self, request: BeginSnapshot, call: Call, made: Sequence[str] | None = None
    ) -> SnapshotBegun:
        """Resolve the roots, and use what earlier runs stored. Once a run. ``made``: of a save by
        the machine itself, the root hashes of the earlier ones that it may go on from."""
        if self._begun is not None:
            return self._begun.answer
        self.state.check_not_half_restored("; a snapshot now would store half a workspace")
        self._settle_sync()
        try:
            self._resumption.take_up()
        # the resume command of an earlier run is at work, and that run owes it
        except WorkspaceBusy:
            if made is None:
                raise
        area = self._area(request)
        programs = Programs(self.home, area.roots[0], area.excluded)
        if area.user_files is None:
            programs.forget(self._resumption.programs)
        seal = seal_of(request.key)
        effort = Effort(steps_for(request.compression))
        if request.compression.gpu is not None:
            self._gpu = self.trial(request.compression.gpu, area.roots)
        self._by_itself = made is not None
        earlier = self._earlier(request, made or (), area.roots, seal)
        own = earlier.own
        self._line = self.state.past().line or (lineage_of(own.manifest) if own else None)
        resumable = {pack_key(self.workspace, r.pack.id): r for r in self._journal.read()}
        before = own.held if own else self.state.held_here(area.roots, request.roots, seal)
        self.state.remember_files(area.roots, seal)
        self._begun = _Begun(
            answer=SnapshotBegun([self._claim(record.pack) for record in resumable.values()]),
            roots=area.roots,
            named_roots=request.roots,
            excluded=area.excluded,
            programs=programs,
            seal=seal,
            encoder=Encoder(effort, self._gpu),
            known=KnownFiles(request.roots, earlier.usable, earlier.known, resumable, before),
            equality=_equality(earlier.usable, self._line),
            ready=ready_before(own),
            user_files=area.user_files,
            may_be_empty=area.may_be_empty,
        )
        return self._begun.answer

    def _area(self, request: BeginSnapshot) -> _Area:
        """The part of this machine's disk that the request names."""
        if request.user_files is None:
            new = new_directories(self.home)
            used = why_used(self.state, self.home, len(request.known))
            roots = resolve_roots(request.roots, new, not_empty=used)
            may_be_empty = not used and new.issuperset(roots)
            return _Area(roots, compile_excludes(request.exclude), None, may_be_empty)
        own = UserNamesOnly(self.home, request.user_files)
        return _Area([own.root], own.leaves_out, own, may_be_empty=False)

    def _earlier(
        self, request: BeginSnapshot, made: Sequence[str], roots: list[bytes], seal: Seal
    ) -> _Earlier:
        """What this run may go on from: a save by the machine itself on the same book (``made``),
        or a snapshot that the request knows."""
        among = {bytes.fromhex(snapshot.root) for snapshot in request.known}
        newer = {bytes.fromhex(root) for root in made}
        saved = self.state.load_own_save(roots, seal, among | newer)
        own = saved if saved and self._by_itself else self.state.load_index(roots, seal, None)
        usable = saved or (own if own is not None and own.root in among else None)
        # a newer own save already names their chunks
        known = [] if saved and saved.root in newer else request.known
        return _Earlier(own, usable, known)

    def store(
        self,
        request: StorePasses,
        call: Call,
        workers: Workers,
        *,
        goes_on: Callable[[float], bool] = lambda began: True,
        asks: bool = True,
    ) -> PassesOutcome:
        """Make passes. ``goes_on``: whether there is time for another pass, given when the last one
        began. GrantExpired where grants run out, unless ``ask`` is set, which answers that more are
        needed."""
        self._has_begun().known.take_up(request.resumed)
        last = self._asking if request.packs and not request.unusable else None
        unusable, made, self._asking = request.unusable, 0, None
        while True:
            began = time.monotonic()
            if last is None:
                call.say(Event(0, pass_number=made + 1))
                last, unusable = self._next_pass(request, unusable, call), []
            if last.packs and asks and not request.packs:
                return self._ask(last, made)
            try:
                self._store_pass(last, made + 1, request.packs, workers, call)
            except GrantExpired as late:
                if not asks:
                    raise
                return self._ask(last, made, self._stored_one(request.packs), str(late))
            made, self._passes = made + 1, self._passes + 1
            if made >= request.passes or not last.found.unaccepted_count or not goes_on(began):
                return self._stored(made)
            last = None
            if self._passes > 1:
                call.pause(PAUSE_S)

    def quiesce(self, request: Quiesce, call: Call) -> Quiesced:
        """Run the user's hook, and freeze programs. From then on it is owed to resume them."""
        check, limit_s = partial(self.check, call), request.timeout_s
        owned = self._has_begun().programs
        programs = owned.resolved(request.programs)
        if request.resume or programs:
            self._resumption.add_pending(request.resume, limit_s, programs=programs)
        if request.argv:
            run_hook(request.argv, limit_s, check)
        return Quiesced([*owned.freeze(programs, request.criu, limit_s, check)])

    def add_pending_resume(self, argv: list[str], timeout_s: float) -> None:
        """Record, before the machine's own save runs the save command, that its counterpart is
        owed; take over what an earlier run owes. WorkspaceBusy while that run's command runs."""
        self._resumption.take_up()
        if argv:
            self._resumption.add_pending(argv, timeout_s)

    def settle(self) -> str:
        """Run the resume command that is owed, and let what was frozen go on, unless it was ended;
        returns what went wrong."""
        return self._resumption.settle()

    def freeze(
        self, program: Program, criu: str, within_s: float, snapshot: SnapshotId, call: Call
    ) -> Froze:
        """Freeze a job's command for this snapshot. From then on it is owed that the command goes
        on."""
        owned = self._has_begun().programs
        programs = owned.resolved([program])
        self._resumption.add_pending([], within_s, within_s, programs)
        (froze,) = owned.freeze(programs, criu, within_s, partial(self.check, call))
        if froze.bytes:
            mark(Path(programs[0].images), snapshot)
        return froze

    def end_frozen(self) -> None:
        """End the frozen command for good. MachineError where it is not frozen any more. A resume
        command stays owed."""
        programs = self._has_begun().programs
        if awake := programs.awake():
            raise MachineError(f"{', '.join(awake)} was frozen, and somebody has let it go on")
        self._resumption.end_programs()
        programs.await_end()

    def losses(self, request: LookForLosses, call: Call) -> Losses:
        """Begin the look for what the snapshot lacks; returns what was found once it has ended."""
        look = self._looks_behind()
        entries = None if self._pass is None else self._pass.seen.names.entries
        losses = look.losses(request, entries, call)
        if request.whole and request.wait_s:
            self._losses = losses
        return losses

    def homes(self, request: LookAtHomes, call: Call) -> Losses:
        """What a user has written in a home until now."""
        return self._looks_behind().homes(request, call)

    def packs(self, request: ListPacks, call: Call) -> Packs:
        """Every pack that the manifest will name."""
        self._buffers.drop()
        return_freed()
        return Packs([self._claim(pack) for pack in self._packs()])

    def commit(
        self, request: Commit, call: Call, sending: Callable[[], None] = lambda: None
    ) -> Committed:
        """Write the manifest. The same snapshot again sends the same bytes again. ``sending`` is
        called right before, and may raise."""
        written = self._written
        if written is None or written.snapshot != request.snapshot:
            written = self._written = self._compose(request)
            run, self._line = self._has_begun(), written.line
            self.state.go_on_from(
                self._line,
                run.roots,
                self._gone or [],
                run.excluded,
                empty=len(written.names) == len(run.roots),
            )
        md5 = hashlib.md5(written.blob, usedforsecurity=False).digest()
        sending()
        again = request.snapshot in self._sent
        self._sent.add(request.snapshot)
        try:
            self.transfer(call).put(request.grant, [written.blob], md5)
        except ObjectExists:
            if not again:
                raise
        names, accepted = _split(written.changed, request.accepted)
        return Committed(
            root=written.root.hex(),
            manifest_bytes=len(written.blob),
            files=written.files,
            bytes=written.size,
            unaccepted_count=len(names),
            unaccepted=[shown(path) for path in names[:SHOWN]],
            encoding=self._has_begun().encoder.words,
            accepted_count=len(accepted),
            accepted=[shown(path) for path in accepted[:SHOWN]],
            blind="" if written.use.blind is None else shown(written.use.blind),
        )

    def confirm(self, request: Confirm, call: Call) -> Confirmed:
        """Walk once more, and compare the disk with what was committed."""
        run = self._has_begun()
        seen = self._walk(run, call)
        committed = self._names()
        awake = run.programs.awake()
        if not (awake or seen.unread) and committed.entries == seen.names.entries:
            return Confirmed(0, [], 0, [])
        differ = {*seen.unread.positions}
        gone: list[int] = []
        for position in seen.fresh:
            entry = seen.names.entries[position]
            at = committed.find(entry.root, entry.path)
            if at < 0 or (entry.kind != FILE and committed.entries[at] != entry):
                differ.add(position)
        for root in range(len(run.roots)):
            differ.update(seen.names.missing(root, committed))
            gone += committed.missing(root, seen.names)
        changed = [
            *map(os.fsencode, awake),
            *(seen.names.entries[position].path for position in sorted(differ)),
            *(committed.entries[position].path for position in gone),
        ]
        names, accepted = _split(changed, request.accepted)
        also = [shown(path) for path in accepted[:SHOWN]]
        return Confirmed(len(names), _shown(iter(names), seen), len(accepted), also)

    def reread(self, request: RereadPacks, call: Call) -> Reread:
        """Read whole packs of the manifest again; name those that differ from what was written."""
        packs = {pack_key(self.workspace, pack.id): pack for pack in self._packs()}
        wrong = []
        for grant in request.packs:
            pack = packs[grant.key]
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
        return Reread(wrong)

    def finish(self, request: EndSnapshot, call: Call) -> SnapshotEnded:
        """Keep the index if the snapshot was verified, resume what the hook stopped if the machine
        is kept, and give the workspace back."""
        written = self._written
        try:
            if request.committed and written is not None:
                run, gone = self._has_begun(), self._gone or []
                self.state.save_index(
                    written.blob,
                    written.root,
                    run.roots,
                    written.names.signatures(),
                    gone,
                    run.excluded,
                )
                self._journal.clear()
        finally:
            if not request.kept:
                self._resumption.drop()
            ended = SnapshotEnded(self._resumption.settle())
        self.end("finished")
        return ended

    def is_unchanged(self) -> bool:
        """Whether the tree is equal to the snapshot that it goes on from, after the last pass."""
        run = self._has_begun()
        return run.equality is not None and run.equality.holds(run.known.held)

    def keep_own_save(self) -> None:
        """Remember what was committed without the control side, so that the machine's next save
        reads only what has changed since."""
        written = self._written
        if written is not None:
            roots = self._has_begun().roots
            self.state.save_own_save(written.blob, written.root, roots, written.names.signatures())
            self._journal.clear()

    @property
    def line_s(self) -> float:
        """Seconds in which packs were on their way."""
        return self._has_begun().encoder.effort.line_s

    @property
    def filled_packs(self) -> int:
        """How many grants for packs were used."""
        return len(self._filled_packs)

    def _has_begun(self) -> _Begun:
        if self._begun is None:
            raise AgentLost(f"run {self.id} has not begun: begin it first")
        return self._begun

    def _looks_behind(self) -> LookBehind:
        if self._look is None:
            self._look = LookBehind(self.home, self._has_begun().roots)
        return self._look

    def _walk(self, run: _Begun, call: Call) -> Walk:
        check = partial(self.check, call)
        if run.user_files is not None:
            run.user_files.look(check)
        return walk(run.roots, run.known.held, run.excluded, check)

    def _next_pass(self, request: StorePasses, unusable: Sequence[ObjectKey], call: Call) -> Pass:
        """Walk the roots, and find out what to read."""
        run, began_s = self._has_begun(), time.monotonic()
        run.known.lose(unusable)
        seen = self._walk(run, call)
        self._had_a_file |= len(seen.names) > len(run.roots)
        if run.equality is not None:
            run.equality.saw(run.known.held, seen)
        if seen.unread:
            run.known.learn(run.seal, self.transfer(call))
        if self._gone is None:
            # names that no verified snapshot has may go
            verified = None if self._by_itself else run.known.before
            past = self.state.past()
            mounted = past.new_disks(run.roots, run.excluded)
            gone = hidden([run.known.held, run.known.before], seen, run.roots, mounted)
            gone += vanished(verified, seen, run.roots, run.excluded) if verified else []
            self._gone = distinct([*gone, *(loss for loss in past.gone if loss.stays_gone)])
        run.known.saw(seen)
        jobs = cut(seen.unread, run.roots)
        source = Source(
            run.roots,
            seen.unread,
            run.seal,
            run.known.table,
            Contents(seen, jobs),
            Numbers(run.roots, seen.unread),
            self._journal,
            self._buffers,
            run.encoder,
        )
        self._take_stored()
        self._pass = Pass(seen, source, jobs, self._found(run, seen, request), began_s)
        return self._pass

    def _found(self, run: _Begun, seen: Walk, request: StorePasses) -> PassesOutcome:
        """The answer about a walk."""
        left, count = seen.unread.paths(), len(seen.unread)
        if request.accepted:
            names, _ = _split(left, request.accepted)
            left, count = iter(names), len(names)
        return PassesOutcome(
            passes=0,
            new_bytes=0,
            stored_bytes=0,
            skipped=len(seen.skipped),
            unaccepted_count=count,
            unaccepted=_shown(left, seen),
            parted_count=len(seen.parted),
            parted=[f"{run.named_roots[root]}/{shown(path)}" for root, path in seen.parted[:SHOWN]],
            missed=self._missed(request.accept_lost),
        )

    def _store_pass(
        self, last: Pass, turn: int, packs: Sequence[Grant], workers: Workers, call: Call
    ) -> None:
        """Store the rest of a pass, and report its progress."""
        if not last.packs:
            return
        call.say(Event(0, pass_number=turn, total=last.bytes))
        last.store(
            Means(
                grants=partial(self._unused, packs),
                sender=partial(self.transfer, call),
                workers=workers,
                moved=lambda size: call.emit(Event(size, pass_number=turn, total=last.bytes)),
                check=partial(self.check, call),
            )
        )

    def _ask(self, last: Pass, made: int, stored: str = "", why: str = "") -> PassesOutcome:
        """Answer that the rest of this pass needs more grants."""
        self._asking = last
        answer = self._answer(made)
        return msgspec.structs.replace(answer, packs=last.packs, stored=stored, why=why)

    def _stored(self, made: int) -> PassesOutcome:
        return msgspec.structs.replace(self._answer(made), unchanged=self.is_unchanged())

    def _answer(self, made: int) -> PassesOutcome:
        self._take_stored()
        last = self._has_scanned()
        return msgspec.structs.replace(
            last.found,
            unread=last.bytes,
            ago_s=time.monotonic() - last.began_s,
            passes=made,
            new_bytes=self._new_bytes,
            stored_bytes=self._stored_bytes,
        )

    def _take_stored(self) -> None:
        """Count what the last pass has stored."""
        if self._pass is not None:
            new_bytes, stored_bytes = self._pass.take_stored()
            self._new_bytes += new_bytes
            self._stored_bytes += stored_bytes

    def _stored_one(self, packs: Sequence[Grant]) -> str:
        """One of these packs that the store has."""
        table = self._has_begun().known.table
        return next((pack.key for pack in packs if table.has_pack(pack_id_of(pack.key))), "")

    def _has_scanned(self) -> Pass:
        if self._pass is None:
            raise AgentLost(
                f"run {self.id} has not scanned since the agent was restarted: make a pass"
            )
        return self._pass

    def _settle_sync(self) -> None:
        """Refuse a tree that a sync has half changed; remove files that a sync only staged."""
        record = self.state.sync_record()
        if record is None:
            return
        if record.mixed:
            raise self.state.half_synced(
                record, ", which continues it; a snapshot now would store half a workspace"
            )
        drop_staged(record)
        self.state.clear_sync_record()

    def _unused(self, grants: Sequence[Grant]) -> Iterator[Grant]:
        """Grants for packs that no request of this run has used. A pack is written once, even when
        a request comes again while the first one is still at work."""
        for grant in grants:
            with self._filling:
                if grant.key in self._filled_packs:
                    continue
                self._filled_packs.add(grant.key)
            yield grant

    def _give_back(self) -> None:
        self._resumption.leave()
        super()._give_back()
        self._buffers.drop()
        if self._look is not None:
            self._look.close()
        if self._gpu is not None:
            self._gpu.close()

    def _claim(self, pack: Pack) -> PackClaim:
        return PackClaim(pack_key(self.workspace, pack.id), pack.size, pack.md5.hex())

    def _names(self) -> Names:
        """The names of the last pass with their content."""
        last = self._has_scanned()
        return self._has_begun().known.complete(last.seen, last.source.contents.gone)

    def _packs(self) -> list[Pack]:
        table, entries = self._has_begun().known.table, self._names().entries
        _, _, packs = table.compact(entries, entries.totals(len(table)).used)
        return packs

    def _missed(self, accepted: Sequence[str]) -> Missed:
        run, past = self._has_begun(), self.state.past()
        kept = [place for path in accepted for place in _places(path)]
        also = [os.path.realpath(os.fsencode(absolute_root(r))) for r in run.known.newest_roots]
        unnamed = past.unnamed(run.roots, also, kept)
        gone = [loss for loss in self._gone or [] if not is_inside(loss.path, kept)]
        disks = [disk for disk in past.missing_disks() if disk not in kept]
        self._missing = missing_places(run.roots, gone, disks)
        return Missed(
            [shown(path) for path in unnamed[:SHOWN]],
            [Vanished(shown(loss.path), loss.names, loss.size) for loss in gone],
            [shown(path) for path in disks[:SHOWN]],
        )

    def _compose(self, request: Commit) -> _Written:
        """The manifest of what the last pass found, sealed where the store has a key."""
        run = self._has_begun()
        names = self._names()
        files, size, changed, used = names.entries.totals(len(run.known.table))
        entries, chunks, packs = run.known.table.compact(names.entries, used)
        left_empty = run.may_be_empty and not self._had_a_file and hold_nothing(run.roots)
        if len(entries) == len(run.roots) and not left_empty:
            raise holds_no_work(self.workspace, run.named_roots, run.roots)
        before, autosave = self._line, bool(request.statistics.get(AUTOSAVE))
        equal = self.is_unchanged()
        line = Lineage.after(before, request.snapshot, equal=equal, autosave=autosave)
        losses = {} if self._losses is None else summary(self._losses)
        last = self._has_scanned().seen
        use = use_of(self.state, run.roots, run.excluded, names, run.ready)
        environment = {**record_environment(), USER_HOME: os.path.expanduser("~")}
        manifest = Manifest(
            self.workspace,
            request.snapshot,
            None if before is None else before.snapshot,
            self.id,
            request.created_unix,
            machine_id(self.home),
            run.named_roots,
            entries,
            chunks,
            packs,
            last.skipped,
            {
                **environment,
                **losses,
                **missing_record(self._missing),
                **line.record(),
                **used_record(use.classes),
                **run.programs.record(),
                **packages_to_record(self.home, this_system(self.home)).record(),
            },
            {
                "files": files,
                "bytes": size,
                "stored_bytes": sum(c.stored for c in chunks),
                **request.statistics,
            },
        )
        check_manifest(manifest, f"snapshot {request.snapshot}")  # otherwise a reader refuses it
        blob, root = encode_manifest(manifest, run.seal)
        return _Written(request.snapshot, blob, root, files, size, changed, names, line, use)


def why_used(state: WorkspaceState, home: Path, snapshots: int) -> str:
    """Why a file of the workspace may be missing where its directories are empty; empty text where
    none can be. *Example*: a person mounted a disk over a directory, and it dropped off.
    ``snapshots``: those of the workspace. What is unknown counts as a use."""
    if not state.never_held_a_file(snapshots):
        return "the workspace may have had files"
    if has_started_again(home):
        return "this one may have started again since"
    seen = newest_sample(home / RING)
    if seen is None or seen.boot != boot_id() or not 0 <= boot_clock_s() - seen.at_s <= STALE_S:
        return "nobody can say so of this one: its sampler does not look"
    return "somebody has logged in to this one" if seen.flags & PERSON else ""


def holds_no_work(
    workspace: WorkspaceName, named: Sequence[str], roots: Sequence[bytes]
) -> WorkspaceInvalid:
    """The error for a snapshot without any file."""
    named_roots = ", ".join(named)
    if hold_nothing(roots):
        return WorkspaceInvalid(
            f"workspace {workspace} on this machine has become empty while it was read "
            f"({named_roots}): no snapshot was made; is a disk unmounted?"
        )
    return WorkspaceInvalid(
        f"workspace {workspace} on this machine has nothing that a snapshot stores "
        f"({named_roots}): `exclude` names what is there, or it is a socket or a device, or it has "
        "just come. No snapshot was made: take a pattern out of `exclude`, or put a file there"
    )


def _equality(index: Index | None, line: Lineage | None) -> Equality | None:
    """The comparison with the snapshot that the tree goes on from, if ``index`` is of that
    snapshot."""
    is_newest = bool(index and line and index.manifest.snapshot == line.snapshot)
    return Equality(index.held) if index and is_newest else None


def _places(path: str) -> set[bytes]:
    """The names that a place may have in a record: the path to which it leads now, and the path as
    it is written, which is what it was before a link took its place."""
    place = os.fsencode(absolute_root(path))
    home = os.fsencode(os.path.expanduser("~"))
    written = os.path.normpath(place)
    below = os.path.relpath(written, home)
    in_home = os.path.normpath(os.path.join(os.path.realpath(home), below))
    return {os.path.realpath(place), written, *([in_home] if is_inside(written, [home]) else [])}


def _split(paths: Iterable[bytes], accepted: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    """The names that may not change, and those that may."""
    is_accepted = compile_excludes(accepted) or (lambda path: False)
    left: list[bytes] = []
    found: list[bytes] = []
    for path in paths:
        (found if is_accepted(path) else left).append(path)
    return left, found


def _shown(paths: Iterator[bytes], seen: Walk) -> list[str]:
    """The first names, each with the process because of which it may have changed unseen."""
    processes = seen.unread.processes()
    return [
        f"{shown(path)} ({processes[path]} has it mapped for writing, where a file system may not "
        "show what it writes: end that process)"
        if path in processes
        else shown(path)
        for path in islice(paths, SHOWN)
    ]
