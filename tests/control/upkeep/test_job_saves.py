"""A job's saves go once a newer one is verified, and nothing else goes with them."""

from __future__ import annotations

import itertools

import pytest

from tests.fixtures.faulty_stores import ShortListings
from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import DEMO, put_line, put_save, verified_save
from torpor.control.jobs.standby import is_own_save
from torpor.control.store.manifests import snapshot_ids
from torpor.control.upkeep.autosaves import delete_superseded
from torpor.control.upkeep.job_saves import delete_superfluous
from torpor.control.upkeep.pins import holds, pin
from torpor.shared.errors import SnapshotMissing
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, made_at


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(itertools.count(1.0).__next__)


@pytest.mark.rule(11)
def test_only_the_jobs_own_older_saves_are_deleted(store: MemoryStore) -> None:
    began_with, first, by_the_user, second, newest = put_line(store, 0, 30, 40, 60, 90)
    saves = [first, second, newest]
    done = delete_superfluous(store, saves, verified_save(store, newest), 1, PLAIN)
    assert (sorted(done.deleted), done.left) == ([first, second], [newest])
    assert snapshot_ids(store, DEMO) == [began_with, by_the_user, newest]
    done = delete_superfluous(store, saves, verified_save(store, newest), 1, PLAIN)
    assert done == ([], [newest])


@pytest.mark.rule(11)
def test_a_pinned_save_stays_and_is_the_jobs_no_more(store: MemoryStore) -> None:
    first, newest = put_line(store, 30, 60)
    pin(store, DEMO, first, "the best weights")
    done = delete_superfluous(store, [first, newest], verified_save(store, newest), 1, PLAIN)
    assert done == ([], [newest])
    assert snapshot_ids(store, DEMO) == [first, newest]


def test_the_newest_saves_stay_as_many_as_the_job_keeps(store: MemoryStore) -> None:
    saves = put_line(store, 0, 30, 60, 90, 120)
    pin(store, DEMO, saves[3], "the best weights")
    done = delete_superfluous(store, saves, verified_save(store, saves[4]), 3, PLAIN)
    assert done == ([saves[0]], [saves[1], saves[2], saves[4]])
    assert snapshot_ids(store, DEMO) == saves[1:]


@pytest.mark.rule(11)
def test_what_the_machine_saved_after_the_verified_one_stays(store: MemoryStore) -> None:
    """Its name was signed before: the job would go on from it."""
    verified = put_save(store, 60)
    own = put_save(store, 50, [verified], own_save=1)
    newer = put_save(store, 90, [own, verified])
    done = delete_superfluous(store, [own, verified], verified_save(store, verified), 1, PLAIN)
    assert (done.deleted, done.left) == ([], [own, verified])
    assert snapshot_ids(store, DEMO) == [own, verified, newer]
    done = delete_superfluous(store, done.left, verified_save(store, newer), 1, PLAIN)
    assert done.left == []
    assert snapshot_ids(store, DEMO) == [newer]


@pytest.mark.rule(11)
def test_a_save_with_work_that_the_verified_one_lacks_stays(store: MemoryStore) -> None:
    """The machine that made it was given up, and the job went on from an earlier one."""
    first = put_save(store, 30, [])
    lost, newest = put_save(store, 40, [first]), put_save(store, 60, [first])
    done = delete_superfluous(store, [first, lost, newest], verified_save(store, newest), 1, PLAIN)
    assert (done.deleted, done.left) == ([first], [lost, newest])


@pytest.mark.rule(13)
def test_a_save_that_the_listing_lacks_stays_the_jobs(store: MemoryStore) -> None:
    first, newest = put_save(store, 30), put_save(store, 60)
    verified = verified_save(store, newest)
    gone = SnapshotId("20261119T000000Z-00000000")
    short = ShortListings(store)
    short.hidden = {manifest_key(DEMO, first)}
    done = delete_superfluous(short, [gone, first, newest], verified, 1, PLAIN)
    assert done == ([], [first, newest])


def test_the_last_save_with_files_that_nobody_has_deleted_stays(store: MemoryStore) -> None:
    first = put_save(store, 30, [], holds=30)
    second = put_save(store, 60, [first], holds=31)
    newest = put_save(store, 90, [second, first])
    saves = [first, second, newest]
    done = delete_superfluous(store, saves, verified_save(store, newest), 1, PLAIN)
    assert done == ([first], [second, newest])
    assert {one: pin.reason for one, pin in holds(store, DEMO).items()} == {
        second: "it alone holds 30 files (0 bytes) that a later snapshot missed and nobody "
        "deleted: ~/workspace/empty01, ~/workspace/empty02, ~/workspace/empty03"
    }
    back = put_save(store, 120, [newest, second, first], holds=31)
    verified = verified_save(store, back)
    delete_superseded(store, verified, PLAIN)  # as after each backup
    assert holds(store, DEMO) == {}
    done = delete_superfluous(store, [second, back], verified, 1, PLAIN)
    assert done == ([second], [back])


@pytest.mark.rule(11)
def test_a_proof_of_a_save_that_is_gone_deletes_nothing(store: MemoryStore) -> None:
    first, newest = put_save(store, 30), put_save(store, 60)
    verified = verified_save(store, newest)
    store.delete([manifest_key(DEMO, newest)])
    with pytest.raises(SnapshotMissing, match="nothing was deleted"):
        delete_superfluous(store, [first, newest], verified, 1, PLAIN)
    assert snapshot_ids(store, DEMO) == [first]


@pytest.mark.rule(11)
def test_a_machine_cannot_pass_off_a_users_snapshot_as_its_save(store: MemoryStore) -> None:
    earlier, own = put_save(store, 0, own_save=1), put_save(store, 30, own_save=1)
    users = put_save(store, 60)
    began_unix = made_at(own).timestamp() + 0.5
    assert is_own_save(store, DEMO, own, PLAIN, began_unix)
    assert not is_own_save(store, DEMO, users, PLAIN, began_unix)
    assert not is_own_save(store, DEMO, earlier, PLAIN, began_unix)  # of a job that has ended
