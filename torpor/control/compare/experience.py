"""What torpor's own rentals show of markets: how often attempts failed, when SSH answered, and how
fast machines read from the store."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from torpor.control.providers.offers import Offer
from torpor.control.rental.canaries import CanaryResults
from torpor.control.rental.records import Rental
from torpor.shared.values import MIB

DAYS: Final = 90
"""Days back that rentals count: older ones say little of a market today."""
LEAST_BYTES: Final = 8 * MIB
"""Bytes of a restore from which its rate counts: a smaller one measures the latency of the
store."""
_MB: Final = 1e6


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """Rentals of one kind. ``of``: what they have in common. A start begins with the request, or
    where the provider's queue ends."""

    of: str
    failed: int = 0  # attempts without a machine on which SSH answered
    starts_s: tuple[float, ...] = ()  # sorted seconds until SSH answered, of the other attempts
    links_mb_s: tuple[float, ...] = ()  # MB/s at which wakes read stored bytes there

    @property
    def attempts(self) -> int:
        return self.failed + len(self.starts_s)

    def start_s(self, share: float) -> float | None:
        """The seconds within which this share of machines answered (nearest rank); None without
        any."""
        if not self.starts_s:
            return None
        return self.starts_s[max(0, math.ceil(share * len(self.starts_s)) - 1)]

    @property
    def link_mb_s(self) -> float | None:
        return statistics.median(self.links_mb_s) if self.links_mb_s else None


class RentalHistory:
    """The experience with each kind of machine, and with each provider. ``canaries``: results of
    freeze tests."""

    def __init__(
        self,
        rentals: Iterable[Rental],
        since_unix: float = 0.0,
        canaries: CanaryResults = CanaryResults(),  # noqa: B008 - it is never changed
    ) -> None:
        self.canaries = canaries
        groups: dict[tuple[str, ...], list[Rental]] = {}
        for rental in rentals:
            if rental.created_unix >= since_unix:
                kind = (rental.provider, rental.gpu, str(rental.gpu_count))
                groups.setdefault(kind, []).append(rental)
                groups.setdefault((rental.provider,), []).append(rental)
        self._groups = {
            key: _experience("with this GPU here" if len(key) > 1 else "at this provider", group)
            for key, group in groups.items()
        }

    def of(self, offer: Offer) -> list[Experience]:
        """The experience that fits best, first: with this GPU at this provider, then with the
        provider."""
        kind = (offer.provider, str(offer.gpu or ""), str(offer.gpu_count))
        found = (self._groups.get(key) for key in (kind, (offer.provider,)))
        return [experience for experience in found if experience is not None]


def _experience(of: str, rentals: Sequence[Rental]) -> Experience:
    starts = (
        rental.answered_unix - max(rental.created_unix, rental.queued_unix or 0.0)
        for rental in rentals
        if rental.answered_unix is not None
    )
    return Experience(
        of=of,
        failed=sum(rental.failed for rental in rentals),
        starts_s=tuple(sorted(max(0.0, seconds) for seconds in starts)),
        links_mb_s=tuple(
            rental.fetched_bytes / rental.fetched_s / _MB
            for rental in rentals
            if rental.fetched_bytes >= LEAST_BYTES and rental.fetched_s > 0
        ),
    )
