"""Hibernate: a workspace goes into the store, is verified there, and its machine is destroyed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

import msgspec

from blocks import Workspace
from flows.flow import flow
from flows.phases import Phases
from tasks.machines import destroy_machine, endpoint_of, find_machine, open_session, own_machine
from tasks.opening import open_workspace, probe_store
from tasks.progress import Progress
from tasks.runner import runner
from tasks.snapshot import (
    begin_snapshot,
    commit,
    compare_packs,
    confirm,
    quiesce,
    scan,
    store_part,
    verify,
)
from tasks.workspace import OpenWorkspace
from torpor.control.remote.session import Session
from torpor.control.remote.snapshot import PartReport, RemoteSnapshot, Scan
from torpor.control.reports import HibernateReport
from torpor.control.safety import Verified
from torpor.shared.errors import AgentLost, GrantExpired, InvalidInput, StillChanging, TorporError
from torpor.shared.values import Machine, ObjectKey

MAX_PASSES: Final = 10
"""A workspace that still changes in the tenth pass needs a quiesce hook, not an eleventh."""
KEPT_PASSES: Final = 3
"""A machine that is kept need not come to rest: what changes is named in the snapshot."""
MAX_ROUNDS: Final = 3
"""Commits before giving up on a disk that changes between the commit and the last look."""


@flow("hibernate")
def hibernate(
    workspace: Workspace | str,
    destroy: bool = True,
    machine: str = "",
    accept_changed: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> HibernateReport:
    """Store a workspace, verify it, and destroy its machine.

    The machine is destroyed only when every byte is in the store, read back and compared, and the
    disk has not changed since.

    Args:
        workspace: The Workspace block to hibernate, or its name.
        destroy: Destroy the machine afterwards. Off: take a snapshot and keep the machine.
        machine: Which machine, when the workspace is on several: its id, or user@host:port for a
            machine of your own, which is never destroyed. Empty: the workspace's only machine.
        accept_changed: Patterns of files that may change while they are read, such as *.log.
    """
    report, _ = store_workspace(workspace, destroy, machine, accept_changed)
    runner().table(
        key=f"hibernate-{report.workspace}",
        rows=report.rows(),
        description=f"Workspace {report.workspace} hibernated as {report.snapshot}",
    )
    return report


def store_workspace(
    workspace: Workspace | str, destroy: bool, machine: str, accept_changed: list[str]
) -> tuple[HibernateReport, Verified]:
    """Hibernate within whichever flow asks for it; a backup goes on with the proof."""
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace)
        if accept_changed:
            patterns = [*opened.spec.accept_changed, *accept_changed]
            spec = msgspec.structs.replace(opened.spec, accept_changed=patterns)
            opened = replace(opened, spec=spec)
        probe_store(opened)
        live = own_machine(machine) if "@" in machine else find_machine(opened, machine)
        if destroy and live.label is None:
            raise InvalidInput(
                f"{machine} is your own machine, which torpor never destroys: turn `destroy` off"
            )
        session = open_session(opened, endpoint_of(live))
    with session:
        work = _Hibernation(opened, session, live, destroy, phases)
        with work.held():
            return work.run(), work.verified


class _Hibernation:
    """The order of one run, once the machine is attached to."""

    def __init__(
        self,
        opened: OpenWorkspace,
        session: Session,
        machine: Machine,
        destroy: bool,
        phases: Phases,
    ) -> None:
        self._opened = opened
        self._session = session
        self._machine = machine
        self._destroy = destroy
        self._phases = phases
        self._snapshot = RemoteSnapshot(
            session, opened.store, opened.spec, opened.key, runner().run
        )
        self._verified: Verified | None = None
        self._destroyed = False
        self._passes = 0
        self._rested = not opened.spec.quiesce
        self._stored: list[PartReport] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the workspace on the machine, and give it back however the run ends."""
        begin_snapshot(self._snapshot)
        try:
            yield
        finally:
            if not self._destroyed:
                with suppress(TorporError):  # the agent gives up by itself when it cannot be told
                    self._snapshot.end(committed=self._verified is not None)

    @property
    def verified(self) -> Verified:
        if self._verified is None:
            raise AssertionError("nothing was verified in this run")
        return self._verified

    def run(self) -> HibernateReport:
        for rounds_left in reversed(range(MAX_ROUNDS)):
            try:
                last = self._passes_until_nothing_is_new()
                report = self._commit_and_verify(last)
                if self._destroy:
                    self._destroy_machine()
                    report = msgspec.structs.replace(
                        report, destroyed=True, saved_usd_h=self._machine.price_usd_h
                    )
            except (AgentLost, GrantExpired, StillChanging) as error:
                # a new agent, a control side that slept before the commit, or a disk that changed
                # after it: go round once more
                if not rounds_left:
                    raise
                runner().log.warning("another round: %s", error)
            else:
                return msgspec.structs.replace(report, seconds=self._phases.seconds)
        raise AssertionError("the last round returns or raises")

    def _passes_until_nothing_is_new(self) -> Scan:
        lost: list[ObjectKey] = []
        most = MAX_PASSES if self._destroy else KEPT_PASSES
        for number in range(1, most + 1):
            self._passes += 1
            with self._phases.phase("scan"):
                seen = scan(self._snapshot, self._passes, lost)
            lost = []
            if seen.parts:
                with self._phases.phase("store"):
                    self._store_parts(seen)
            if seen.unaccepted_count and number < 2:
                continue
            if not self._rested:
                with self._phases.phase("quiesce"):
                    quiesce(self._snapshot)
                self._rested = True
                continue
            if seen.unaccepted_count and (self._destroy or number < most):
                continue
            lost = compare_packs(self._snapshot)
            if not lost:
                return seen
            runner().log.warning(
                "the store lacks %d packs, or prune has marked them: storing them anew", len(lost)
            )
        raise StillChanging(
            f"workspace {self._opened.spec.name} on machine {self._machine.id} changed in each of "
            f"{most} passes, last: {', '.join(seen.unaccepted)}. Nothing was destroyed. Stop what "
            "writes there (`quiesce` in the workspace block can), exclude these files, or accept "
            "them in `accept_changed`"
        )

    def _store_parts(self, seen: Scan) -> None:
        total = sum(plan.bytes for plan in seen.parts)
        name = self._opened.spec.name
        progress = Progress(
            f"hibernate-{name}-progress", f"Workspace {name}, pass {self._passes}", total
        )
        futures = [
            store_part.submit(self._snapshot, self._passes, plan, progress) for plan in seen.parts
        ]
        self._stored += [future.result() for future in futures]
        progress.done()

    def _commit_and_verify(self, last: Scan) -> HibernateReport:
        new_bytes = sum(part.new_bytes for part in self._stored)
        with self._phases.phase("commit"):
            stored, committed = commit(
                self._snapshot, {"new_bytes": new_bytes, "passes": self._passes}
            )
        if self._destroy and committed.unaccepted_count:
            raise StillChanging(
                f"{committed.unaccepted_count} files changed while they were read: "
                f"{', '.join(committed.unaccepted)}. The machine was not destroyed"
            )
        with self._phases.phase("verify"):
            verified = verify(self._opened, self._snapshot, stored)
        self._verified = verified
        packs = verified.manifest.packs
        return HibernateReport(
            workspace=self._opened.spec.name,
            snapshot=stored.snapshot,
            root=stored.root,
            machine=self._machine.id,
            destroyed=False,
            passes=self._passes,
            files=committed.files,
            bytes=committed.bytes,
            new_bytes=new_bytes,
            stored_bytes=sum(part.stored_bytes for part in self._stored),
            total_stored_bytes=sum(chunk.stored for chunk in verified.manifest.chunks),
            packs=len(packs),
            encoding=committed.encoding,
            sealed=self._opened.seal.sealed,
            changed=committed.unaccepted,
            skipped=last.skipped,
            seconds={},
            saved_usd_h=0.0,
        )

    def _destroy_machine(self) -> None:
        with self._phases.phase("confirm"):
            warrant = confirm(
                self._opened, self._snapshot, self.verified, self._machine, self._session
            )
        with self._phases.phase("destroy"):
            destroy_machine(self._opened, self._machine, warrant)
        self._destroyed = True
