"""A benchmark's own place: a name in the store that it holds alone, and a machine to measure on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from torpor.ledger import Ledger
from torpor.measure.scratch import held
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
def held_and_cleared(place: Place, run: str) -> Iterator[None]:
    """Nobody else measures under the place's name meanwhile. What a killed run left there is
    cleared first, machines too, and everything of this run at the end, however it ends."""
    with held(place.store, place.spec.name, run):
        _clear(place)
        try:
            yield
        finally:
            _clear(place)


@contextmanager
def scratch_machine(
    place: Place, workspace: WorkspaceName, own: str, phases: Phases
) -> Iterator[ScratchMachine]:
    """The user's own machine, or a rented one that is destroyed at the end.

    A rented one is never handed over: it holds nobody's work, so it may always be destroyed.
    """
    if own:
        with _attached(place, workspace, own_machine(own), here=False) as scratch:
            yield scratch
        return
    with phases.phase("machine"):
        offers = find_offers(place)
        lease = place.ledger.open_lease(place.owner, place.provider.identity)
    try:
        with phases.phase("machine"):
            live = create_machine(place, offers, lease, True)
        here = place.provider.identity.startswith("local:")
        with _attached(place, workspace, live, here=here) as scratch:
            yield scratch
    finally:
        destroy_created(place, lease)


@contextmanager
def _attached(
    place: Place, workspace: WorkspaceName, machine: Machine, *, here: bool
) -> Iterator[ScratchMachine]:
    endpoint = Ledger(place.store, workspace).pinned(endpoint_of(machine))
    if endpoint.host_key is not None:
        place.ledger.pin(endpoint, endpoint.host_key)
    with open_session(place, endpoint) as session:
        try:
            yield ScratchMachine(session, _address(endpoint), here)
        finally:
            remove_machine_content(session, place.spec.name, place_too=True)


def _clear(place: Place) -> None:
    end_left_machines(place)
    clear_scratch(place, "")


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.user}@{host}:{endpoint.port}"
