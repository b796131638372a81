"""What is said of a job that no run drives any more."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.control.jobs.listing import JobList, in_other_hands
from torpor.control.jobs.records import Attempt, Job, Stop
from torpor.shared.values import MachineId, WorkspaceName

ID = "3f2a9c81d04e"


def _job(price_usd_h: float | None = None, **more: Any) -> Job:
    attempt = Attempt(
        number=1,
        machine=MachineId("m-1"),
        provider="vast:1",
        rental="r1",
        spot=False,
        price_usd_h=price_usd_h or 0.0,
        began_unix=1.0,
        seen_unix=2.0,
    )
    begun = [] if price_usd_h is None else [attempt]
    return Job(
        id=ID,
        workspace=WorkspaceName("w"),
        block="mywork",
        command=["a"],
        created_unix=0.0,
        attempts=begun,
        **more,
    )


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (_job(0.5), "runs on, on machine m-1 at vast:1, which costs $0.50 an hour"),
        (_job(0.5, nodes=3), "machine m-1 and 2 others at vast:1, which costs $1.50 an hour"),
        (_job(0.0), "which costs money, how much is not known"),
        (_job(), f"job {ID} waits, and no machine of it runs"),
        (_job(rented=MachineId("m-2")), f"job {ID} waits, and machine m-2 may be left"),
    ],
)
def test_who_leaves_a_job_reads_what_runs_on_what_it_costs_and_how_to_end_it(
    job: Job, says: str
) -> None:
    said = in_other_hands(job, None, "")
    assert says in said
    assert f"`torpor job cancel mywork {ID}` ends it" in said
    assert f"`torpor job log mywork {ID} -f` shows what it prints" in said


def test_a_job_that_is_to_stop_is_not_said_to_go_on() -> None:
    stop = Stop("cancelled", "hibernate", "enough", 1.0)
    said = in_other_hands(_job(0.5), stop, "run eager-owl")
    assert said.startswith(f"run eager-owl stops job {ID}")


def test_the_list_shows_what_a_job_has_used_beside_its_limits() -> None:
    limited = _job(0.5, max_hours=5.0, max_usd=20.0)
    ran = limited.with_attempt(ended_unix=1.0 + 2.5 * 3600)
    (row,) = JobList([ran], [], [], {}, {ID: 12.3}).rows()
    assert row["used"] == "2.5 of 5 h, 12.30 of 20.00 $"
    (row,) = JobList([ran], [], [], {}).rows()
    assert row["used"] == "2.5 of 5 h, ? of 20.00 $"
    (row,) = JobList([_job(0.5)], [], [], {}).rows()
    assert row["used"] == ""
