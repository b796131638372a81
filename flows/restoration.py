"""Restoration: one snapshot on one machine, from the plan until the machine is handed over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flows.phases import Phases
from flows.tenancy import Tenancy
from tasks.machines import endpoint_of
from tasks.restore import begin_restore, check_restore, finish_restore
from tasks.workspace import OpenWorkspace
from torpor.control.remote.restore import Finished, RemoteRestore, RestorePlan
from torpor.control.remote.session import Session
from torpor.control.reports import WakeReport
from torpor.shared.errors import RestoreUnfinished, TorporError
from torpor.shared.values import StoredSnapshot


class Restoration:
    """The order of one machine's restore. Fetching the parts lies between ``begun`` and
    ``complete``, and differs: a wake asks the store, a replica its peers too."""

    def __init__(
        self,
        opened: OpenWorkspace,
        session: Session,
        tenancy: Tenancy,
        wanted: StoredSnapshot,
        run: str,
        phases: Phases,
    ) -> None:
        self.opened = opened
        self.tenancy = tenancy
        self.phases = phases
        self.remote = RemoteRestore(
            session,
            opened.store,
            wanted,
            opened.key,
            run,
            parts=opened.spec.parts,
            part_bytes=opened.spec.part_bytes,
        )

    @contextmanager
    def begun(self) -> Iterator[RestorePlan]:
        """Hold the workspace on the machine, and give it back however this ends."""
        try:
            with self.phases.phase("plan"):
                plan = begin_restore(self.remote, resume=not self.tenancy.fresh)
            if not plan.complete:
                self.tenancy.holds_nothing_else()
            yield plan
        except RestoreUnfinished:  # of another snapshot, and nothing else
            self.tenancy.holds_nothing_else()
            raise
        finally:
            with suppress(TorporError):  # the agent gives up by itself when it cannot be told
                self.remote.end()

    def complete(self, plan: RestorePlan, full_check: bool) -> WakeReport:
        """Attributes and links, the check, and then the machine is the user's."""
        finished = Finished(plan.files, plan.bytes, [], 0)
        if not plan.complete:
            with self.phases.phase("finish"):
                finished = finish_restore(self.remote)
            with self.phases.phase("check"):
                check_restore(self.remote, full_check)
        self.tenancy.hand_over()
        return self._report(plan, finished, full_check)

    def _report(self, plan: RestorePlan, finished: Finished, full_check: bool) -> WakeReport:
        machine = self.tenancy.machine
        endpoint = endpoint_of(machine)
        wanted = self.remote.wanted
        return WakeReport(
            workspace=self.opened.spec.name,
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
        )


def _checked(plan: RestorePlan, full_check: bool) -> str:
    if plan.complete:
        return "by the earlier wake that restored it; nothing was written by this one"
    return "every byte and attribute" if full_check else "names and attributes"
