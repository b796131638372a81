"""Killing a client of fake markets at every HTTP request: before it is done, and after."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.fixtures.kill_points import Child
from tests.markets.server import FakeMarket


@contextmanager
def killing_at_request(fakes: Sequence[FakeMarket], step: int) -> Iterator[Callable[[Child], None]]:
    """Kill the child that what this yields is called with, at its ``step``-th step over all
    ``fakes``: of odd number before a request is carried out, of even number after. At 0, never."""
    victims: list[Child] = []
    aimed = threading.Event()
    counted = itertools.count(1)
    lock = threading.Lock()

    def aim(victim: Child) -> None:
        victims.append(victim)
        aimed.set()

    def at_step() -> bool:
        with lock:
            if next(counted) != step:
                return True
            aimed.wait()
            os.kill(victims[0].pid, signal.SIGKILL)
            return False

    for fake in fakes:
        fake.step = at_step
    try:
        yield aim
    finally:
        for fake in fakes:
            fake.step = lambda: True


def killed_at_request(fake: FakeMarket, step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked child that dies at its ``step``-th step. False when it ended
    before."""

    def silent(_: object) -> None:
        work()

    with killing_at_request([fake], step) as aim:
        child = Child(silent)
        aim(child)
        told = child.told()
    assert not told.error, told
    return told.killed
