"""A job that a run drives: its record stays fresh, and requests reach the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.control.jobs.test_records import DEMO, made, silent
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.waiting import until
from torpor.control.jobs import driven_job
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Jobs, Stop
from torpor.shared.errors import HandedOver, StoreUnavailable, WorkspaceBusy
from torpor.shared.values import Machine, MachineId, SnapshotId

_MACHINE = Machine(MachineId("m1"), "market", None, "running", None, 2.0)
_SNAPSHOT = SnapshotId("20261120T234913Z-1f0c9ab2")


@pytest.fixture
def jobs(memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(driven_job, "STOP_S", 0.02)
    monkeypatch.setattr(driven_job, "DRIVEN_S", 0.02)
    return Jobs(memory_store, DEMO)


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def mine(jobs: Jobs, warned: list[str]) -> Iterator[Driven]:
    with Driven(jobs, jobs.take(made(), "one"), warned.append) as driven_job:
        yield driven_job


def test_the_record_stays_fresh(jobs: Jobs, mine: Driven) -> None:
    first = jobs.open()[0].driven_unix
    until(lambda: jobs.open()[0].driven_unix > first, "it is written again")


def test_an_attempt_and_a_save_are_in_the_record(jobs: Jobs, mine: Driven) -> None:
    mine.begin_attempt(_MACHINE, True, 2.0)
    mine.see(17)
    mine.saved(_SNAPSHOT, 5.0)
    mine.change_attempt(end="machine lost", ended_unix=time.time())
    (job,) = jobs.open()
    (attempt,) = job.attempts
    assert (attempt.number, attempt.machine, attempt.spot, attempt.saved) == (1, "m1", True, True)
    assert (job.saves, job.newest, job.newest_unix, job.log_offset) == (1, _SNAPSHOT, 5.0, 17)
    assert job.attempt is None


def test_a_request_to_stop_ends_a_nap(jobs: Jobs, mine: Driven) -> None:
    jobs.ask_stop(mine.job.id, Stop("cancelled", "hibernate", "enough", 2.0))
    mine.nap(10_000)
    assert mine.stop is not None and mine.stop.why == "enough"
    began = time.monotonic()
    mine.nap(0.05)  # the request is known by now
    assert time.monotonic() - began >= 0.05


def test_a_run_that_was_replaced_stops_at_its_next_word(jobs: Jobs, mine: Driven) -> None:
    def taken() -> bool:
        """Not where the first run writes its record at that moment."""
        with suppress(WorkspaceBusy):
            jobs.take(silent(mine.job), "two")
            return True
        return False

    until(taken, "another run takes it")
    with pytest.raises(HandedOver, match="driven by flow run two"):
        mine.nap(10_000)
    for word in (lambda: mine.change(why="x"), lambda: mine.end("failed", "x")):
        with pytest.raises(HandedOver):
            word()
    assert jobs.open()[0].driver == "two"


def test_a_silent_store_is_a_warning(
    jobs: Jobs, mine: Driven, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(job: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(jobs, "keep", silent)
    until(lambda: bool(warned), "it is warned of")
    assert "could not be kept fresh: no answer" in warned[0]
    mine.check()


def test_after_the_end_nothing_is_written(jobs: Jobs, mine: Driven) -> None:
    mine.end("succeeded", "status 0")
    assert mine.job.ended and jobs.open() == []
