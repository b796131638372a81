"""Machines that a user rented, at a market that cannot store torpor's label."""

from __future__ import annotations

from torpor.shared.values import Label, Machine


class Adopted(dict[str, Label]):
    """The labels of adopted machines, as the records say. The market does not know them."""

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``: a provider uses this method as its own."""
        if label is None:
            self.pop(machine.id, None)
        else:
            self[machine.id] = label
