"""The proven end of whatever carries a smoke test's label, whoever asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from torpor.control.providers.seam import Absent, Provider
from torpor.control.rental.ending import GONE_S, destroy, last_known, listed, residue_of
from torpor.control.rental.records import Rental
from torpor.control.safety import never_handed_over
from torpor.shared.errors import EndUnproven

LOOKS: Final = 2
"""Looks after the proof, by id and in the list, that must not show the machine."""
_BETWEEN_S: Final = 5.0


def end(
    provider: Provider,
    rental: Rental,
    *,
    within_s: float = GONE_S,
    nap: Callable[[float], None] = time.sleep,
) -> str:
    """Destroy the machine of the rental's label; returns the proof of its end.

    Waits for a machine that nobody has seen until its market has settled twice. EndUnproven, or the
    provider's error, where there is no proof: call it again.
    """
    proof = ""
    for _ in range(LOOKS):  # one that was not listed at first may be by now
        machine = listed(provider, rental.label) or last_known(provider, rental)
        if machine is not None:
            warrant = never_handed_over(machine, rental.label)
            proof = destroy(provider, machine, warrant, rental, within_s)
            break
        _wait_for_settling(provider, rental, nap)
    for _ in range(LOOKS):
        nap(max(_BETWEEN_S, provider.abilities.poll_s))
        shown = listed(provider, rental.label)
        if machine is not None and not isinstance(provider.find(machine.id), Absent):
            shown = machine
        left = residue_of(provider, rental.label)
        if shown is not None or left:
            what = f"machine {shown.id}" if shown else ", ".join(left)
            raise EndUnproven(
                f"{provider.identity} still shows {what} after its end was proven ({proof}): it "
                "may cost money"
            )
    return proof or f"no machine of rental {rental.label.rental} was seen in several listings"


def _wait_for_settling(provider: Provider, rental: Rental, nap: Callable[[float], None]) -> None:
    """Until a machine that was asked for would be listed; once that is over, as long again."""
    settling_s = provider.abilities.settling_s
    left_s = rental.created_unix + settling_s - time.time()
    nap(left_s if left_s > 0 else settling_s)
