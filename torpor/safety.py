"""The rules that stand between a user's only copy and its loss.

A ``Warrant`` is leave to destroy one machine. Providers' ``destroy`` takes one, and only this
module can make one: from a verified snapshot, or for a machine that never held any work.
"""

from __future__ import annotations

from typing import Final

from torpor.errors import NotOurs, UnsafeDestroy
from torpor.values import Label, Machine, MachineId

_MINT: Final = object()


class Warrant:
    """Leave to destroy one machine, once its live identity has been compared. See ``check``."""

    __slots__ = ("_label", "_machine", "_provider", "reason")

    def __init__(self, mint: object, machine: Machine, reason: str) -> None:
        if mint is not _MINT:
            raise UnsafeDestroy(
                "a Warrant can only be made by torpor.safety, from a verified snapshot or for a "
                "machine that was never handed over"
            )
        if machine.label is None:
            raise NotOurs(f"machine {machine.id} at {machine.provider} carries no torpor label")
        self._provider: str = machine.provider
        self._machine: MachineId = machine.id
        self._label: Label = machine.label
        self.reason = reason

    def check(self, live: Machine) -> None:
        """Compare with what the provider says now; raises UnsafeDestroy or NotOurs."""
        if live.label is None or live.label != self._label:
            raise NotOurs(
                f"machine {live.id} at {live.provider} carries label {live.label}, the warrant is "
                f"for {self._label}: nothing was destroyed; look at the machine before you go on"
            )
        if (live.provider, live.id) != (self._provider, self._machine):
            raise UnsafeDestroy(
                f"the warrant is for machine {self._machine} at {self._provider}, not for "
                f"{live.id} at {live.provider}: nothing was destroyed"
            )


def never_handed_over(machine: Machine, label: Label) -> Warrant:
    """A warrant for a machine that this very run created under ``label`` and did not hand over."""
    if machine.label != label:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries label {machine.label}, this run "
            f"created {label}: nothing was destroyed"
        )
    return Warrant(_MINT, machine, "created by this run and never handed over")
