"""How far the store's clock is ahead, from what its answers say."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from torpor.control.store.clock import StoreClock

HERE = 1_800_000_000.0


def _date(unix: float) -> str:
    return formatdate(unix, usegmt=True)


@pytest.mark.parametrize("ahead_s", [3600.0, 120.0, -120.0, -3600.0])
def test_a_difference_is_known_to_a_second_or_two(ahead_s: float) -> None:
    clock = StoreClock()
    clock.hear(_date(HERE + ahead_s), HERE - 0.2, HERE + 0.2)
    assert abs(clock.ahead_s - ahead_s) <= 1.5
    known = clock.ahead_s
    clock.hear(_date(HERE + 100.7 + ahead_s), HERE + 100, HERE + 101)
    assert clock.ahead_s == known  # a record that is written again keeps its times
    clock.hear(_date(HERE + 200), HERE + 200, HERE + 200.3)
    assert clock.ahead_s == 0.0  # the clock of this host was set


@pytest.mark.parametrize(
    ("date", "asked", "answered"),
    [
        (_date(HERE + 4), HERE, HERE + 0.1),  # as good as the same
        (_date(HERE), HERE, HERE + 600),  # this host slept before it read the answer
        (_date(HERE + 900), HERE + 60, HERE),  # its clock was set meanwhile
        ("", HERE, HERE),
        ("yesterday", HERE, HERE),
    ],
)
def test_what_proves_no_difference_changes_nothing(
    date: str, asked: float, answered: float
) -> None:
    clock = StoreClock()
    clock.hear(date, asked, answered)
    assert clock.ahead_s == 0.0
