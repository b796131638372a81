"""What canaries have shown of the machines of each account: one record an account, in the store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from torpor.control.providers.offers import Offer
from torpor.control.rental.records import Rental
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records
from torpor.shared.errors import ObjectChanged, ObjectExists
from torpor.shared.values import Host, ObjectKey

LASTS_S: Final = 90 * 24 * 3600.0
"""Seconds that a canary's result counts: older ones say little of a market today."""
FAILED_LASTS_S: Final = 7 * 24 * 3600.0
"""Seconds after which a kind of machine on which a canary failed is tried again."""
MOST_KINDS: Final = 50
"""Results that are kept for one account; those of the longest ago are dropped."""
_MOST_CHARS: Final = 300
_MOST_FEATURES: Final = 10_000
_MOST_BYTES: Final = 2 << 20
_PREFIX: Final = "canaries/"


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """The newest canary's result on one kind of machine. A canary is a process tree of torpor's own
    that was frozen there; it went on, or ``why_not`` says why it did not. ``host``: what that
    machine was."""

    gpu: str
    gpu_count: int
    region: str
    flown_unix: float
    why_not: str = ""
    host: Host = Host()

    @classmethod
    def of(cls, rental: Rental, why_not: str, host: Host) -> Canary:
        """The result that has just come from the machine of this rental, whose words are not
        trusted."""
        words = _plain(why_not)
        return cls(
            gpu=rental.gpu,
            gpu_count=rental.gpu_count,
            region=rental.region,
            flown_unix=time.time(),
            why_not=words or (why_not and "it says no reason"),
            host=Host(
                _plain(host.kernel),
                _plain(host.features, _MOST_FEATURES),
                _plain(host.driver),
                _plain(host.architecture),
            ),
        )

    @property
    def kind(self) -> tuple[str, int, str, str]:
        return (self.gpu, self.gpu_count, self.region, self.host.architecture or "x86_64")

    @property
    def day(self) -> str:
        """The day of the canary, in UTC."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.flown_unix))


def _plain(text: str, most: int = _MOST_CHARS) -> str:
    words = " ".join(text.split()).encode("ascii", "replace").decode()
    return "".join(char for char in words if char.isprintable())[:most]


class _AccountCanaries(msgspec.Struct, frozen=True):
    provider: str
    canaries: list[Canary]  # one of each kind, the newest first


class CanaryRecords:
    """The records of all accounts in one store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records = Records(store, _AccountCanaries, _MOST_BYTES, "rank without it")

    def keep(self, provider: str, canary: Canary) -> None:
        """Store this result in place of the earlier one of its kind of machine."""
        key = ObjectKey(_PREFIX + hashlib.sha256(provider.encode()).hexdigest()[:32])
        for _ in range(TRIES):
            found = self._records.read(key)
            others = found[0].canaries if found else []
            others = [other for other in others if other.kind != canary.kind]
            record = _AccountCanaries(provider, [canary, *others][:MOST_KINDS])
            try:
                if found is None:
                    self._records.create(key, record)
                else:
                    self._records.replace(key, record, found[1])
            except (ObjectChanged, ObjectExists):
                continue
            return
        raise self._records.contested(key)

    def results(self) -> CanaryResults:
        """The results of all accounts that count now."""
        read = [self._records.read(found.key) for found in self._store.list(_PREFIX)]
        return CanaryResults({one[0].provider: one[0].canaries for one in read if one is not None})


class CanaryResults:
    """The newest canaries by kind of machine."""

    def __init__(self, canaries: Mapping[str, Sequence[Canary]] = {}) -> None:
        self._of = {
            (provider, *canary.kind): canary
            for provider, of in canaries.items()
            for canary in of
            if abs(time.time() - canary.flown_unix)
            < (FAILED_LASTS_S if canary.why_not else LASTS_S)  # a clock may have been wrong
        }

    def of(self, offer: Offer) -> Canary | None:
        """The newest result at that account with this GPU, region and architecture; None without
        one."""
        kind = (str(offer.gpu or ""), offer.gpu_count, offer.region, offer.architecture)
        return self._of.get((offer.provider, *kind))
