"""The one seam to GPU markets."""

from __future__ import annotations

from typing import Protocol

from torpor.control.safety import Warrant
from torpor.shared.values import Label, Machine, MachineId, Offer, Want


class Provider(Protocol):
    """A market that rents machines. Errors: ProviderError and its kinds, MachineUnreachable.

    ``create`` is idempotent by label: a second call with the same label returns the first
    machine. Nothing here touches a machine without our label.
    """

    @property
    def identity(self) -> str:
        """Which account this is; it stands in every Machine and is compared before a destroy."""

    def offers(self, want: Want) -> list[Offer]:
        """What is on sale that fits, cheapest first; may be empty."""

    def create(self, offer: Offer, label: Label, ssh_public_key: str) -> Machine:
        """Rent ``offer``; returns at once, perhaps in state "starting". CreateFailed: try the
        next offer. Killed half-way, a repeat with the same label must not rent twice."""

    def find(self, machine: MachineId) -> Machine | None:
        """The live truth about one machine; None when the provider does not know it."""

    def list_own(self) -> list[Machine]:
        """Every machine that carries a label of ours, in any state."""

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """End the rent. Checks ``warrant`` and the live label first (UnsafeDestroy, NotOurs).
        Returns at once; call again until ``find`` says gone. Gone already is fine."""
