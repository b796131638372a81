"""Restoration: one snapshot on one machine, from the plan to the comparison of every byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flows.parts import do_parts
from flows.phases import Phases
from tasks.machines import endpoint_of
from tasks.restore import begin_restore, check_restore, finish_restore, restore_part
from tasks.workspace import OpenWorkspace
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.seam import Agent
from torpor.control.rental.renting import Tenancy
from torpor.control.reports import WakeReport
from torpor.shared.errors import RestoreUnfinished, TorporError
from torpor.shared.values import StoredSnapshot
from torpor.shared.wire.restore import Finished, RestorePlan


class Restoration:
    """The order of one machine's restore: ``begun``, ``fetch``, ``finish``. ``resume``: an earlier
    run may have begun it."""

    def __init__(
        self, remote: RemoteRestore, flow: str, phases: Phases, *, resume: bool = False
    ) -> None:
        self.remote = remote
        self.phases = phases
        self._flow = flow
        self._resume = resume

    @contextmanager
    def begun(self) -> Iterator[RestorePlan]:
        """Hold the workspace on the machine, and release it at the end, also after an error."""
        try:
            with self.phases.phase("plan"):
                plan = begin_restore(self.remote, resume=self._resume)
            yield plan
        finally:
            with suppress(TorporError):  # an agent that cannot be reached ends the run itself
                self.remote.end()

    def restore(self, plan: RestorePlan, *, full_check: bool = True) -> Finished:
        """Fetch everything from the store, and finish."""
        if not plan.complete:
            with self.phases.phase("restore"):
                self._fetch(plan)
        return self.finish(plan, full_check=full_check)

    def finish(self, plan: RestorePlan, *, full_check: bool) -> Finished:
        """Set attributes and links, and check, after every part was fetched."""
        if plan.complete:
            return Finished(plan.files, plan.bytes, [])
        with self.phases.phase("finish"):
            finished = finish_restore(self.remote)
        with self.phases.phase("check"):
            check_restore(self.remote, full_check)
        return finished

    def _fetch(self, plan: RestorePlan) -> None:
        wanted = self.remote.wanted
        do_parts(
            f"{self._flow}-{wanted.workspace}-progress",
            f"Workspace {wanted.workspace} from {wanted.snapshot}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: restore_part.submit(self.remote, part, progress),
        )


class Arrival(Restoration):
    """A restoration after which the machine is handed over. A wake restores from the store; a
    replica also fetches from its peers."""

    def __init__(
        self,
        opened: OpenWorkspace,
        session: Agent,
        tenancy: Tenancy,
        wanted: StoredSnapshot,
        run: str,
        phases: Phases,
    ) -> None:
        remote = RemoteRestore(
            session,
            opened.store,
            wanted,
            opened.key,
            run,
            parts=opened.spec.parts,
            part_bytes=opened.spec.part_bytes,
            gpu=opened.spec.compression.gpu,
        )
        super().__init__(remote, "wake", phases, resume=not tenancy.fresh)
        self.tenancy = tenancy

    @contextmanager
    def begun(self) -> Iterator[RestorePlan]:
        try:
            with super().begun() as plan:
                if not plan.complete:
                    self.tenancy.holds_nothing_else()
                yield plan
        except RestoreUnfinished:  # of another snapshot, and nothing else
            self.tenancy.holds_nothing_else()
            raise

    def hand_over(
        self, plan: RestorePlan, finished: Finished, *, full_check: bool, alone: bool = False
    ) -> WakeReport:
        """Hand the machine over: it is the user's from now on."""
        self.tenancy.hand_over(alone=alone)
        machine = self.tenancy.machine
        endpoint = endpoint_of(machine)
        wanted = self.remote.wanted
        return WakeReport(
            workspace=wanted.workspace,
            snapshot=wanted.snapshot,
            root=wanted.root,
            machine=machine.id,
            host=endpoint.host,
            port=endpoint.port,
            user=endpoint.user,
            roots=plan.roots,
            files=finished.files,
            bytes=finished.bytes,
            stored_bytes=plan.stored_bytes,
            checked=_checked(plan, full_check),
            warnings=finished.warnings,
            seconds=self.phases.seconds,
            price_usd_h=machine.price_usd_h,
            decoding=finished.decoding,
            provider=machine.provider,
        )


def _checked(plan: RestorePlan, full_check: bool) -> str:
    if plan.complete:
        return "by the earlier wake that restored it; nothing was written by this one"
    return "every byte and attribute" if full_check else "names and attributes"
