"""What happens to a flow of the campaign: which markets it asks, their faults, and its death."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from tests.markets.every import NAMES
from tests.markets.faults import Action, Fault, Kind

_ANY: Final[tuple[Kind, ...]] = (
    "lost", "error after", "too many", "unavailable", "error body", "wrong shape", "not json",
    "hang",
)  # fmt: skip
_KINDS: Final[dict[Action, tuple[Kind, ...]]] = {
    "create": (*_ANY, "error that created", "no capacity", "quota", "denied", "no money"),
    "destroy": (*_ANY, "lives", "lives", "lives"),
    "find": (*_ANY, "not found", "not found"),
}


@dataclass
class Plan:
    """What happens to one flow."""

    named: list[str]
    rank: Literal["price", "order"]
    spot: Literal["never", "allowed"]
    faults: list[tuple[str, Fault]]
    hidden_looks: int = 0
    deaf: str = ""  # the market whose machines never get SSH
    at_request: int = 0  # killed there; 0: not
    at_step: int = 0

    @property
    def is_calm(self) -> bool:
        """Whether nothing keeps the flow from its end."""
        return not (self.faults or self.deaf or self.at_request or self.at_step)

    def __str__(self) -> str:
        faults = [f"{n}: {f.kind} at {f.action} x{f.count}" for n, f in self.faults]
        killed = f"killed at request {self.at_request}" if self.at_request else ""
        killed = f"killed at step {self.at_step}" if self.at_step else killed
        deaf = f"{self.deaf} deaf" if self.deaf else ""
        hidden = f"hidden {self.hidden_looks}" if self.hidden_looks else ""
        return "; ".join(filter(None, [*faults, deaf, hidden, killed])) or "undisturbed"


def calm(rng: random.Random) -> Plan:
    """Nothing happens to it."""
    return Plan(_some(rng), "price", rng.choice(("never", "allowed")), [])


def disturbed(rng: random.Random, *, of_wake: bool) -> Plan:
    """Up to three faults, late or silent machines, and often a death."""
    plan = Plan(_some(rng), rng.choice(("price", "order")), rng.choice(("never", "allowed")), [])
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        plan.faults.append((rng.choice(plan.named), _fault(rng, of_wake=of_wake)))
    if of_wake:
        plan.hidden_looks = rng.choice((0, 0, 1, 3))
        plan.deaf = rng.choice(plan.named) if rng.random() < 0.08 else ""
    how = rng.random()
    if how < 0.35:
        plan.at_request = int(rng.triangular(1, 70, 12))
    elif how < 0.5:
        plan.at_step = rng.randrange(1, 14)
    return plan


def _some(rng: random.Random) -> list[str]:
    names = rng.sample(NAMES, len(NAMES))
    return names[: rng.choice((2, 3, 4, 4))]


def _fault(rng: random.Random, *, of_wake: bool) -> Fault:
    action: Action = rng.choice(
        ("create", "create", "create", "find", "list", "destroy", "offers", "account")
        if of_wake
        else ("destroy", "destroy", "find", "list")
    )
    kinds = _KINDS.get(action, _ANY)
    kind = rng.choice(kinds)
    count = 1 if kind == "hang" else rng.choice((1, 1, 2, 4))
    return Fault(kind, action, count=count, skip=rng.choice((0, 0, 1, 3)), retry_after_s=1)
