"""Storing: the steps of one snapshot of a machine's workspace, until it is verified."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from flows.procedures.parts import do_parts
from flows.procedures.phases import Phases
from tasks.runner import runner
from tasks.snapshot import (
    begin_snapshot,
    commit,
    compare_packs,
    look_for_losses,
    quiesce,
    scan,
    store_part,
    verify,
)
from tasks.workspace import StoredWorkspace
from torpor.control.losses import Lost, judge_losses, with_missed
from torpor.control.remote.seam import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import HibernateReport
from torpor.control.safety import Verified
from torpor.shared.errors import AgentLost, GrantExpired, StillChanging, TorporError
from torpor.shared.values import ObjectKey
from torpor.shared.wire.snapshot import PartReport, Scanned

MAX_PASSES: Final = 10
"""A workspace that still changes in the tenth pass needs a quiesce hook, not an eleventh."""
KEPT_PASSES: Final = 3
"""A machine that is kept need not come to rest: what changes is named in the snapshot."""
MAX_ROUNDS: Final = 3
"""Commits before giving up on a disk that changes between the commit and the last look."""

LOOK_S: Final = 2.0
"""How long a snapshot that is ready waits for the look at what would be lost."""
LOOK_TO_REFUSE_S: Final = 60.0
"""The same where the block refuses losses."""

End: TypeAlias = Callable[[RemoteSnapshot, Verified, Lost], None]


class Look(NamedTuple):
    """Look for what is on the machine and not in the snapshot. ``rented``: torpor rented it;
    ``whole``: look beyond where links of the workspace lead, before a destroy."""

    rented: bool
    whole: bool


class Storing:
    """One snapshot over an open session. ``end`` ends the machine once the snapshot is verified,
    or raises StillChanging where the disk has changed since; without it the machine is kept.
    ``before_quiesce`` may raise to keep the user's programs as they are. ``run`` names it to the
    agent, where a flow run takes several snapshots of a machine. ``look``: also look for what the
    snapshot lacks. ``nothing_new`` is called before the commit, if all content is in the store
    already, and may raise to make no further snapshot."""

    def __init__(
        self,
        workspace: StoredWorkspace,
        session: Agent,
        machine: str,
        phases: Phases,
        end: End | None = None,
        before_quiesce: Callable[[], None] = lambda: None,
        run: str = "",
        look: Look | None = None,
        nothing_new: Callable[[Lost], None] = lambda lost: None,
    ) -> None:
        self._workspace = workspace
        self._machine = machine
        self._phases = phases
        self._end = end
        self._look = look
        self._nothing_new = nothing_new
        self._lost = Lost()
        self._before_quiesce = before_quiesce
        self._remote = RemoteSnapshot(
            session, workspace.store, workspace.spec, workspace.key, run or runner().run
        )
        self._verified: Verified | None = None
        self._passes = 0
        self._rested = not workspace.spec.quiesce
        self._stored: list[PartReport] = []

    def run(self) -> tuple[HibernateReport, Verified]:
        """Hold the workspace on the machine, and release it at the end, also after an error."""
        begin_snapshot(self._remote)
        ended = False
        try:
            for rounds_left in reversed(range(MAX_ROUNDS)):
                try:
                    self._look_for_losses(wait_s=0.0)
                    last = self._passes_until_nothing_is_new()
                    if not any(part.new_bytes for part in self._stored):
                        self._nothing_new(self._lost)
                    report, verified = self._commit_and_verify(last)
                    if self._end is not None:
                        self._end(self._remote, verified, self._lost)
                        ended = True
                except (AgentLost, GrantExpired, StillChanging) as error:
                    # a new agent, a control side that slept before the commit, or a disk that
                    # changed after it: go round once more
                    if not rounds_left:
                        raise
                    runner().log.warning("another round: %s", error)
                else:
                    return report, verified
            raise AssertionError("the last round returns or raises")
        finally:
            if not ended:
                with suppress(TorporError):  # an agent that cannot be reached ends the run itself
                    self._remote.end(committed=self._verified is not None)

    def _passes_until_nothing_is_new(self) -> Scanned:
        lost: list[ObjectKey] = []
        must_rest = self._end is not None
        most = MAX_PASSES if must_rest else KEPT_PASSES
        for number in range(1, most + 1):
            self._passes += 1
            with self._phases.phase("scan"):
                seen = scan(self._remote, self._passes, lost)
            lost = []
            if seen.parts:
                with self._phases.phase("store"):
                    self._store_parts(seen)
            if seen.unaccepted_count and number < 2:
                continue
            if not self._rested:
                with self._phases.phase("quiesce"):
                    self._before_quiesce()
                    quiesce(self._remote)
                self._rested = True
                continue
            if seen.unaccepted_count and (must_rest or number < most):
                continue
            self._look_for_losses()
            lost = compare_packs(self._remote)
            if not lost:
                return seen
            runner().log.warning(
                "%d packs are missing in the store or marked by prune: storing their chunks again",
                len(lost),
            )
        raise StillChanging(
            f"workspace {self._workspace.spec.name} on machine {self._machine} changed in each of "
            f"{most} passes, last: {', '.join(seen.unaccepted)}. Nothing was destroyed. Stop the "
            "program that writes there (`quiesce` in the workspace block can), exclude these "
            "files, or accept them in `accept_changed`"
        )

    def _look_for_losses(self, wait_s: float | None = None) -> None:
        """Begin the look beside the passes, or wait for its end."""
        if self._look is None or (wait_s == 0.0 and not self._look.whole):
            return
        spec = self._workspace.spec
        if wait_s is None:
            wait_s = LOOK_TO_REFUSE_S if spec.left_behind == "refuse" else LOOK_S
        with self._phases.phase("look"):
            losses = look_for_losses(self._remote, *self._look, wait_s)
        self._lost = judge_losses(losses, spec)

    def _store_parts(self, seen: Scanned) -> None:
        name = self._workspace.spec.name
        self._stored += do_parts(
            f"hibernate-{name}-progress",
            f"Workspace {name}, pass {self._passes}",
            sum(plan.bytes for plan in seen.parts),
            seen.parts,
            lambda plan, progress: store_part.submit(self._remote, self._passes, plan, progress),
        )

    def _commit_and_verify(self, last: Scanned) -> tuple[HibernateReport, Verified]:
        new_bytes = sum(part.new_bytes for part in self._stored)
        with self._phases.phase("commit"):
            stored, committed = commit(
                self._remote, {"new_bytes": new_bytes, "passes": self._passes}
            )
        self._lost = with_missed(self._lost, committed.missed)
        if self._end is not None and committed.unaccepted_count:
            raise StillChanging(
                f"{committed.unaccepted_count} files changed while they were read: "
                f"{', '.join(committed.unaccepted)}. The machine was not destroyed: hibernate "
                "again, or accept these files in `accept_changed`"
            )
        with self._phases.phase("verify"):
            verified = verify(self._workspace, self._remote, stored, self._machine)
        self._verified = verified
        report = HibernateReport(
            workspace=self._workspace.spec.name,
            snapshot=stored.snapshot,
            root=stored.root,
            machine=self._machine,
            destroyed=False,
            passes=self._passes,
            files=committed.files,
            bytes=committed.bytes,
            new_bytes=new_bytes,
            stored_bytes=sum(part.stored_bytes for part in self._stored),
            total_stored_bytes=sum(chunk.stored for chunk in verified.manifest.chunks),
            packs=len(verified.manifest.packs),
            encoding=committed.encoding,
            sealed=self._workspace.seal.sealed,
            changed=committed.unaccepted,
            skipped=last.skipped,
            parted_count=last.parted_count,
            parted=last.parted,
            lost=self._lost.lines,
            shrunk=bool(committed.missed.vanished or committed.missed.disks),
            seconds=self._phases.seconds,
            saved_usd_h=0.0,
        )
        return report, verified
