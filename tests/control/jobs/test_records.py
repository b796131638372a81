"""The records of jobs: one driver, an end that is the end, and requests to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.fixtures.contested_store import HOUR_S, ContestedStore
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record
from torpor.control.jobs.records import LOST_S, Job, Jobs, Stop, job_id, log_path, new_job_id
from torpor.shared.errors import HandedOver, InvalidInput, StoreError, WorkspaceBusy
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName, WorkspaceSpec

DEMO = WorkspaceName("demo")
_ID = "3f2a9c81d04e"


@pytest.fixture
def jobs(memory_store: MemoryStore) -> Jobs:
    return Jobs(memory_store, DEMO)


def made(job: str = _ID, **changes: Any) -> Job:
    fields = {"command": ["true"], "created_unix": 1.0, **changes}
    return Job(id=job, workspace=DEMO, block="demo", **fields)


def silent(job: Job) -> Job:
    """Its run has not written for too long."""
    return msgspec.structs.replace(job, driven_unix=time.time() - LOST_S - 1)


def test_one_run_drives_a_job(jobs: Jobs) -> None:
    mine = jobs.take(made(), "one")
    assert jobs.of(_ID) == mine and mine.driven
    with pytest.raises(WorkspaceBusy, match="flow run one works on job"):
        jobs.take(mine, "two")
    assert jobs.take(mine, "one").driver == "one"  # Prefect starts the same run again


@pytest.mark.parametrize("name", ["x", f"{_ID}.tmp", f"deeper/{_ID}", "3F2A9C81D04E"])
def test_what_has_no_jobs_id_is_no_job_and_hides_none(
    jobs: Jobs, memory_store: MemoryStore, name: str
) -> None:
    mine = jobs.take(made(), "one")
    for kind in ("open", "ended"):
        memory_store.put(ObjectKey(f"workspaces/demo/jobs/{kind}/{name}"), b"somebody else's")
    assert jobs.open() == [mine]


@pytest.mark.rule(16)
def test_a_silent_driver_is_replaced_and_stops(jobs: Jobs) -> None:
    mine = jobs.take(made(), "one")
    assert not silent(mine).driven
    theirs = jobs.take(silent(mine), "two")
    for write in (jobs.keep, jobs.end, jobs.leave):
        with pytest.raises(HandedOver, match="driven by flow run two"):
            write(mine)
    assert jobs.of(_ID) == theirs


def test_an_earlier_process_of_the_same_run_stops(jobs: Jobs) -> None:
    """Prefect may start a run again while its first process lives."""
    first = jobs.take(made(), "one")
    second = jobs.take(first, "one")
    with pytest.raises(HandedOver, match="driven by flow run one"):
        jobs.keep(first)
    assert jobs.keep(second).driver == "one"


def test_what_an_earlier_process_of_the_same_run_wrote_is_kept(jobs: Jobs) -> None:
    first = jobs.take(made(), "run-1")
    jobs.keep(msgspec.structs.replace(first, saves=7))
    again = jobs.take(first, "run-1")  # it read the record before that
    assert (again.saves, again.version) == (7, 3)


def test_what_a_driver_leaves_is_continued_at_once(jobs: Jobs) -> None:
    mine = jobs.take(made(), "one")
    jobs.leave(msgspec.structs.replace(mine, why="the store refused"))
    left = jobs.open()[0]
    assert (left.driven, left.why, left.failures) == (False, "the store refused", 1)
    assert jobs.take(left, "two").driver == "two"


def test_a_run_that_is_interrupted_has_not_failed(jobs: Jobs) -> None:
    left = jobs.leave(jobs.take(made(), "one"), failed=False)
    assert (left.driven, left.failures) == (False, 0)


def test_a_driver_whose_run_has_ended_is_replaced_at_once(jobs: Jobs) -> None:
    mine = jobs.take(made(), "one")
    assert jobs.take(mine, "two", gone=True).driver == "two"
    with pytest.raises(HandedOver, match="driven by flow run two"):
        jobs.keep(mine)


@pytest.mark.rule(16)
def test_an_end_is_the_end(jobs: Jobs) -> None:
    mine = jobs.take(made(), "one")
    jobs.ask_stop(_ID, Stop("cancelled", "keep", "enough", 2.0))
    ended = jobs.end(msgspec.structs.replace(mine, state="succeeded"))
    assert ended.ended_unix is not None and ended.ended
    assert (jobs.open(), jobs.ended(), jobs.of(_ID)) == ([], [ended], ended)
    assert jobs.stop_asked(_ID) is None
    with pytest.raises(HandedOver, match="has ended"):
        jobs.take(silent(mine), "two")
    with pytest.raises(HandedOver, match="has ended"):
        jobs.keep(mine)
    assert jobs.of(_ID) == ended


@pytest.fixture
def contested() -> ContestedStore:
    return ContestedStore()


@pytest.mark.rule(18)
def test_a_driver_that_slept_before_its_write_stops(contested: ContestedStore) -> None:
    jobs = Jobs(contested, DEMO)
    for number, write in enumerate((jobs.keep, jobs.leave, jobs.end)):
        mine = jobs.take(made(f"{number}" * 12), "one")
        contested.meanwhile = partial(jobs.take, silent(mine), "two")
        with pytest.raises(HandedOver, match="driven by flow run two"):
            write(mine)
        theirs = jobs.of(mine.id)
        assert (theirs.driver, theirs.ended) == ("two", False)


@pytest.mark.rule(18)
def test_of_two_runs_that_find_a_job_silent_one_drives_it(contested: ContestedStore) -> None:
    jobs = Jobs(contested, DEMO)
    mine = jobs.take(made(), "one")
    contested.meanwhile = lambda: jobs.take(silent(mine), "two")
    for _ in range(2):  # then what it read has been written since
        with pytest.raises(WorkspaceBusy, match="flow run two works on job"):
            jobs.take(silent(mine), "three")
    assert jobs.open()[0].driver == "two"


@pytest.mark.rule(18)
def test_a_write_that_arrives_late_stops_only_the_run_that_sent_it(
    jobs: Jobs, memory_store: MemoryStore
) -> None:
    """At a store that cannot refuse it."""
    mine = jobs.take(made(), "one")
    theirs = jobs.keep(jobs.take(silent(mine), "two"))
    put_record(memory_store, ObjectKey(f"workspaces/demo/jobs/open/{_ID}"), mine)
    theirs = jobs.keep(theirs)
    assert jobs.open() == [theirs]
    with pytest.raises(HandedOver, match="driven by flow run two"):
        jobs.keep(mine)


@pytest.mark.rule(18)
@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_driver_is_alive_by_the_store_s_clock(ahead_s: float, contested: ContestedStore) -> None:
    """A clock that is an hour off neither ends a live driver nor keeps a dead one alive."""
    jobs = Jobs(contested, DEMO)
    with contested.host(ahead_s):
        jobs.take(made(created_unix=time.time()), "one")
    with contested.host():
        assert jobs.open()[0].driven
        with pytest.raises(WorkspaceBusy, match="flow run one works on job"):
            jobs.take(jobs.open()[0], "two")
    contested.pass_time(LOST_S + 1)
    with contested.host():
        assert not jobs.open()[0].driven
        assert jobs.take(jobs.open()[0], "two").driver == "two"


@pytest.mark.parametrize("filed", [False, True])
def test_an_end_that_was_killed_half_way_is_an_end(
    filed: bool, jobs: Jobs, memory_store: MemoryStore
) -> None:
    """Before it was filed, which the next look does, or before the open record was deleted."""
    mine = jobs.take(made(), "one")
    ended = jobs.end(msgspec.structs.replace(mine, state="succeeded"))
    if not filed:
        memory_store.delete([ObjectKey(f"workspaces/demo/jobs/ended/{_ID}")])
    left = mine if filed else ended
    put_record(memory_store, ObjectKey(f"workspaces/demo/jobs/open/{_ID}"), left)
    assert jobs.of(_ID) == ended
    assert (jobs.open(), jobs.ended()) == ([], [ended])
    assert len(list(memory_store.list("workspaces/demo/jobs/"))) == (2 if filed else 1)


def test_a_job_that_ends_during_a_look_is_not_open(
    jobs: Jobs, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, listed = jobs.take(made(), "one"), memory_store.list

    def ends(prefix: str) -> Iterator[StoredObject]:
        found = [*listed(prefix)]
        if found and prefix.endswith("/open/"):
            jobs.end(msgspec.structs.replace(mine, state="succeeded"))
        return iter(found)

    monkeypatch.setattr(memory_store, "list", ends)
    assert jobs.open() == []


def test_jobs_are_listed_oldest_first(jobs: Jobs) -> None:
    for at, job in ((3.0, "c" * 12), (1.0, "b" * 12), (2.0, "a" * 12)):
        jobs.take(made(job, created_unix=at), "one")
    assert [job.id[0] for job in jobs.open()] == ["b", "a", "c"]


def test_a_damaged_record_is_an_error_that_names_it(jobs: Jobs, memory_store: MemoryStore) -> None:
    put_record(memory_store, ObjectKey(f"workspaces/demo/jobs/open/{_ID}"), b"{}")
    with pytest.raises(StoreError, match=f"jobs/open/{_ID} .* is not what this torpor writes"):
        jobs.open()


@pytest.mark.rule(16)
def test_runs_that_were_made_in_one_millisecond_begin_jobs_of_their_own(jobs: Jobs) -> None:
    """A schedule makes its runs in one loop; a run's id begins with its milliseconds."""
    first, second = (f"019aab3c-5d2e-7c41-9f00-3b1d2a7c9e{last}" for last in (55, 56))
    mine = jobs.take(made(new_job_id(first)), first)
    ended = jobs.end(msgspec.structs.replace(mine, state="failed"))
    assert (jobs.started_by(first), jobs.started_by(second)) == ([ended], [])


def test_each_retry_of_a_run_begins_a_job_of_its_own(jobs: Jobs) -> None:
    run = "019aab3c-5d2e-7c41-9f00-3b1d2a7c9e55"
    for retry in range(3):
        assert len(jobs.started_by(run)) == retry
        jobs.take(made(new_job_id(run, retry)), run)


def test_a_record_of_an_earlier_version_is_read(jobs: Jobs, memory_store: MemoryStore) -> None:
    """As it was written before a job knew of stopped machines and of its saves. Its limits have
    the names that they had then: a job that runs while torpor is upgraded keeps them."""
    taken = jobs.take(made(saves=3, max_hours=2.0, max_usd=5.0), "one")
    written = msgspec.to_builtins(taken)
    assert (written["most_hours"], written["most_usd"]) == (2.0, 5.0)
    for later in ("stopped", "kept_saves", "driven_for", "begun_by"):
        del written[later]
    key = ObjectKey(f"workspaces/demo/jobs/open/{_ID}")
    put_record(memory_store, key, written)
    assert jobs.open() == [taken]


def test_ids() -> None:
    for wrong in ("", "3f2a9c81d04", "../../../../x", "3F2A9C81D04E"):
        with pytest.raises(InvalidInput, match="is not a job's id"):
            job_id(wrong)
    assert log_path(WorkspaceSpec(DEMO, ["~/w/"]), _ID) == f"~/w/.torpor-jobs/{_ID}.log"
