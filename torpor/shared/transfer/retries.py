"""When a request to a store is sent again, and how long to wait before: one layer on each side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
)

ATTEMPTS: Final = 5
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
LONGEST_RETRY_AFTER_S: Final = 60.0
NAP_S: Final = 0.25  # a cancelled wait ends within this

_Answer = TypeVar("_Answer")
_dice: Final = random.SystemRandom()


class Retries:
    """Sends a request at most ``attempts`` times: again after StoreUnavailable and StoreCorrupt,
    never after another error. The HTTP clients below it send once.

    Waits double from half a second, with jitter, or last as long as the store asks for, up to a
    minute. ``on_retry`` gets each error that is retried and the wait in seconds. A wait ends with
    RunCancelled once ``cancelled()`` is true.
    """

    def __init__(
        self,
        attempts: int = ATTEMPTS,
        *,
        on_retry: Callable[[StoreError, float], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if attempts < 1:
            raise InvalidInput(f"a request with {attempts} attempts is never sent: allow 1 or more")
        self._attempts = attempts
        self._on_retry = on_retry
        self._cancelled = cancelled
        self._sleep = sleep

    def run(self, request: Callable[[], _Answer]) -> _Answer:
        """The answer to ``request``, or the error of its last attempt."""
        failed = 0
        while True:
            try:
                return request()
            except (StoreUnavailable, StoreCorrupt) as error:
                failed += 1
                self.wait(error, failed)

    def wait(self, error: StoreError, failed: int) -> None:
        """Wait before the next attempt; raise ``error`` when ``failed`` attempts are all."""
        if failed >= self._attempts:
            if failed == 1:
                raise error
            raise type(error)(
                f"{error}; given up after {failed} attempts: run it again once the store is well"
            )
        longest_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failed - 1))
        asked_s = error.retry_after_s if isinstance(error, StoreUnavailable) else 0.0
        left_s = max(_dice.uniform(longest_s / 2, longest_s), min(asked_s, LONGEST_RETRY_AFTER_S))
        if self._on_retry is not None:
            self._on_retry(error, left_s)
        while left_s > 0:
            if self._cancelled():
                raise RunCancelled(f"cancelled while waiting to try again after: {error}")
            self._sleep(min(left_s, NAP_S))
            left_s -= NAP_S
