"""A benchmark's own place: a name in the store that it holds alone, and machines to measure on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event

from msgspec import structs
from prefect.futures import PrefectFuture

from flows.phases import Phases
from tasks.machines import (
    create_machine,
    destroy_created,
    endpoint_of,
    find_offers,
    open_session,
    own_machine,
)
from tasks.measure import clear_scratch, end_left_machines, remove_machine_content
from tasks.place import Place
from torpor.errors import RunCancelled, TorporError
from torpor.ledger import Lease, Ledger
from torpor.measure.scratch import held, machines_name
from torpor.remote.session import Session
from torpor.values import Endpoint, Machine, WorkspaceName


@dataclass(frozen=True)
class ScratchMachine:
    """A machine to measure on. ``address`` is user@host:port, as flows take a machine of one's own;
    ``here``: it is on the host where the flow runs."""

    session: Session
    address: str
    here: bool


@contextmanager
def held_and_cleared(place: Place, workspace: WorkspaceName, run: str) -> Iterator[None]:
    """Nobody else measures under the place's name meanwhile. What a killed run left there is
    cleared first, machines too, and everything of this run at the end, however it ends."""
    with held(place.store, place.spec.name, run):
        _clear(place, workspace)
        try:
            yield
        finally:
            _clear(place, workspace)


@contextmanager
def scratch_machines(
    place: Place, workspace: WorkspaceName, own: str, count: int, phases: Phases
) -> Iterator[list[ScratchMachine]]:
    """The user's own machine, or ``count`` rented ones that are destroyed at the end.

    Rented ones are never handed over: they hold nobody's work, so they may always be destroyed.
    """
    if own:
        with _attached(place, workspace, own_machine(own), here=False) as own_one:
            try:
                yield [own_one]
            finally:
                with suppress(TorporError):  # it is away: the next benchmark on it removes it
                    remove_machine_content(own_one.session, place.spec.name, place_too=True)
        return
    ended = Event()

    def nap(seconds: float) -> None:
        if ended.wait(seconds):
            raise RunCancelled("the benchmark ended before all of its machines were ready")

    with ExitStack() as stack:
        with phases.phase("machines"):
            mine = _machines_place(place, workspace)
            offers = find_offers(mine)
            creating = []
            for _ in range(count):
                lease = mine.ledger.open_lease(mine.owner, mine.provider.identity)
                future = create_machine.submit(mine, offers, lease, True, nap)
                stack.callback(_end, mine, lease, future, ended)
                creating.append(future)
            live = [future.result() for future in creating]
            here = place.provider.identity.startswith("local:")
            scratch = [
                stack.enter_context(_attached(place, workspace, machine, here=here))
                for machine in live
            ]
        yield scratch


@contextmanager
def _attached(
    place: Place, workspace: WorkspaceName, machine: Machine, *, here: bool
) -> Iterator[ScratchMachine]:
    endpoint = Ledger(place.store, workspace).pinned(endpoint_of(machine))
    if endpoint.host_key is not None:
        place.ledger.pin(endpoint, endpoint.host_key)
    with open_session(place, endpoint) as session:
        yield ScratchMachine(session, _address(endpoint), here)


def _end(place: Place, lease: Lease, creating: PrefectFuture[Machine], ended: Event) -> None:
    """Its task first: one that is still creating would rent again after the destroy."""
    ended.set()
    with suppress(Exception):  # whoever waited for the machine has heard why there is none
        creating.result()
    destroy_created(place, lease)


def _clear(place: Place, workspace: WorkspaceName) -> None:
    machines = _machines_place(place, workspace)
    end_left_machines(machines)
    clear_scratch(machines, "")
    clear_scratch(place, "")


def _machines_place(place: Place, workspace: WorkspaceName) -> Place:
    spec = structs.replace(place.spec, name=machines_name(workspace))
    return replace(place, spec=spec)


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.user}@{host}:{endpoint.port}"
