"""What follows an attempt: properties of every history that a job can have."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from torpor.control.jobs.policy import (
    FIRST_SAVE_S,
    LOSSES_TO_ON_DEMAND,
    MOST_LOSSES,
    WAITS_S,
    Spent,
    Spot,
    is_hopeless,
    is_retried,
    losses,
    save_interval_s,
    spot_for,
    wait_s,
    why_over,
)
from torpor.control.jobs.records import Attempt, AttemptEnd, Job
from torpor.shared.values import MachineId, WorkspaceName

replace = msgspec.structs.replace

ENDS: tuple[AttemptEnd, ...] = ("command ended", "machine lost", "stopped", "supervisor lost")
SPOTS: tuple[Spot, ...] = ("never", "allowed", "only")


def attempt(end: AttemptEnd = "machine lost", *, saved: bool = False, status: int = 0) -> Attempt:
    return Attempt(
        number=1, machine=MachineId("m"), provider="vast:1", rental="r", spot=True,
        price_usd_h=1.0, began_unix=0.0, seen_unix=0.0, end=end, saved=saved, status=status,
    )  # fmt: skip


def job(attempts: list[Attempt], spot: Spot = "only", retries: int = 0) -> Job:
    return Job(
        id="0" * 12, workspace=WorkspaceName("demo"), block="demo", command=["x"], spot=spot,
        retries=retries, created_unix=0.0, attempts=attempts,
    )  # fmt: skip


LOST, SAVED = attempt(), attempt(saved=True)
attempts = some.builds(
    attempt, some.sampled_from(ENDS), saved=some.booleans(), status=some.integers(0, 2)
)
histories = some.lists(attempts, max_size=12)
jobs = some.builds(job, histories, some.sampled_from(SPOTS), some.integers(0, 3))


@given(histories, some.integers(0, 5))
def test_losses_count_from_the_last_attempt_that_saved(before: list[Attempt], lost: int) -> None:
    assert losses([*before, SAVED, *[LOST] * lost]) == lost
    assert losses([*before, attempt("command ended", status=1), *[LOST] * lost]) == lost


@given(jobs)
def test_progress_keeps_a_job_alive(state: Job) -> None:
    """However many machines were lost before."""
    after = replace(state, attempts=[*state.attempts, SAVED])
    assert not is_hopeless(after)
    assert spot_for(after) == state.spot


@given(jobs)
def test_a_job_without_progress_ends_after_three_losses(state: Job) -> None:
    """And not before: each loss leads to another attempt, or ends the job."""
    now = replace(state, attempts=[*state.attempts, SAVED])
    for lost in range(1, MOST_LOSSES + 1):
        now = replace(now, attempts=[*now.attempts, LOST])
        assert is_hopeless(now) == (lost == MOST_LOSSES)


@given(jobs)
def test_the_user_says_which_machines_may_be_rented(state: Job) -> None:
    found = spot_for(state)
    if state.spot == "allowed":
        assert found == ("never" if losses(state.attempts) >= LOSSES_TO_ON_DEMAND else "allowed")
    else:
        assert found == state.spot


def test_on_demand_comes_before_giving_up() -> None:
    assert LOSSES_TO_ON_DEMAND < MOST_LOSSES
    assert spot_for(job([LOST], "allowed")) == "allowed"
    assert spot_for(job([LOST, LOST], "allowed")) == "never"


@given(histories, some.integers(0, 3))
def test_only_failures_of_the_command_use_up_retries(before: list[Attempt], retries: int) -> None:
    failed = sum(past.end == "command ended" and past.status != 0 for past in before)
    assert is_retried(job(before, retries=retries)) == (failed <= retries)
    assert is_retried(job([*before, LOST, SAVED], retries=retries)) == (failed <= retries)


@given(some.integers(1, 100))
def test_waits_grow_and_are_bounded(refusals: int) -> None:
    assert WAITS_S[0] <= wait_s(refusals) <= wait_s(refusals + 1) <= WAITS_S[-1]


@given(jobs, some.integers(0, 200), some.floats(0.01, 24 * 60))
def test_saves_on_spot_machines_begin_often_and_are_never_rarer_than_asked(
    state: Job, begun: int, minutes: float
) -> None:
    state = replace(state, save_minutes=minutes)
    assert save_interval_s(state, False, begun) == 60 * minutes
    interval_s = save_interval_s(state, True, begun)
    assert 0 < interval_s <= 60 * minutes
    assert interval_s <= save_interval_s(state, True, begun + 1) <= 2 * interval_s
    lost = replace(state, attempts=[*state.attempts, LOST])
    assert save_interval_s(lost, True, 0) <= FIRST_SAVE_S / 2


@pytest.mark.parametrize(("lost", "first_s"), [(0, 180.0), (1, 90.0), (2, 45.0)])
def test_losses_halve_the_first_interval_also_during_the_next_attempt(
    lost: int, first_s: float
) -> None:
    before = job([SAVED, *[LOST] * lost])
    during = replace(before, attempts=[*before.attempts, attempt("")])
    for state in (before, during):
        found = [save_interval_s(state, True, begun) for begun in range(3)]
        assert found == [first_s, 2 * first_s, 4 * first_s]
    saved = during.with_attempt(saved=True)  # the plan of a machine stays as it began
    assert save_interval_s(saved, True, 1) == 2 * first_s


def test_a_job_may_run_for_its_hours_in_all_attempts_and_waits_are_not_counted() -> None:
    ran = replace(LOST, began_unix=0.0, ended_unix=3600.0)
    runs = replace(attempt(""), began_unix=90_000.0)
    limited = replace(job([ran, runs]), max_hours=2.0)
    assert why_over(limited, Spent(0.0), 0.0, 93_599.0) == ""
    assert why_over(limited, Spent(0.0), 0.0, 93_600.0) == (
        "its time is over: the command ran for 2.0 h of 2.0 h"
    )
    assert why_over(replace(limited, max_hours=0.0), Spent(1e6), 0.0, 1e9) == ""


@pytest.mark.parametrize(
    ("spent", "why"),
    [
        (Spent(4.0, 2.0), ""),
        (Spent(4.5, 2.0), "4.50 $ of 5.00 $ so far, and 0.50 $ are kept to store its work"),
        (Spent(4.99), ""),
        (Spent(5.0), "its money is spent: 5.00 $ of 5.00 $ so far"),
        (Spent(0.0, 0.0, "m-1"), "the price of machine m-1 is not known"),
    ],
)
def test_a_job_ends_while_its_money_still_pays_for_storing_its_work(spent: Spent, why: str) -> None:
    limited = replace(job([attempt("")]), max_usd=5.0)
    said = why_over(limited, spent, 900.0, 10.0)
    assert why in said and bool(said) == bool(why)
