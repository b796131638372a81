"""The agent's half of a restore: plan, parts, attributes, check."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from torpor.machine.agent.manifests import Wanted, read_wanted
from torpor.machine.agent.peers import Passing, PeerFirst, PeerGrant
from torpor.machine.agent.runs import Run
from torpor.machine.pipeline.download import (
    PartRestored,
    RestoreJournal,
    RestorePlan,
    in_pieces,
    restore_part,
)
from torpor.machine.tree.compare import compare_tree
from torpor.machine.tree.walk import absolute_root
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import DiskFull, InvalidInput, RestoreUnfinished, WorkspaceInvalid
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, HOLE, Entry
from torpor.shared.format.names import pack_id_of, pack_key
from torpor.shared.values import MIB, Grant, WorkspaceName
from torpor.shared.wire.protocol import Call

SHOWN: Final = 20
_SPARE_BYTES: Final = 64 * MIB
"""Left free beyond the content: directories, metadata, the agent's own files."""


class RestoreRun(Run):
    """One snapshot being written to this machine."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._begun: dict[str, Any] | None = None
        self._whole = False  # restored and compared before this run began: hands off
        self._finished: dict[str, Any] | None = None
        self._passing = Passing(self.state.folder)

    def begin(
        self,
        wanted: Wanted,
        key: bytes | None,
        roots: Sequence[str] | None,
        max_parts: int,
        part_bytes: int,
        resume: bool,
        call: Call,
    ) -> dict[str, Any]:
        """Read and check the manifest, look at the targets, plan what to fetch. Once a run.

        ``resume``: this goes on with a restore that another run, or another agent, began; it may
        have been complete.
        """
        if self._begun is not None:
            return self._begun
        self._seal = Seal(key)
        self._blob, manifest = read_wanted(wanted, self._seal, self.transfer(call))
        self._root, self._manifest = wanted.root, manifest
        self._targets = [os.fsencode(absolute_root(r)) for r in roots or manifest.roots]
        if len(self._targets) != len(manifest.roots):
            raise InvalidInput(
                f"snapshot {wanted.snapshot} has {len(manifest.roots)} directories "
                f"({', '.join(manifest.roots)}) and {len(self._targets)} targets were "
                "named: name one for each"
            )
        _check_apart(self._targets)
        identity = blake3(wanted.root + b"\0".join(self._targets)).digest()
        self._journal = RestoreJournal(self.state.restore_journal, identity)
        done = self._journal.done()
        if done is not None and not any(map(_holds_something, self._targets)):
            self._journal.clear()  # what it says was written has been removed since
            done = None
        mirrored = self.state.mirrored(self._real_targets())
        if (
            resume
            and done is None
            and mirrored == wanted.root
            and any(map(_holds_something, self._targets))
        ):
            self._whole = True
            self._begun = self._whole_already()
            self._finished = {
                "files": self._begun["files"],
                "bytes": self._begun["bytes"],
                "warnings": [],
                "warning_count": 0,
            }
            return self._begun
        if done is None:
            if resume:
                self._check_left(mirrored)
            self._check_targets()
            self._settle_sync()
        self._done = done or set()
        self._plan = RestorePlan(manifest, max_parts, self._done, part_bytes)
        self._check_space()
        self.state.forget_index()
        self._journal.begin()
        self._writer = TreeWriter(self._targets)
        self._writer.prepare(manifest.entries, in_pieces, anew=not self._done)
        self._writer.close()
        self._begun = self._described()
        return self._begun

    def serve(self, host: str, most_bytes: int) -> dict[str, Any]:
        """Keep what is fetched from now on, in the room that the restore leaves, and pass it on to
        other machines at ``host``. Once a run."""
        folder = self.state.folder
        room = shutil.disk_usage(folder).free - self._lacking_bytes() - _SPARE_BYTES
        server = self._passing.serve(host, max(0, min(most_bytes, room)))
        return {"port": server.port, "url": server.token, "certificate": server.certificate}

    def part(
        self, part: int, grants: Sequence[Grant], peer: PeerGrant | None, call: Call
    ) -> dict[str, Any]:
        """Fetch, check and write what the granted packs hold and the disk does not. A part is
        what its grants say: numbers change when an agent that was started anew plans again."""

        def progress(report: PartRestored) -> None:
            call.emit({"bytes": report.bytes, "stored_bytes": report.stored_bytes})

        report = PartRestored()
        fetcher = PeerFirst(
            self.transfer(call), peer, self._passing, lambda: call.cancelled() or self.ended
        )
        if not self._whole:
            report = restore_part(
                self._plan,
                self._seal,
                fetcher,
                grants,
                self._writer,
                self._journal,
                self._done,
                progress=progress,
                check=lambda: self.check(call),
                keep=self._passing.keep,
            )
        return {
            "part": part,
            "files": report.files,
            "bytes": report.bytes,
            "stored_bytes": report.stored_bytes,
            "peer_bytes": fetcher.peer_bytes,
            "kept": self._kept([pack_id_of(grant.key) for grant in grants]),
            "seconds": {
                "get": report.seconds.get,
                "decode": report.seconds.decode,
                "write": report.seconds.write,
            },
        }

    def finish(self) -> dict[str, Any]:
        """Attributes, links and directories; every chunk must be there. Once a run."""
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
        self._finished = {
            "files": len(files),
            "bytes": sum(e.size for e in files),
            "warnings": self._writer.warnings[:SHOWN],
            "warning_count": len(self._writer.warnings),
        }
        return self._finished

    def compare(self, full: bool, call: Call) -> dict[str, Any]:
        """Compare the disk with the manifest; with ``full`` every byte is read and hashed."""
        finished = self.finish()  # an agent that was started anew since has opened every mode again
        if self._whole:
            return {
                "files": finished["files"],
                "bytes": finished["bytes"],
                "differences": [],
                "difference_count": 0,
            }
        result = compare_tree(
            self._manifest.entries,
            self._manifest.chunks,
            self._targets,
            self._seal,
            full=full,
            owners=os.geteuid() == 0,
            refused_xattrs=self._writer.refused_xattrs,
            progress=lambda size: call.emit({"bytes": size}),
            check=lambda: self.check(call),
        )
        if result.differences:
            self._journal.restart()  # what it says is not what is there: fetch it all again
        else:
            self.state.save_index(self._blob, self._root, self._real_targets(), result.signatures)
            self._journal.clear()
        return {
            "files": result.files,
            "bytes": result.bytes,
            "differences": result.differences[:SHOWN],
            "difference_count": len(result.differences),
        }

    def _settle_sync(self) -> None:
        """What a sync had half changed is gone, or still has to be completed: its index is needed
        for that, and a restore ends with another one."""
        record = self.state.sync_record()
        if record is None or record.roots == self._real_targets():
            self.state.clear_sync_record()
        elif record.mixed:
            raise WorkspaceInvalid(
                f"workspace {self.workspace} on this machine is half of it snapshot "
                f"{record.snapshot}: a sync to that never finished. Sync to it again first, which "
                "takes up where that stopped; or empty its directories, and wake it there"
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
        """Plain bytes that are still to be written."""
        if self._whole:
            return 0
        total = sum(_data_bytes(e) for e in self._manifest.entries if e.kind == FILE)
        return max(0, total - sum(self._manifest.chunks[n].plain for n in set(self._done)))

    def _give_back(self) -> None:
        self._passing.close()
        super()._give_back()

    def _real_targets(self) -> list[bytes]:
        return [os.path.realpath(target) for target in self._targets]

    def _whole_already(self) -> dict[str, Any]:
        """An earlier run restored and compared all of it, and did not get to say so. Nothing is
        written: somebody may have worked here since."""
        return {
            "complete": True,
            "roots": [os.fsdecode(target) for target in self._targets],
            "files": sum(e.kind == FILE for e in self._manifest.entries),
            "bytes": sum(e.size for e in self._manifest.entries),
            "stored_bytes": 0,
            "done_bytes": sum(chunk.plain for chunk in self._manifest.chunks),
            "parts": [],
        }

    def _described(self) -> dict[str, Any]:
        plan, manifest = self._plan, self._manifest
        every = [pack for part in plan.parts for pack in part]
        total = sum(e.size for e in manifest.entries)
        return {
            "complete": False,
            "roots": [os.fsdecode(target) for target in self._targets],
            "files": sum(e.kind == FILE for e in manifest.entries),
            "bytes": total,
            "stored_bytes": plan.stored_bytes(every),
            "done_bytes": sum(manifest.chunks[n].plain for n in self._done),
            "parts": [
                {
                    "part": number,
                    "bytes": plan.plain_bytes(part),
                    "stored_bytes": plan.stored_bytes(part),
                    "packs": [pack_key(self.workspace, pack) for pack in part],
                }
                for number, part in enumerate(plan.parts)
            ],
        }

    def _check_left(self, mirrored: bytes | None) -> None:
        """An earlier run was about another snapshot: what it left is told apart from work."""
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
                f"workspace {self.workspace} on this machine is another snapshot, which an earlier "
                "run restored whole without handing the machine over: somebody may work there. "
                "Run that again with its snapshot, which hands it over; then hibernate it"
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


def _check_apart(targets: Sequence[bytes]) -> None:
    for i, one in enumerate(targets):
        for other in targets[i + 1 :]:
            a, b = (os.path.join(os.path.realpath(path), b"") for path in (one, other))
            if a.startswith(b) or b.startswith(a):
                raise InvalidInput(
                    f"targets {os.fsdecode(one)} and {os.fsdecode(other)} lie inside each other: "
                    "name directories that lie apart"
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
