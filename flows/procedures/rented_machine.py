"""The one machine that a flow rents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tasks.machines import (
    create_machine,
    end_abandoned,
    left_unfinished,
    look_for_offers,
    open_session,
    own_machine,
    renting,
    say_choice,
    show_offers,
)
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Session
from torpor.control.rental.renting import Tenancy
from torpor.control.rental.search import Offers
from torpor.shared.values import WorkspaceName


@contextmanager
def rented_machine(opened: OpenWorkspace) -> Iterator[Tenancy]:
    """A new machine for the workspace, or the one that a killed run left; it is ended after a
    failure, if that loses no work. WorkspaceAwake if the workspace is on a machine already."""
    with renting(opened) as held:
        end_abandoned(held)
        left = left_unfinished(opened, held, alone=True)
        offers = Offers([], []) if left else look_for_offers(opened)
        try:
            tenancy = create_machine(held, offers, left[0] if left else None)
            if tenancy.rental is not None:
                tenancy.chosen = say_choice(offers, tenancy.rental)
        finally:
            if not left:
                show_offers(opened, held, offers)
        with tenancy:
            yield tenancy


@contextmanager
def machine_under(opened: OpenWorkspace, name: WorkspaceName) -> Iterator[Session]:
    """A new machine that fits the workspace, under a reserved name, so that no wake or hibernate
    uses it. It holds no work: it is never handed over, and always destroyed."""
    mine = opened.under(name)
    with renting(mine) as held:
        machine = create_machine(held, look_for_offers(mine)).machine
        with open_session(mine, machine) as session:
            yield session


@contextmanager
def own_or_rented_machine(opened: OpenWorkspace, own: str) -> Iterator[Tenancy]:
    """The user's own machine, which is never ended, or a rented one."""
    if own:
        yield Tenancy(own_machine(own), None, None, fresh=True)
    else:
        with rented_machine(opened) as tenancy:
            yield tenancy
