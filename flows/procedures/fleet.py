"""A fleet: several machines that restore one snapshot at once, each on its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Final

from flows.procedures.restore import restore_run_before_handover
from tasks.autosave import start_autosave
from tasks.branch import branch
from tasks.machines import (
    create_machine,
    endpoint_of,
    hand_over,
    make_paths,
    open_session,
    own_machine,
)
from tasks.phases import measured_phases, phase, seconds_by_phase
from tasks.progress import Progress
from tasks.replicas import restore_share, serve_packs
from tasks.restore import check_restore, finish_first, finish_restore, new_restore, woken
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.providers.offers import preference
from torpor.control.remote.agent import Session
from torpor.control.remote.part_tracker import Member, PartTracker
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental.renting import Renting, Tenancy
from torpor.control.rental.search import Offers
from torpor.control.reports import Replica, ReplicateReport, WakeReport
from torpor.shared.errors import (
    HandedOver,
    InvalidInput,
    MachineError,
    RunCancelled,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import Machine, MachineId, StoredSnapshot
from torpor.shared.wire.restore import RestorePlan

MOST_MACHINES: Final = 64
MOST_SPARES: Final = 16
MOST_TASKS: Final = 64
"""The most task runs of parts, of all machines together: Prefect's server writes the state of
each."""
TOGETHER: Final = 8
"""Parts that one machine restores at the same time: its agent works on no more."""
WATCH_S: Final = 3.0
"""Seconds between two looks at what the provider says of the machines. A machine that is not
running in two looks is given up."""


POLITE_S: Final = 5.0
"""Seconds that an agent has to say that it has stopped; after that its machine is not waited for. A
worker that cancels a run kills it after half a minute."""


class _Surplus(RunCancelled):
    """Raised for a machine that is not needed, because enough other machines were ready first."""


@dataclass(frozen=True)
class FleetRequest:
    """What a user asks for: ``count`` rented machines, ``spares`` extra ones, and machines of the
    user's ``own``, each as user@host:port."""

    count: int
    spares: int
    own: Sequence[str]
    full_check: bool

    def __post_init__(self) -> None:
        count, spares, own = self.count, self.spares, self.own
        named = [endpoint_of(own_machine(text)) for text in own]
        if len({(end.host, end.port, end.user) for end in named}) < len(named):
            raise InvalidInput("a machine of your own is named twice: name each only once")
        if not 0 <= count <= MOST_MACHINES or not 0 <= spares <= MOST_SPARES:
            raise InvalidInput(
                f"count is 0 to {MOST_MACHINES} and spares 0 to {MOST_SPARES}, not {count} and "
                f"{spares}"
            )
        if not 1 <= self.total <= MOST_MACHINES:
            raise InvalidInput(
                f"{count} machines to rent and {len(own)} of your own: together there must be 1 "
                f"to {MOST_MACHINES}"
            )

    @property
    def total(self) -> int:
        return self.count + len(self.own)

    def new(self, left: Sequence[Tenancy]) -> int:
        """How many machines to rent beside those that earlier runs left."""
        return max(0, self.count + self.spares - len(left)) if self.count else 0


@dataclass
class _Candidate:
    """One machine that may become one of the fleet."""

    number: int
    name: str  # the machine's name, once it has one
    own: bool
    found: bool  # whether an earlier run left the machine
    seconds: dict[str, float] = field(default_factory=dict)
    kept: bool = False
    stopped_looks: int = 0
    machine: MachineId | None = None
    restore: RemoteRestore | None = None
    session: Session | None = None
    member: Member | None = None


class Fleet:
    """Restores ``wanted`` on the machines of a request.

    Keeps the first ``count`` machines that become ready and destroys the rest. A machine that fails
    later does not affect the others; while ``spares`` last, a new machine replaces it.
    """

    def __init__(
        self,
        opened: OpenWorkspace,
        wanted: StoredSnapshot,
        renting: Renting,
        offers: Offers,
        request: FleetRequest,
        tracker: PartTracker,
        *,
        together: bool = False,
    ) -> None:
        """``together``: if one machine fails, all are ended, and none is handed over."""
        self._opened = opened
        self._wanted = wanted
        self._renting = renting
        self._offers = offers
        self._request = request
        self._tracker = tracker
        self._together = together
        self._tasks = max(1, min(TOGETHER, MOST_TASKS // request.total))
        self._changed = threading.Condition()
        self._kept = 0
        self._stopped = False
        self._progress: Progress | None = None
        self._candidates: list[_Candidate] = []
        self._running: dict[Future[WakeReport], _Candidate] = {}
        self._never_ours = 0
        self._looked_at = 0.0
        self._replaced = 0
        self._replicas: list[Replica] = []
        # an error of one machine that is no TorporError, which is a bug
        self.fault: BaseException | None = None

    def bring(self, left: Sequence[Tenancy]) -> None:
        """Start all machines: the user's own, what earlier runs ``left``, and new ones. Return when
        each is handed over, destroyed or reported."""
        with phase("replicate"):
            self._bring_all(left)

    @property
    def ready(self) -> list[MachineId]:
        """The machines that hold the snapshot now."""
        return [MachineId(one.machine) for one in self._replicas if one.ready]

    def report(self, budgets: list[str]) -> ReplicateReport:
        return ReplicateReport(
            workspace=self._opened.spec.name,
            snapshot=self._wanted.snapshot,
            root=self._wanted.root,
            wanted=self._request.total,
            replaced=self._replaced,
            source=self._tracker.decision,
            replicas=self._replicas,
            seconds=seconds_by_phase(),
            budgets=budgets,
        )

    def _bring_all(self, left: Sequence[Tenancy]) -> None:
        own, new = self._request.own, self._request.new(left)
        most = len(left) + len(own) + new + self._request.spares
        with ThreadPoolExecutor(most, thread_name_prefix="replica") as threads:
            try:
                for text in own:
                    self._start(threads, text)
                for tenancy in left:
                    self._start(threads, left=tenancy)
                for _ in range(new):
                    self._start(threads)
                while self._running:
                    done, _ = wait([*self._running], WATCH_S, FIRST_COMPLETED)
                    for future in done:
                        self._settle(self._running.pop(future), future)
                    self._replace(threads)
                    self._look_at_machines()
            except BaseException:
                self._stop()
                if self._progress is not None:
                    self._progress.give_up()
                raise
        if self._progress is not None:
            self._progress.done()

    # -- on the flow's thread

    def _start(
        self, threads: ThreadPoolExecutor, own: str = "", left: Tenancy | None = None
    ) -> None:
        number = len(self._candidates)
        name = own or f"machine {number + 1}"
        candidate = _Candidate(number, name, bool(own), left is not None)
        self._candidates.append(candidate)
        context = copy_context()  # a task must know the flow run to which it belongs
        self._running[threads.submit(context.run, self._bring, candidate, left)] = candidate

    def _settle(self, candidate: _Candidate, future: Future[WakeReport]) -> None:
        error = future.exception()
        if error is None:
            self._replicas.append(_ready(candidate, future.result()))
            return
        with self._changed:
            began = candidate.kept
            if candidate.kept:
                candidate.kept = False
                self._kept -= 1
        if isinstance(error, _Surplus):
            return
        if self._together:
            raise error
        busy = isinstance(error, WorkspaceBusy | HandedOver) and not candidate.own
        if busy or (candidate.found and not began):
            # A machine that an earlier run left is of no use, or another run uses it. It does not
            # count.
            self._never_ours += 1
        runner().log.error("%s failed: %s", candidate.name, error)
        if not isinstance(error, TorporError):
            self.fault = self.fault or error
        self._replicas.append(_failed(candidate, error))

    def _replace(self, threads: ThreadPoolExecutor) -> None:
        rented_now = [c for c in self._running.values() if not c.own and not c.kept]
        missing = self._request.count - self._kept - len(rented_now)
        for _ in range(min(missing, self._request.spares + self._never_ours - self._replaced)):
            if self._renting.is_stuck:  # the error of its machine gives the reason
                return
            self._replaced += 1
            self._start(threads)

    def _look_at_machines(self) -> None:
        watched = [c for c in self._running.values() if c.machine is not None and not c.own]
        if not watched or time.monotonic() - self._looked_at < WATCH_S:
            return
        self._looked_at = time.monotonic()
        try:
            states = self._renting.states()
        except TorporError:
            return  # an unknown machine is not gone
        for candidate in watched:
            state = states.get(candidate.machine or MachineId(""), "gone")
            running = state in ("running", "starting")
            candidate.stopped_looks = 0 if running else candidate.stopped_looks + 1
            if candidate.stopped_looks >= 2 and candidate.restore is not None:
                candidate.restore.give_up(
                    MachineError(
                        f"machine {candidate.machine} died "
                        f"during the restore: its provider says that it is {state}"
                    )
                )
                if candidate.session is not None:
                    candidate.session.close()

    def _stop(self) -> None:
        """End the thread of each machine, which destroys the machine unless it was handed over."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._tracker.stop()
        polite_until = time.monotonic() + POLITE_S
        closed: set[int] = set()
        with ThreadPoolExecutor(TOGETHER, thread_name_prefix="replica-end") as threads:
            while self._running:
                for candidate in self._running.values():
                    if candidate.restore is not None:
                        candidate.restore.give_up(RunCancelled("the replicate was stopped"))
                    if (
                        candidate.session is not None
                        and candidate.number not in closed
                        and time.monotonic() > polite_until
                    ):
                        closed.add(candidate.number)
                        threads.submit(candidate.session.close)
                done, _ = wait([*self._running], 1.0)
                for future in done:
                    self._running.pop(future)

    # -- on each machine's thread

    def _bring(self, candidate: _Candidate, left: Tenancy | None) -> WakeReport:
        with measured_phases() as candidate.seconds, branch(lambda: candidate.name):
            return self._bring_up(candidate, left)

    def _bring_up(self, candidate: _Candidate, left: Tenancy | None) -> WakeReport:
        if candidate.own:
            own = Tenancy(own_machine(candidate.name), None, None, fresh=True)
            return self._restore(candidate, own)
        fitting = self._offers.fitting
        # The machines are spread over the offers with the preferred GPU, not all rented from the
        # cheapest. Machines that work together are of one kind.
        places = [preference(offer, self._opened.spec.want) for offer in fitting]
        alike = places.count(min(places, default=0))
        first = 0 if self._together else candidate.number % max(1, alike)
        offers = Offers([*fitting[first:alike], *fitting[:first], *fitting[alike:]], [])
        nap = self._nap_on if left else self._nap  # a machine that was found is not left again
        tenancy = create_machine(self._renting, offers, left, nap)
        with tenancy:
            candidate.name = candidate.machine = tenancy.machine.id
            return self._restore(candidate, tenancy)

    def _restore(self, candidate: _Candidate, tenancy: Tenancy) -> WakeReport:
        self._check()
        with open_session(self._opened, tenancy.machine) as session:
            restore = new_restore(self._opened, session, self._wanted)
            candidate.session, candidate.restore = session, restore
            with restore_run_before_handover(restore, tenancy):
                self._keep(candidate, restore.plan)
                if restore.plan.complete:
                    self._hand_over(tenancy, session)
                    return woken(self._opened, tenancy.machine, restore, self._request.full_check)
                with self._member(candidate, tenancy.machine, restore) as member:
                    with phase("restore"):
                        self._fetch(candidate, tenancy.machine, restore, member)
                    finish_restore(restore)
                    check_restore(restore, self._request.full_check)
                    self._hand_over(tenancy, session)
                    report = woken(self._opened, tenancy.machine, restore, self._request.full_check)
                    self._tracker.linger(member)
                    return report

    def _hand_over(self, tenancy: Tenancy, session: Session) -> None:
        if not self._together:
            if tenancy.rental is not None:
                make_paths(self._opened, session)
            hand_over(tenancy, alone=False)
            start_autosave(self._opened, session, tenancy.machine)

    def _keep(self, candidate: _Candidate, plan: RestorePlan) -> None:
        """Keep this machine; raises _Surplus if enough others were ready first."""
        self._check()
        with self._changed:
            # the user may work there, so the machine is never surplus
            if candidate.own or plan.complete:
                candidate.kept = not candidate.own
                self._kept += candidate.kept
            elif self._kept < self._request.count:
                candidate.kept = True
                self._kept += 1
            else:
                raise _Surplus("enough other machines were ready first")
            self._changed.notify_all()

    @contextmanager
    def _member(
        self, candidate: _Candidate, machine: Machine, restore: RemoteRestore
    ) -> Iterator[Member]:
        peer, plan = None, restore.plan
        if self._tracker.passing:
            host = endpoint_of(machine).host
            # on an error the machine passes nothing on to others; its own restore continues
            with suppress(TorporError):
                peer = serve_packs(restore, host, plan.stored_bytes)
        member = self._tracker.join(plan, peer)
        candidate.member = member
        try:
            yield member
        finally:
            member.leave()

    def _fetch(
        self, candidate: _Candidate, machine: Machine, restore: RemoteRestore, member: Member
    ) -> None:
        plan = restore.plan
        tasks = min(self._tasks, max(1, len(plan.parts)))
        together = -(-TOGETHER // tasks)
        progress = self._shared_progress(plan)

        def when_first() -> None:
            finish_first(restore, machine)

        # what comes first is there already
        if plan.first and not any(part.first for part in plan.parts):
            when_first()
        futures = [
            restore_share.submit(
                restore, member, candidate.name, number, together, progress, when_first
            )
            for number in range(1, tasks + 1)
        ]
        for future in futures:
            future.result()
        # a share that was repeated has not finished what comes first
        if plan.first and restore.first_s is None:
            when_first()

    def _shared_progress(self, plan: RestorePlan) -> Progress:
        with self._changed:
            if self._progress is None:
                name, count = self._opened.spec.name, self._request.total
                self._progress = Progress(
                    f"replicate-{name}-progress",
                    f"restoring {name} on {count} machines",
                    count * sum(part.bytes for part in plan.parts),
                )
            return self._progress

    def _check(self) -> None:
        if self._stopped:
            raise RunCancelled("the replicate was stopped")

    def _nap(self, seconds: float) -> None:
        """Sleep while a machine starts; raises when the machine is no longer needed."""
        with self._changed:
            self._changed.wait_for(self._enough, seconds)
            self._check()
            if self._enough():
                raise _Surplus("enough other machines were ready first")

    def _nap_on(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)
            self._check()

    def _enough(self) -> bool:
        return self._stopped or self._kept >= self._request.count


def _ready(candidate: _Candidate, report: WakeReport) -> Replica:
    member = candidate.member
    return Replica(
        machine=report.machine,
        ready=True,
        host=report.host,
        port=report.port,
        user=report.user,
        store_bytes=0 if member is None else member.store_bytes,
        peer_bytes=0 if member is None else member.peer_bytes,
        seconds=report.seconds,
        price_usd_h=report.price_usd_h,
        words=report.checked,
        warnings=report.warnings,
        first=report.first,
    )


def _failed(candidate: _Candidate, error: BaseException) -> Replica:
    return Replica(
        machine=candidate.name,
        ready=False,
        seconds=candidate.seconds,
        words=f"{type(error).__name__}: {error}",
    )
