"""The proven end of everything that carries a smoke test's label."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from torpor.control.providers.provider import Absent, Provider
from torpor.control.rental.ending import (
    ABSENCES,
    GONE_S,
    destroy,
    last_known,
    listed,
    residue_of,
)
from torpor.control.rental.records import Rental
from torpor.control.safety import never_handed_over
from torpor.shared.errors import EndUnproven, InvalidInput, TorporError
from torpor.shared.values import Machine

_MOST_LOOKS: Final = 9
_BETWEEN_S: Final = 5.0


def end(provider: Provider, rental: Rental, nap: Callable[[float], None] = time.sleep) -> str:
    """Destroy the machine of the rental's label; returns the proof of its end.

    Without a proof, ABSENCES looks in a row must miss the machine. For a machine that nobody has
    seen, the second look comes when its market has settled, and the third as long after that.

    EndUnproven, or the provider's error, where there is no proof: the machine may cost money, so
    call it again.
    """
    if rental.provider != provider.identity:
        raise InvalidInput(
            f"rental {rental.label.rental} is at {rental.provider}, and cannot be looked for at "
            f"{provider.identity}: nothing proves its end"
        )
    known = last_known(provider, rental)
    proof, absences = "", 0
    fault: TorporError | None = None
    for _ in range(_MOST_LOOKS):
        try:
            shown = listed(provider, rental.label) or _found(provider, known)
            known = shown or known
            if known is not None and (shown is not None or not proof):
                absences = 0
                warrant = never_handed_over(known, rental.label)
                proof = destroy(provider, known, warrant, rental, GONE_S)
            elif residue_of(provider, rental.label):
                absences = 0
            else:
                absences += 1
        except EndUnproven:
            raise
        except TorporError as error:
            fault, absences = error, 0
        if absences == ABSENCES:
            return proof or f"{absences} listings showed no machine of rental {rental.label.rental}"
        nap(_pause_s(provider, rental, known))
    raise fault or EndUnproven(
        f"{provider.identity} still shows what belongs to rental {rental.label.rental} after "
        f"{_MOST_LOOKS} looks: it may cost money"
    )


def _found(provider: Provider, known: Machine | None) -> Machine | None:
    found = None if known is None else provider.find(known.id)
    return None if isinstance(found, Absent) else found


def _pause_s(provider: Provider, rental: Rental, known: Machine | None) -> float:
    """Seconds until the next look. A machine that nobody has seen may appear until its market
    settles."""
    able = provider.abilities
    if known is not None:
        return max(_BETWEEN_S, able.poll_s)
    unsettled_s = rental.created_unix + able.settling_s - time.time()
    return unsettled_s if unsettled_s > 0 else able.settling_s
