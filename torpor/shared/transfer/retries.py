"""When a request to a store is sent again, and how long to wait before: one layer on each side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    StoreAway,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnreachable,
)
from torpor.shared.values import Away

ATTEMPTS: Final = 5
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
LONGEST_RETRY_AFTER_S: Final = 60.0
NAP_S: Final = 0.25  # the longest sleep at once, so that a cancelled wait ends within this time

_NOT_AWAY: Final = (StoreUnreachable, StoreFull)

_Answer = TypeVar("_Answer")
_dice: Final = random.SystemRandom()
_hurried: ContextVar[bool] = ContextVar("hurried", default=False)


@contextmanager
def hurried() -> Iterator[None]:
    """Within this context a request waits for a store only as long as its attempts take, without
    patience: the caller has other work and will ask again."""
    token = _hurried.set(True)
    try:
        yield
    finally:
        _hurried.reset(token)


class Retries:
    """Sends a request at most ``attempts`` times: again after StoreUnavailable and StoreCorrupt,
    never after another error. The HTTP clients below it send once.

    With ``patience_s``, a store that is away (StoreUnavailable) is asked again until it has been
    away from this request for so long; then StoreAway, which no step repeats. One that was never
    reached (StoreUnreachable) gets the attempts only: its address may be wrong. So does a full one
    (StoreFull), whose owner has to act.

    Waits double from half a second, with jitter, or last as long as the store asks for, up to a
    minute. ``on_retry`` gets each error that is retried and the wait in seconds; ``on_away`` hears
    before each wait that only patience explains. A wait ends with RunCancelled once ``cancelled()``
    is true.
    """

    def __init__(
        self,
        attempts: int = ATTEMPTS,
        *,
        patience_s: float = 0.0,
        on_retry: Callable[[StoreError, float], None] | None = None,
        on_away: Callable[[Away], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if attempts < 1:
            raise InvalidInput(f"a request with {attempts} attempts is never sent: allow 1 or more")
        self.attempts = attempts
        self.patience_s = patience_s
        self.on_retry = on_retry
        self.on_away = on_away
        self.cancelled = cancelled
        self.sleep = sleep
        self.clock = clock

    def run(self, request: Callable[[], _Answer], patience_s: float | None = None) -> _Answer:
        """The answer to ``request``, or the error of its last attempt. ``patience_s``: for this
        request, in place of the patience given to the constructor."""
        tries = self.tries(patience_s)
        while True:
            try:
                return request()
            except (StoreUnavailable, StoreCorrupt) as error:
                tries.wait(error)

    def tries(self, patience_s: float | None = None) -> Tries:
        """The attempts of one request."""
        wanted = self.patience_s if patience_s is None else patience_s
        return Tries(self, 0.0 if _hurried.get() else wanted)


class Tries:
    """The state of one request: how often it has failed, and since when."""

    def __init__(self, rules: Retries, patience_s: float) -> None:
        self._rules, self._patience_s = rules, patience_s
        self._failed, self._since_s = 0, rules.clock()

    def went(self) -> None:
        """Count failures from zero: some of the answer has arrived."""
        self._failed, self._since_s = 0, self._rules.clock()

    def wait(self, error: StoreError) -> None:
        """Wait before the next attempt; raise ``error`` when there is none."""
        rules = self._rules
        if not self._failed:
            self._since_s = rules.clock()
        self._failed += 1
        if self._failed >= rules.attempts:
            self._stay(error)
        longest_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failed - 1, 10))
        asked_s = error.retry_after_s if isinstance(error, StoreUnavailable) else 0.0
        left_s = max(_dice.uniform(longest_s / 2, longest_s), min(asked_s, LONGEST_RETRY_AFTER_S))
        if rules.on_retry is not None:
            rules.on_retry(error, left_s)
        while left_s > 0:
            if rules.cancelled():
                raise RunCancelled(f"cancelled while waiting to try again after: {error}")
            rules.sleep(min(left_s, NAP_S))
            left_s -= NAP_S

    def _stay(self, error: StoreError) -> None:
        """Return where patience allows another attempt; otherwise raise ``error``."""
        away_s = self._rules.clock() - self._since_s
        is_away = isinstance(error, StoreUnavailable) and not isinstance(error, _NOT_AWAY)
        if is_away and away_s < self._patience_s:
            if self._rules.on_away is not None:
                self._rules.on_away(Away(str(error), away_s, self._patience_s))
            return
        if self._failed == 1:
            raise error
        if is_away and self._patience_s:
            raise StoreAway(
                f"{error}; given up after {away_s / 60:.0f} min, the patience of the store's "
                f"block, and {self._failed} attempts: run it again once the store is well"
            )
        raise type(error)(
            f"{error}; given up after {self._failed} attempts: run it again once the store is well"
        )
