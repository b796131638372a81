"""How far the store's clock is ahead, from what its answers say."""

from __future__ import annotations

import itertools
import math
import random
from email.utils import formatdate

import pytest

from torpor.control.store.clock import StoreClock

HERE = 1_800_000_000.0


def _date(unix: float) -> str:
    return formatdate(math.floor(unix), usegmt=True)


@pytest.mark.rule(18)
@pytest.mark.parametrize("ahead_s", [3600.0, 120.0, -120.0, -3600.0])
def test_a_difference_is_known_to_a_second_or_two(ahead_s: float) -> None:
    clock = StoreClock()
    clock.hear(_date(HERE + ahead_s), HERE - 0.2, HERE + 0.2)
    assert clock.ahead_s == 0.0  # one answer may be wrong
    clock.hear(_date(HERE + 1 + ahead_s), HERE + 0.8, HERE + 1.2)
    assert abs(clock.ahead_s - ahead_s) <= 1.5
    known = clock.ahead_s
    clock.hear(_date(HERE + 100.7 + ahead_s), HERE + 100, HERE + 101)
    assert clock.ahead_s == known  # a record that is written again keeps its times
    clock.hear(_date(HERE + 200), HERE + 200, HERE + 200.3)
    assert clock.ahead_s == known
    clock.hear(_date(HERE + 201), HERE + 201, HERE + 201.3)
    assert clock.ahead_s == 0.0  # the clock of this host was set


@pytest.mark.rule(18)
@pytest.mark.parametrize(
    ("date", "asked", "answered"),
    [
        (_date(HERE + 4), HERE, HERE + 0.1),  # as good as the same
        (_date(HERE), HERE, HERE + 600),  # this host slept before it read the answer
        (_date(HERE + 900), HERE + 60, HERE),  # its clock was set meanwhile
        ("", HERE, HERE),
        ("yesterday", HERE, HERE),
        ("Thu, 01 Jan 1970 00:00:00 GMT", HERE, HERE),
        ("Fri, 31 Dec 9999 23:59:59 GMT", HERE, HERE),
        (f"Thu, 01 Jan 2026 {'9' * 23}:00:00 GMT", HERE, HERE),
    ],
)
def test_what_proves_no_difference_changes_nothing(
    date: str, asked: float, answered: float
) -> None:
    clock = StoreClock()
    for _ in range(3):
        clock.hear(date, asked, answered)
    assert clock.ahead_s == 0.0


@pytest.mark.rule(18)
@pytest.mark.parametrize("ahead_s", [4.9, 5.5, 6.5, -5.5, -6.5])
def test_a_difference_about_the_least_that_counts_does_not_come_and_go(ahead_s: float) -> None:
    """Each change moves the times of every record that is written again."""
    clock, chance, found = StoreClock(), random.Random(1), []
    for number in range(2000):
        asked = HERE + number * 7 + chance.random()
        answered = asked + chance.random() * 0.4
        clock.hear(_date((asked + answered) / 2 + ahead_s), asked, answered)
        found.append(clock.ahead_s)
    assert sum(before != after for before, after in itertools.pairwise(found)) <= 1
