"""What a run says while it waits for its store, and what its machines cost meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from torpor.shared.plain_text import plain
from torpor.shared.values import Away, Machine, MachineId

Log: TypeAlias = logging.Logger | logging.LoggerAdapter[logging.Logger]

SAID_S: Final = 60.0
"""Seconds between two lines about a wait, however many parts wait."""
_MOST_ERROR: Final = 500
"""Characters kept of an error, which a hostile machine may have made up."""


class StoreWaits:
    """Hears of every wait for the store of one run, on this host and on its machines. Thread-safe.

    ``prices``: what each machine that the run has opened costs an hour, None where that is unknown.
    """

    def __init__(
        self,
        log: Log,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._said_s: float | None = None
        self._prices: dict[MachineId, float | None] = {}

    def stands(self, machine: Machine) -> None:
        """Count this machine's price from now on: the run works on it."""
        if machine.label is not None:
            with self._lock:
                self._prices[machine.id] = machine.price_usd_h or None

    def ends(self, machine: Machine) -> None:
        """Count this machine's price no longer."""
        with self._lock:
            self._prices.pop(machine.id, None)

    def hear(self, away: Away) -> None:
        """Log a wait for the store, at most once a minute."""
        with self._lock:
            now_s = self._clock()
            if self._said_s is not None and now_s - self._said_s < SAID_S:
                return
            self._said_s = now_s
            prices = dict(self._prices)
        left_min = (away.patience_s - away.away_s) / 60
        self._log.warning(
            "the store has been away for %.0f s (%s): asked again for up to %.0f min more%s",
            away.away_s,
            " ".join(plain(away.error[:_MOST_ERROR]).split()),
            left_min,
            _costs(prices, away.away_s),
        )


def _costs(prices: dict[MachineId, float | None], away_s: float) -> str:
    """What the run's machines cost while it waits, in words."""
    if not prices:
        return ""
    known = [price for price in prices.values() if price is not None]
    named = ", ".join(sorted(prices))
    if len(known) < len(prices):
        return f"; meanwhile machine {named} costs money, how much is not known"
    usd_h = sum(known)
    return (
        f"; the wait has cost ${usd_h * away_s / 3600:.2f} so far, "
        f"at ${usd_h:.2f} an hour for machine {named}"
    )


_waits: Final[dict[str, StoreWaits]] = {}  # by run id; one process has few runs
_lock: Final = threading.Lock()


class HasLog(Protocol):
    """An object with the log of a run."""

    @property
    def run(self) -> str: ...

    @property
    def log(self) -> Log: ...


def waits_of(runner: HasLog) -> StoreWaits:
    """The waits of this run."""
    with _lock:
        return _waits.setdefault(runner.run, StoreWaits(runner.log))
