"""Restoration: one snapshot on one machine, from the plan to the comparison of every byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from flows.procedures.parts import do_parts
from flows.procedures.phases import Phases
from tasks.events import FirstRestored, emit
from tasks.machines import endpoint_of
from tasks.restore import begin_restore, check_restore, finish_first, finish_restore, restore_part
from tasks.workspace import OpenWorkspace
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.seam import Agent
from torpor.control.rental.renting import Tenancy
from torpor.control.reports import FirstReport, WakeReport
from torpor.shared.errors import RestoreUnfinished, RunCancelled, TorporError
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
        self._began_s = 0.0
        self.first: FirstReport | None = None

    @contextmanager
    def begun(self) -> Iterator[RestorePlan]:
        """Hold the workspace on the machine, and release it at the end, also after an error."""
        self._began_s = time.monotonic()
        try:
            with self.phases.phase("plan"):
                plan = begin_restore(self.remote, resume=self._resume)
            yield plan
        except BaseException:
            self.remote.give_up(RunCancelled("the restore has failed: nothing more is fetched"))
            raise
        finally:
            with suppress(TorporError):  # an agent that cannot be reached ends the run itself
                self.remote.end()

    def restore(
        self,
        plan: RestorePlan,
        *,
        full_check: bool = True,
        when_submitted: Callable[[], None] = lambda: None,
        when_first: Callable[[], None] = lambda: None,
    ) -> Finished:
        """Fetch everything from the store, and finish.

        ``when_submitted`` is called when every part waits for its turn, if there are any.
        ``when_first`` is called once: when what the workspace wants first can be used, while the
        rest follows; in the end, if it wants nothing first. What it raises ends the restore.
        """
        if not plan.complete:
            with self.phases.phase("restore"):
                self._fetch(plan, when_submitted, when_first)
        finished = self.finish(plan, full_check=full_check)
        if not plan.first:
            when_first()
        return finished

    def finish_first(self, plan: RestorePlan) -> None:
        """Make what comes first usable, after its parts were fetched."""
        finish_first(self.remote)
        parts = [part for part in plan.parts if part.first]
        self.first = FirstReport(
            plan.first,
            sum(part.bytes for part in parts),
            sum(part.stored_bytes for part in parts),
            time.monotonic() - self._began_s,
        )

    def finish(self, plan: RestorePlan, *, full_check: bool) -> Finished:
        """Set attributes and links, and check, after every part was fetched."""
        if plan.complete:
            return Finished(plan.files, plan.bytes, [])
        with self.phases.phase("finish"):
            finished = finish_restore(self.remote)
        with self.phases.phase("check"):
            changed = check_restore(self.remote, full_check).changed
        warnings = [f"{name!r} was used and changed before the rest was there" for name in changed]
        warnings += [f"first: nothing in the snapshot matches {text!r}" for text in plan.unmatched]
        return replace(finished, warnings=[*warnings, *finished.warnings])

    def _fetch(
        self,
        plan: RestorePlan,
        when_submitted: Callable[[], None],
        when_first: Callable[[], None],
    ) -> None:
        wanted = self.remote.wanted

        def reached() -> None:
            self.finish_first(plan)
            when_first()

        do_parts(
            f"{self._flow}-{wanted.workspace}-progress",
            f"Workspace {wanted.workspace} from {wanted.snapshot}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: restore_part.submit(self.remote, part, progress),
            submitted=when_submitted,
            after=(sum(part.first for part in plan.parts), reached) if plan.first else None,
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
            paths=opened.spec.restorable,
            parts=opened.spec.parts,
            part_bytes=opened.spec.part_bytes,
            gpu=opened.spec.compression.gpu,
            first=opened.spec.first,
        )
        super().__init__(remote, "wake", phases, resume=not tenancy.fresh)
        self.tenancy = tenancy
        self._accepted = opened.spec.accept_paths

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

    def finish_first(self, plan: RestorePlan) -> None:
        super().finish_first(plan)
        if self.first is not None:
            wanted, machine = self.remote.wanted, self.tenancy.machine
            emit(
                FirstRestored(
                    workspace=wanted.workspace,
                    snapshot=wanted.snapshot,
                    machine=machine.id,
                    provider=machine.provider,
                    names=self.first.names,
                    bytes=self.first.bytes,
                    seconds=self.first.seconds,
                )
            )

    def hand_over(
        self, plan: RestorePlan, finished: Finished, *, full_check: bool, alone: bool = False
    ) -> WakeReport:
        """Hand the machine over: it is the user's from now on."""
        fetched_s = self.phases.seconds.get("restore", 0.0)
        if alone and self.tenancy.fresh:  # all of it from the store
            self.tenancy.hand_over(alone=True, fetched_bytes=plan.stored_bytes, fetched_s=fetched_s)
        else:
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
            warnings=[
                *(
                    f"{path} is not among the workspace's paths: no further snapshot keeps it"
                    for path in self._accepted
                ),
                *finished.warnings,
            ],
            seconds=self.phases.seconds,
            price_usd_h=machine.price_usd_h,
            decoding=finished.decoding,
            provider=machine.provider,
            first=self.first,
        )


def _checked(plan: RestorePlan, full_check: bool) -> str:
    if plan.complete:
        return "by the earlier wake that restored it; nothing was written by this one"
    return "every byte and attribute" if full_check else "names and attributes"
