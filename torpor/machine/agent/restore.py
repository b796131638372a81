"""The agent's half of a restore: plan, parts, attributes, check."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from torpor.machine.agent.call import Call
from torpor.machine.agent.manifests import read_wanted
from torpor.machine.agent.passing import Passing, PeerFirst
from torpor.machine.agent.runs import AgentRun, seal_of
from torpor.machine.pipeline.download import (
    FetchPlan,
    PartRestored,
    RestoreJournal,
    in_pieces,
    restore_part,
)
from torpor.machine.tree.compare import Comparison, compare_tree
from torpor.machine.tree.walk import absolute_root
from torpor.machine.tree.write import TreeWriter
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import DiskFull, InvalidInput, RestoreUnfinished, WorkspaceInvalid
from torpor.shared.format.manifest import FILE, HOLE, Entry
from torpor.shared.format.names import pack_id_of, pack_key
from torpor.shared.values import MIB, WorkspaceName
from torpor.shared.wire.request import Event
from torpor.shared.wire.restore import (
    BeginRestore,
    Checked,
    CheckRestore,
    FetchPart,
    Finished,
    FinishRestore,
    RestoredPart,
    RestorePart,
    RestorePlan,
    Served,
    ServePacks,
)

SHOWN: Final = 20
_SPARE_BYTES: Final = 64 * MIB
"""Bytes left free beyond the content: for directories, metadata, the agent's own files."""


class RestoreRun(AgentRun):
    """A run that writes one snapshot to this machine."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._begun: RestorePlan | None = None
        self._whole = False  # restored and compared before this run began: hands off
        self._finished: Finished | None = None
        self._passing = Passing(self.state.folder)
        self._gpu: GpuTrial | None = None

    def begin(self, request: BeginRestore, call: Call) -> RestorePlan:
        """Read and check the manifest, check the targets, plan what to fetch. Once a run.

        ``resume``: this goes on with a restore that another run, or another agent, began; it may
        have been complete.
        """
        if self._begun is not None:
            return self._begun
        self._seal = seal_of(request.key)
        self._blob, self._root, manifest = read_wanted(request, self._seal, self.transfer(call))
        self._manifest = manifest
        self._targets = [os.fsencode(absolute_root(r)) for r in request.roots or manifest.roots]
        if len(self._targets) != len(manifest.roots):
            raise InvalidInput(
                f"snapshot {request.snapshot} has {len(manifest.roots)} directories "
                f"({', '.join(manifest.roots)}) and {len(self._targets)} targets were "
                "named: name one for each"
            )
        _check_apart(self._targets)
        identity = blake3(self._root + b"\0".join(self._targets)).digest()
        self._journal = RestoreJournal(self.state.restore_journal, identity)
        done = self._journal.done()
        if done is not None and not any(map(_holds_something, self._targets)):
            self._journal.clear()  # stale journal: the files were removed
            done = None
        mirrored = self.state.mirrored(self._real_targets())
        if (
            request.resume
            and done is None
            and mirrored == self._root
            and any(map(_holds_something, self._targets))
        ):
            self._whole = True
            self._begun = self._whole_already()
            self._finished = Finished(self._begun.files, self._begun.bytes, [])
            return self._begun
        if done is None:
            if request.resume:
                self._check_left(mirrored)
            self._check_targets()
            self._settle_sync()
        self._done = done or set()
        if request.gpu is not None:
            self._gpu = self.trial(request.gpu, self._targets)
        self._plan = FetchPlan(manifest, request.max_parts, self._done, request.part_bytes)
        self._check_space()
        self.state.forget_index()
        self._journal.begin()
        self._writer = TreeWriter(self._targets)
        self._writer.prepare(manifest.entries, in_pieces, afresh=not self._done)
        self._writer.close()
        self._begun = self._planned(self._targets)
        return self._begun

    def serve(self, request: ServePacks, call: Call) -> Served:
        """Keep what is fetched from now on, in the room that the restore leaves, and pass it on to
        other machines. Once a run."""
        folder = self.state.folder
        room = shutil.disk_usage(folder).free - self._lacking_bytes() - _SPARE_BYTES
        server = self._passing.serve(request.host, max(0, min(request.most_bytes, room)))
        return Served(server.port, server.token, server.certificate)

    def part(self, request: FetchPart, call: Call) -> RestoredPart:
        """Fetch, check and write what the granted packs hold and the disk does not. A part is
        what its grants say: numbers change when an agent that was restarted plans again."""
        report = PartRestored()
        fetcher = PeerFirst(
            self.transfer(call), request.peer, self._passing, lambda: call.cancelled() or self.ended
        )
        if not self._whole:
            report = restore_part(
                self._plan,
                self._seal,
                fetcher,
                request.packs,
                self._writer,
                self._journal,
                self._done,
                progress=lambda report: call.emit(Event(report.bytes)),
                check=lambda: self.check(call),
                keep=self._passing.keep,
                gpu=self._gpu,
            )
        kept = self._kept([pack_id_of(grant.key) for grant in request.packs])
        return RestoredPart(report.stored_bytes, fetcher.peer_bytes, kept)

    def finish(self, request: FinishRestore, call: Call) -> Finished:
        return self._finish()

    def _finish(self) -> Finished:
        """Set attributes, links and directories; every chunk must be there. Once a run."""
        if self._finished is not None:
            return self._finished
        missing = [n for n, uses in enumerate(self._plan.uses) if uses and n not in self._done]
        if missing:
            raise InvalidInput(
                f"run {self.id} still lacks {len(missing)} chunks: restore all parts before finish"
            )
        self._writer.finish(self._manifest.entries, in_pieces)
        self._writer.close()
        files = [e for e in self._manifest.entries if e.kind == FILE]
        self._finished = Finished(
            len(files),
            sum(e.size for e in files),
            shown(self._writer.warnings),
            self._gpu.words if self._gpu is not None else "",
        )
        return self._finished

    def compare(self, request: CheckRestore, call: Call) -> Checked:
        return self._compare(request, call)

    def _compare(self, request: CheckRestore, call: Call) -> Checked:
        """Compare the disk with the manifest; with ``full`` every byte is read and hashed."""
        self._finish()  # an agent that was restarted since has opened every mode again
        if self._whole:
            return Checked([], 0)
        result = compare_tree(
            self._manifest.entries,
            self._manifest.chunks,
            self._targets,
            self._seal,
            full=request.full,
            owners=os.geteuid() == 0,
            refused_xattrs=self._writer.refused_xattrs,
            progress=lambda size: call.emit(Event(size)),
            check=lambda: self.check(call),
        )
        if result.differences:
            self._journal.restart()  # the journal is wrong: fetch everything again
        else:
            self.state.save_index(self._blob, self._root, self._real_targets(), result.signatures)
            self._journal.clear()
        return checked(result)

    def _settle_sync(self) -> None:
        """What a sync had half changed is gone, or still has to be completed: its index is needed
        for that, and a restore ends with another one."""
        record = self.state.sync_record()
        if record is None or record.roots == self._real_targets():
            self.state.clear_sync_record()
        elif record.mixed:
            raise WorkspaceInvalid(
                f"workspace {self.workspace} on this machine holds only half of snapshot "
                f"{record.snapshot}: a sync to that snapshot never finished. Sync to it again "
                "first, which continues it; or empty the directories, and wake it there"
            )

    def _kept(self, packs: Sequence[bytes]) -> bool:
        if self._whole:
            return False
        chunks = self._manifest.chunks
        return all(
            self._passing.holds(pack, [chunks[n].offset for n in self._plan.chunks_of(pack)])
            for pack in packs
        )

    def _lacking_bytes(self) -> int:
        """Plain bytes that are not written yet."""
        if self._whole:
            return 0
        total = sum(_data_bytes(e) for e in self._manifest.entries if e.kind == FILE)
        return max(0, total - sum(self._manifest.chunks[n].plain for n in set(self._done)))

    def _give_back(self) -> None:
        self._passing.close()
        if self._gpu is not None:
            self._gpu.close()
        super()._give_back()

    def _real_targets(self) -> list[bytes]:
        return [os.path.realpath(target) for target in self._targets]

    def _whole_already(self) -> RestorePlan:
        """An earlier run restored and compared everything, and was killed before it could report
        that. Write nothing: the user may have worked here since."""
        return self._described(
            complete=True,
            roots=self._targets,
            parts=[],
        )

    def _planned(self, roots: Sequence[bytes]) -> RestorePlan:
        return self._described(
            complete=False,
            roots=roots,
            parts=restore_parts(self.workspace, self._plan),
        )

    def _described(
        self, *, complete: bool, roots: Sequence[bytes], parts: list[RestorePart]
    ) -> RestorePlan:
        return RestorePlan(
            complete=complete,
            roots=[os.fsdecode(root) for root in roots],
            files=sum(e.kind == FILE for e in self._manifest.entries),
            bytes=sum(e.size for e in self._manifest.entries),
            stored_bytes=sum(part.stored_bytes for part in parts),
            parts=parts,
        )

    def _check_left(self, mirrored: bytes | None) -> None:
        """Refuse targets that hold the restore of another snapshot, finished or not."""
        if not any(map(_holds_something, self._targets)):
            return
        if self._journal.of_another():
            raise RestoreUnfinished(
                f"workspace {self.workspace} on this machine is the unfinished restore of another "
                "snapshot, by an earlier run that never handed the machine over: it holds nothing "
                "else"
            )
        if mirrored is not None:
            raise InvalidInput(
                f"an earlier run restored another snapshot of workspace {self.workspace} on this "
                "machine and did not hand the machine over; the user may work there. Run wake "
                "with that snapshot, which hands the machine over; then hibernate it"
            )

    def _check_targets(self) -> None:
        for target in self._targets:
            shown = os.fsdecode(target)
            try:
                with os.scandir(target) as names:
                    first = next(names, None)
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                raise InvalidInput(
                    f"target {shown} is a file on the machine: move it away"
                ) from None
            if first is not None:
                raise InvalidInput(
                    f"target {shown} is not empty on the machine (it holds {first.name!r}): "
                    "torpor never overwrites; empty it, or wake into another directory or machine"
                )

    def _check_space(self) -> None:
        needed: dict[int, int] = {}
        free: dict[int, tuple[int, str]] = {}
        for entry in self._manifest.entries:
            if entry.kind == FILE:
                needed[entry.root] = needed.get(entry.root, 0) + _data_bytes(entry)
        done = sum(self._manifest.chunks[n].plain for n in self._done)
        on_device: dict[int, int] = {}
        for root, size in needed.items():
            place = _existing(self._targets[root])
            device = os.stat(place).st_dev
            on_device[device] = on_device.get(device, 0) + size
            st = os.statvfs(place)
            free[device] = (st.f_bavail * st.f_frsize, os.fsdecode(self._targets[root]))
        for device, size in on_device.items():
            have, shown = free[device]
            if size - done + _SPARE_BYTES > have:
                raise DiskFull(
                    f"{shown} has {have:,} bytes free and the snapshot needs {size - done:,}: wake "
                    "on a machine with a larger disk; nothing was written"
                )


def restore_parts(workspace: WorkspaceName, plan: FetchPlan) -> list[RestorePart]:
    """The parts of a plan, as the control side grants them."""
    return [
        RestorePart(
            number,
            plan.plain_bytes(part),
            plan.stored_bytes(part),
            [pack_key(workspace, pack) for pack in part],
        )
        for number, part in enumerate(plan.parts)
    ]


def shown(warnings: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(warnings) - SHOWN
    return [*warnings[:SHOWN], *([f"and {more} more"] if more > 0 else [])]


def checked(compared: Comparison) -> Checked:
    differences = compared.differences
    return Checked(differences[:SHOWN], len(differences))


def _check_apart(targets: Sequence[bytes]) -> None:
    for i, one in enumerate(targets):
        for other in targets[i + 1 :]:
            a, b = (os.path.join(os.path.realpath(path), b"") for path in (one, other))
            if a.startswith(b) or b.startswith(a):
                raise InvalidInput(
                    f"targets {os.fsdecode(one)} and {os.fsdecode(other)} overlap: name separate "
                    "directories"
                )


def _holds_something(target: bytes) -> bool:
    try:
        with os.scandir(target) as names:
            return next(names, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def _data_bytes(entry: Entry) -> int:
    return sum(e.length for e in entry.extents if e.chunk != HOLE)


def _existing(path: bytes) -> bytes:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
