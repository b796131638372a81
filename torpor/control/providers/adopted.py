"""Machines of a user's own whose market cannot be told that they are ours."""

from __future__ import annotations

from torpor.shared.values import Label, Machine


class Adopted(dict[str, Label]):
    """The labels by machine, as the records say. Only this object knows them."""

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``: a provider takes it for its own."""
        if label is None:
            self.pop(machine.id, None)
        else:
            self[machine.id] = label
