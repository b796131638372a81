"""The control side's half of a restore."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from torpor.control.remote.agent import Agent
from torpor.control.remote.limits import check_fetches
from torpor.control.remote.run import OnEvent, RemoteRun
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import MIB, GpuUse, StoredSnapshot
from torpor.shared.wire.packages import ANSWER_S, PackagesBack, PutPackagesBack
from torpor.shared.wire.restore import (
    BeginRestore,
    Checked,
    CheckRestore,
    EndRestore,
    FetchPart,
    Finished,
    FinishFirst,
    FinishRestore,
    Peer,
    RestoredPart,
    RestorePart,
    RestorePlan,
    ServePacks,
)


class RemoteRestore(RemoteRun):
    """One snapshot on its way to one machine. After a lost agent it begins again by itself, without
    fetching again what is on the disk.

    ``paths``: the directories that the snapshot may name, and is restored to. ``roots``: restore to
    these directories instead, whatever the snapshot names. ``first_s``: seconds until the files
    that come first could be used.
    """

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        wanted: StoredSnapshot,
        key: bytes | None,
        run: str,
        *,
        paths: Sequence[str] = (),
        roots: list[str] | None = None,
        parts: int = 32,
        part_bytes: int = 64 * MIB,
        gpu: GpuUse | None = None,
        first: Sequence[str] = (),
        aside: bool = False,
        keep_packages: bool = False,
    ) -> None:
        super().__init__(agent, store, key, run)
        self.wanted = wanted
        self._paths = paths
        self._roots = roots
        self._parts = parts
        self._part_bytes = part_bytes
        self._gpu = gpu
        self.first = first
        self._aside = aside
        self._keep_packages = keep_packages
        self._plan: RestorePlan | None = None
        self.first_s: float | None = None
        self._began_s = time.monotonic()
        self._finished: Finished | None = None
        self._changed: list[str] = []
        self.moved_aside = ""

    @property
    def plan(self) -> RestorePlan:
        """The plan that ``begin`` returned first."""
        if self._plan is None:
            raise RuntimeError("a restore has no plan before it has begun")
        return self._plan

    @property
    def finished(self) -> Finished:
        """What was restored by this run, or by the earlier one that completed it."""
        plan, finished = self.plan, self._finished
        if finished is None:
            return Finished(plan.files, plan.bytes, [])
        warnings = [
            f"{name!r} was used and changed before the rest was there" for name in self._changed
        ]
        warnings += [f"what the image had there is {name} now" for name in plan.moved_aside]
        warnings += [f"first: nothing in the snapshot matches {text!r}" for text in plan.unmatched]
        warnings += [
            f"{name} was left out, as git runs what a machine writes there: name its own path to "
            "restore it"
            for name in plan.left_out
        ]
        return msgspec.structs.replace(finished, warnings=[*warnings, *finished.warnings])

    def begin(self, *, resume: bool = False, rented: bool = False) -> RestorePlan:
        """Take the workspace on the machine; check the manifest, the targets and the free space.

        ``resume``: an earlier run may have begun this restore, or completed it. ``rented``: this
        run has rented the machine, so what is in the targets is its image's, and may be moved.
        """
        plan = self._call(
            BeginRestore(
                **self._of(self.wanted, self._paths),
                roots=self._roots,
                max_parts=self._parts,
                part_bytes=self._part_bytes,
                resume=resume,
                gpu=self._gpu,
                first=list(self.first),
                aside=self._aside and rented,
                keep_packages=self._keep_packages,
            )
        )
        return self._within_limits(plan)

    def serve(self, host: str, most_bytes: int) -> Peer:
        """Have the machine keep the packs that it fetches, at most this many bytes on disk, and
        pass them on to machines that reach it at ``host``, until the end of the run."""
        served = self._call_resuming(ServePacks(self.run, host, most_bytes))
        address = f"[{host}]" if ":" in host else host
        return Peer(f"https://{address}:{served.port}/{served.url}/", served.certificate)

    def restore_part(
        self,
        plan: RestorePart,
        on_event: OnEvent = None,
        *,
        peer: Peer | None = None,
        floor_bytes_s: float = 0.0,
    ) -> RestoredPart:
        """Fetch and write one part: from ``peer`` first, if there is one, and from the store what
        the peer does not deliver at ``floor_bytes_s``. Idempotent."""
        if peer is not None:
            peer = msgspec.structs.replace(peer, floor_bytes_s=floor_bytes_s)
        grants = [self._grant("GET", key, plan.stored_bytes) for key in plan.packs]
        return self._call_resuming(FetchPart(self.run, grants, peer, plan.pieces), on_event)

    def finish_first(self) -> Checked:
        """Finish the files that come first, once their parts are there. From then on they may be
        used."""
        checked = self._call_resuming(FinishFirst(self.run))
        self.first_s = time.monotonic() - self._began_s
        return checked

    def finish(self) -> Finished:
        """Set attributes, links and directories, once every part is there."""
        self._finished = self._call_resuming(FinishRestore(self.run))
        return self._finished

    def check(self, *, full: bool) -> Checked:
        """Compare the disk with the snapshot; ``full`` reads and hashes every byte."""
        checked = self._call_resuming(CheckRestore(self.run, full))
        self._changed, self.moved_aside = checked.changed, checked.moved_aside
        return checked

    def put_packages_back(self, *, rented: bool) -> PackagesBack:
        """Put back the packages that the snapshot names and the machine lacks."""
        return self._call(PutPackagesBack(self.run, rented), within_s=ANSWER_S)

    def end(self) -> None:
        """Give the workspace back."""
        self._send(EndRestore(self.run))

    def _within_limits(self, plan: RestorePlan) -> RestorePlan:
        """``parts`` parts at most, and one more where something comes first."""
        check_fetches(self.machine, self.wanted.workspace, plan.parts, self._parts + 1)
        self._plan = self._plan or plan
        return plan

    def _begin_again(self) -> None:
        self.begin(resume=True)
