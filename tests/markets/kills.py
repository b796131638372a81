"""Killing a client of fake markets at every HTTP request: before it is done, and after."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.fixtures.kill_points import killed_in_a_child
from tests.markets.server import FakeMarket


@contextmanager
def killing_at_request(fakes: Sequence[FakeMarket], step: int) -> Iterator[Callable[[], None]]:
    """Kill the process that called what this yields, at its ``step``-th step over all ``fakes``:
    of odd number before a request is carried out, of even number after. At 0, never."""
    heard, speak = os.pipe()
    counted = itertools.count(1)
    lock = threading.Lock()

    def announce() -> None:
        os.write(speak, os.getpid().to_bytes(8, "big"))

    def at_step() -> bool:
        with lock:
            if next(counted) != step:
                return True
            os.kill(int.from_bytes(os.read(heard, 8), "big"), signal.SIGKILL)
            return False

    for fake in fakes:
        fake.step = at_step
    try:
        yield announce
    finally:
        for fake in fakes:
            fake.step = lambda: True
        os.close(heard)
        os.close(speak)


def killed_at_request(fake: FakeMarket, step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked child that dies at its ``step``-th step. False when it ended
    before."""
    with killing_at_request([fake], step) as announce:
        return killed_in_a_child(lambda: (announce(), work()))
