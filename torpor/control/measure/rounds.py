"""Rounds of a measurement, as many as there is time for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


class Rounds:
    """At most ``most`` rounds; none begins that would not end before ``until`` by the longest so
    far. The first one always runs, so that there is a figure."""

    def __init__(
        self, most: int, until: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._until = until
        self._clock = clock
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        longest = 0.0
        while self.done < self._most:
            began = self._clock()
            if self.done and began + longest > self._until:
                return
            yield self.done
            self.done += 1
            longest = max(longest, self._clock() - began)
