"""One snapshot of a machine's workspace, until it is verified or the machine is destroyed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, Self

from msgspec.structs import replace

from flows.procedures.parts import do_parts
from flows.procedures.phases import Phases
from tasks.guards import Ending, Guard, check_guards
from tasks.machines import destroy_machine
from tasks.runner import runner
from tasks.snapshot import (
    begin_snapshot,
    commit,
    compare_packs,
    confirm,
    log_losses,
    look_for_losses,
    quiesce,
    scan,
    store_part,
    verify,
)
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.losses import Lost, judge_losses, with_missed
from torpor.control.remote.seam import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import HibernateReport
from torpor.control.safety import Verified
from torpor.shared.errors import AgentLost, GrantExpired, StillChanging, TorporError, UnsafeDestroy
from torpor.shared.values import Machine, ObjectKey
from torpor.shared.wire.snapshot import PartReport, Scanned

MAX_PASSES: Final = 10
"""A workspace that still changes in the tenth pass needs a quiesce hook, not an eleventh."""
KEPT_PASSES: Final = 3
"""A machine that is kept need not come to rest: what changes is named in the snapshot."""
MAX_ROUNDS: Final = 3
"""Commits before giving up on a disk that changes between the commit and the last look."""

LAST_ROUND: Final = "the last round returns or raises"

LOOK_S: Final = 2.0
"""How long a snapshot that is ready waits for the look at what would be lost."""
LOOK_TO_REFUSE_S: Final = 60.0
"""The same where the block refuses losses."""


class Look(NamedTuple):
    """Look for what is on the machine and not in the snapshot. ``rented``: torpor rented it;
    ``whole``: look beyond where links of the workspace lead, before a destroy."""

    rented: bool
    whole: bool


def take_snapshot(
    workspace: StoredWorkspace,
    session: Agent,
    machine: str,
    phases: Phases,
    *,
    run: str = "",
    look: Look | None = None,
) -> tuple[HibernateReport, Verified]:
    """Store the workspace of a machine that is kept, and verify it. What changes meanwhile is named
    in the report. ``run`` and ``look``: as in Snapshot."""
    with Snapshot(workspace, session, machine, phases, run=run, look=look) as snapshot:
        for again in snapshot.rounds():
            with again:
                return snapshot.commit(snapshot.store_changes())
    raise AssertionError(LAST_ROUND)


def back_up(
    opened: OpenWorkspace, session: Agent, machine: Machine, phases: Phases
) -> tuple[HibernateReport, Verified]:
    """Take a snapshot of a machine that its user keeps, and warn of what that lacks."""
    look = Look(rented=machine.label is not None, whole=False)
    report, verified = take_snapshot(opened, session, machine.id, phases, look=look)
    log_losses(machine, report.lost)
    return report, verified


def hibernate_machine(
    opened: OpenWorkspace,
    session: Agent,
    machine: Machine,
    phases: Phases,
    guards: Sequence[Guard],
    *,
    run: str = "",
) -> tuple[HibernateReport, Verified]:
    """Store the workspace of a machine, verify it, and destroy the machine if all guards agree. A
    disk that changes after the snapshot is stored once more. ``run``: as in Snapshot."""
    check_guards(guards, Ending(machine))
    look = Look(rented=True, whole=True)
    with Snapshot(opened, session, machine.id, phases, guards, machine, run, look) as snapshot:
        for again in snapshot.rounds():
            with again:
                report, verified = snapshot.commit(snapshot.store_changes())
                snapshot.destroy(opened, verified)
                saved_usd_h = machine.price_usd_h
                report = replace(report, destroyed=True, saved_usd_h=saved_usd_h)
                return report, verified
    raise AssertionError(LAST_ROUND)


class Snapshot:
    """One snapshot over an open session: holds the workspace on the machine, and releases it at the
    end, also after an error. ``ends``: the machine that is destroyed once the snapshot is verified
    and the ``guards`` agree; None keeps it. ``run`` names the snapshot to the agent, where a flow
    run takes several of a machine. ``look``: also look for what the snapshot lacks."""

    def __init__(
        self,
        workspace: StoredWorkspace,
        session: Agent,
        machine: str,
        phases: Phases,
        guards: Sequence[Guard] = (),
        ends: Machine | None = None,
        run: str = "",
        look: Look | None = None,
    ) -> None:
        self._workspace = workspace
        self._session = session
        self._machine = machine
        self._phases = phases
        self._guards = guards
        self._ends = ends
        self._look = look
        self._lost = Lost()
        self._remote = RemoteSnapshot(
            session, workspace.store, workspace.spec, workspace.key, run or runner().run
        )
        self._committed = False
        self._passes = 0
        self._rested = not workspace.spec.quiesce
        self._stored: list[PartReport] = []
        self._destroyed = False

    def __enter__(self) -> Self:
        begin_snapshot(self._remote)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._destroyed:
            with suppress(TorporError):  # an agent that cannot be reached ends the run itself
                self._remote.end(committed=self._committed)

    def rounds(self) -> Iterator[AbstractContextManager[None]]:
        """Contexts for one try each, until one succeeds: after a new agent, a control side that
        slept before the commit, or a disk that changed after it, there is another one."""
        for left in reversed(range(MAX_ROUNDS)):
            yield self._round(left)

    @contextmanager
    def _round(self, left: int) -> Iterator[None]:
        try:
            yield
        except (AgentLost, GrantExpired, StillChanging) as error:
            if not left:
                raise
            runner().log.warning("another round: %s", error)

    def store_changes(self) -> Scanned:
        """Scan and store until nothing is new, and until no program writes if the machine ends."""
        self._look_for_losses(wait_s=0.0)
        return self._passes_until_nothing_is_new()

    def destroy(self, opened: OpenWorkspace, verified: Verified) -> None:
        """Compare the disk once more, ask the guards, and destroy the machine."""
        machine = self._ends
        if machine is None:
            raise UnsafeDestroy(f"the snapshot of machine {self._machine} was taken to keep it")
        ending = Ending(machine, self._lost, verified)
        last_look = partial(check_guards, self._guards, ending, only_store=True)
        with self._phases.phase("confirm"):
            warrant = confirm(opened, self._remote, verified, machine, self._session, last_look)
            check_guards(self._guards, ending)
        with self._phases.phase("destroy"):
            destroy_machine(opened, machine, warrant)
        self._destroyed = True

    def _passes_until_nothing_is_new(self) -> Scanned:
        lost: list[ObjectKey] = []
        must_rest = self._ends is not None
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
                    if self._ends is not None:
                        check_guards(self._guards, Ending(self._ends, self._lost))
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
            losses = look_for_losses(self._remote, **self._look._asdict(), wait_s=wait_s)
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

    def commit(self, last: Scanned) -> tuple[HibernateReport, Verified]:
        """Write the manifest, and verify the snapshot in the store."""
        new_bytes = sum(part.new_bytes for part in self._stored)
        self._lost = with_missed(self._lost, last.missed)
        if self._ends is not None and not new_bytes:
            check_guards(self._guards, Ending(self._ends, self._lost, nothing_new=True))
        with self._phases.phase("commit"):
            stored, committed = commit(
                self._remote, {"new_bytes": new_bytes, "passes": self._passes}
            )
        if self._ends is not None and committed.unaccepted_count:
            raise StillChanging(
                f"{committed.unaccepted_count} files changed while they were read: "
                f"{', '.join(committed.unaccepted)}. The machine was not destroyed: hibernate "
                "again, or accept these files in `accept_changed`"
            )
        with self._phases.phase("verify"):
            verified = verify(self._workspace, self._remote, stored, self._machine)
        self._committed = True
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
            shrunk=bool(last.missed.vanished or last.missed.disks),
            seconds=self._phases.seconds,
            saved_usd_h=0.0,
        )
        return report, verified
