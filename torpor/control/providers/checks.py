"""What every provider checks before it ends or marks a machine."""

from __future__ import annotations

from torpor.control.providers.provider import Absent, Provider
from torpor.control.safety import Warrant
from torpor.shared.errors import NotOurs, UnsafeDestroy
from torpor.shared.values import Label, Machine


def check_request(identity: str, machine: Machine, warrant: Warrant) -> None:
    """UnsafeDestroy unless the warrant is real and the machine is one of this provider."""
    if type(warrant) is not Warrant:
        raise UnsafeDestroy(
            f"machine {machine.id} was to be destroyed with a {type(warrant).__name__} that "
            "torpor.control.safety did not make: nothing was destroyed"
        )
    if machine.provider != identity:
        raise UnsafeDestroy(
            f"machine {machine.id} is at {machine.provider}, this is {identity}: nothing was "
            "destroyed"
        )


def warranted(provider: Provider, machine: Machine, warrant: Warrant) -> Machine | None:
    """The live machine that ``warrant`` allows to end; None when there is none."""
    check_request(provider.identity, machine, warrant)
    live = provider.find(machine.id)
    if isinstance(live, Absent):
        warrant.check_label(machine.label)
        return None
    warrant.check(live)
    return live


def to_mark(provider: Provider, machine: Machine, label: Label | None) -> bool:
    """Whether the machine still has to be marked with ``label``. NotOurs where it does not exist,
    or shows another label than ``machine`` has."""
    live = provider.find(machine.id)
    if isinstance(live, Absent) or live.label not in (label, machine.label):
        shown = "is not there" if isinstance(live, Absent) else f"carries label {live.label}"
        raise NotOurs(f"machine {machine.id} at {provider.identity} {shown}: it was not changed")
    return live.label != label
