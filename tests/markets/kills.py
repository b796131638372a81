"""Killing a client of a fake market at every HTTP request: before it is done, and after."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable

from tests.fixtures.kill_points import killed_in_a_child
from tests.markets.server import FakeMarket


def killed_at_request(fake: FakeMarket, step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked child that dies at its ``step``-th step: of odd number before a
    request is carried out, of even number after. False when it ended before."""
    heard, speak = os.pipe()
    counted = itertools.count(1)
    lock = threading.Lock()

    def announced() -> None:
        os.write(speak, os.getpid().to_bytes(8, "big"))
        work()

    def at_step() -> bool:
        with lock:
            if next(counted) != step:
                return True
            os.kill(int.from_bytes(os.read(heard, 8), "big"), signal.SIGKILL)
            return False

    fake.step = at_step
    try:
        return killed_in_a_child(announced)
    finally:
        fake.step = lambda: True
        os.close(heard)
        os.close(speak)
