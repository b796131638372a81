"""A job is found from its submission on, also while its run has no record yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks import job_listing
from tasks.job_listing import found_job, wait_for_record
from torpor.control.jobs.listing import QueuedJob
from torpor.shared.errors import InvalidInput

JOB = "3f2a9c81d04e"


class Place:
    """A workspace whose job's record and runs come as a test says: one of ``records`` a look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: Any) -> None:
        self._records = [*records]
        self.waits, self.begins = False, False
        self.jobs = SimpleNamespace(of=self._record)
        self.spec = SimpleNamespace(name="mywork")
        self.store = SimpleNamespace(address="http://store/bucket")
        monkeypatch.setattr(job_listing, "queued_jobs", self._queued)

    def _record(self, job: str) -> Any:
        assert job == JOB
        return self._records.pop(0) if len(self._records) > 1 else self._records[0]

    def _queued(self, queue: str = "", begun_s: float = 0.0) -> list[QueuedJob]:
        there = self.waits or (self.begins and begun_s > 0)
        return [QueuedJob(JOB, "mywork", "normal", "run", 0.0, ["true"])] * there


def test_a_job_is_followed_from_its_queue_on(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SimpleNamespace(id=JOB)
    place: Any = Place(monkeypatch, None, None, None, record)
    place.waits = True
    naps: list[float] = []
    assert wait_for_record(place, "mywork", JOB, naps.append) is record
    assert len(naps) == 3


def test_a_run_that_begins_without_a_record_is_no_unknown_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: Any = Place(monkeypatch, None)
    place.begins = True
    assert found_job(place, "mywork", JOB) == (None, None)  # it is in no queue any more


def test_a_run_that_writes_its_record_between_two_looks_waits_in_no_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = SimpleNamespace(id=JOB)
    place: Any = Place(monkeypatch, None, record)
    place.begins = True
    assert found_job(place, "mywork", JOB) == (record, None)


def test_a_job_that_has_ended_does_not_wait_while_its_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = SimpleNamespace(id=JOB, ended=True)
    place: Any = Place(monkeypatch, record)
    place.begins = True
    assert found_job(place, "mywork", JOB) == (record, None)


def test_a_job_whose_run_was_taken_away_is_followed_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: Any = Place(monkeypatch, None)
    place.waits = True

    def nap(seconds: float) -> None:
        place.waits = False

    with pytest.raises(InvalidInput, match="has no job 3f2a9c81d04e"):
        wait_for_record(place, "mywork", JOB, nap)
