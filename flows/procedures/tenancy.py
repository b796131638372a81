"""The one machine of a workspace that a flow rents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.procedures.phases import Phases
from tasks.machines import create_machine, left_unfinished, look_for_offers, renting, show_offers
from tasks.workspace import OpenWorkspace
from torpor.control.rental.renting import Tenancy
from torpor.control.rental.search import Offers


@contextmanager
def only_machine(opened: OpenWorkspace, phases: Phases) -> Iterator[Tenancy]:
    """A new machine for the workspace, or the one that a killed run left; it is ended after a
    failure if that is safe. WorkspaceAwake if the workspace is on a machine already."""
    with renting(opened) as held:
        with phases.phase("machine"):
            left = left_unfinished(opened, held, alone=True)
            offers = Offers([], []) if left else look_for_offers(opened)
            try:
                tenancy = create_machine(held, offers, left[0] if left else None)
            finally:
                if not left:
                    show_offers(opened, held, offers)
        with tenancy:
            yield tenancy
