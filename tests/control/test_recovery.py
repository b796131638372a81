"""What a bucket says of its workspaces to a host that knows nothing else of them."""

from __future__ import annotations

import pytest

from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record
from tests.fixtures.small_saves import put_save
from torpor.control.jobs.records import Job
from torpor.control.recovery import look_at_bucket
from torpor.control.rental.records import Rental, Rentals
from torpor.control.store.block_records import (
    MOST_BYTES,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.control.store.manifests import open_manifest
from torpor.control.store.signatures import ROOT_BYTES, Signer
from torpor.shared.errors import InvalidInput, StoreDenied, StoreUnavailable
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import ObjectKey, WorkspaceName, WorkspaceSpec, object_key

pytestmark = pytest.mark.rule(24)

DEMO = WorkspaceName("demo")
KEY = bytes(range(32))
ONE, TWO = "11111111", "22222222"


def _settings(*paths: str) -> Settings:
    spec = WorkspaceSpec(DEMO, [*(paths or ("~/workspace",))])
    made = settings_for(spec, "mine", sealed=True)
    return Settings(
        block="mine",
        stored=made.stored,
        blocks={"workspace/mine": {"name": DEMO, "paths": spec.paths}},
    )


def _written(store: MemoryStore, side: str = ONE) -> BlockRecords:
    records = BlockRecords(store, KEY)
    records.keep(DEMO, _settings(), side, "host")
    return records


def test_any_number_of_forged_records_hides_no_true_one(memory_store: MemoryStore) -> None:
    """They are tried first, by their names."""
    for number in range(40):
        memory_store.put(record_key(DEMO, f"000000{number:02}", "mine"), b"junk")
    _written(memory_store)
    (found,) = look_at_bucket(memory_store, KEY)
    assert [one.side for one in found.records] == [ONE]
    assert len(found.unread) == 40


def test_a_store_that_is_away_is_not_a_wrong_key(memory_store: MemoryStore) -> None:
    _written(memory_store)
    real = memory_store.get
    memory_store.get = lambda *a, **k: _raise(StoreUnavailable("it is away"))  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="away"):
        look_at_bucket(memory_store, KEY)
    memory_store.get = real  # type: ignore[method-assign]


def _raise(error: Exception) -> bytes:
    raise error


def test_a_wrong_key_is_refused_and_one_that_opens_a_snapshot_alone_is_not(
    memory_store: MemoryStore,
) -> None:
    """As after the bucket was copied to another name: nothing of it is signed there."""
    _written(memory_store)
    memory_store.signer = Signer(bytes(ROOT_BYTES), "")
    for key in (KEY, bytes(32)):
        with pytest.raises(InvalidInput, match="has signed none"):
            look_at_bucket(memory_store, key)
    made = put_save(memory_store, 1)
    manifest, _ = open_manifest(memory_store, DEMO, made, PLAIN)
    blob, _ = encode_manifest(manifest, Seal(workspace_key(KEY, DEMO)))
    memory_store.put(manifest_key(DEMO, made), blob)
    (found,) = look_at_bucket(memory_store, KEY)
    assert (found.snapshots, found.records) == ([made], [])
    assert [*found.unread] == [record_key(DEMO, ONE, "mine")]
    with pytest.raises(InvalidInput, match="has signed none"):
        look_at_bucket(memory_store, bytes(32))


def test_of_two_sides_the_newest_settings_are_taken_and_the_others_named(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store, side=ONE)
    records.keep(DEMO, _settings("/data"), TWO, "elsewhere")
    (found,) = look_at_bucket(memory_store, KEY)
    assert [one.side for one in found.records] == [TWO]
    assert ["control side 11111111" in words for words in found.others] == [True]


def test_a_look_at_a_bucket_writes_nothing_there_and_reads_no_giant(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key that may only read: also what a killed run left to be moved stays as it is."""
    _written(memory_store)
    rentals = Rentals(memory_store, DEMO)
    label = rentals.new_label("me")
    ended = Rental(label=label, provider="vast:1", state="ended", created_unix=1.0)
    put_record(memory_store, rentals.key(label), ended)
    job = Job(
        id="0123456789ab",
        workspace=DEMO,
        block="mine",
        command=["a"],
        created_unix=1.0,
        state="succeeded",
        ended_unix=2.0,
    )
    put_record(memory_store, object_key(f"workspaces/{DEMO}/jobs/open/{job.id}"), job)
    for number in range(3):
        memory_store.put(record_key(DEMO, f"0000000{number}", "mine"), bytes(2 * MOST_BYTES))
    before = [*memory_store.list("")]
    asked: list[int] = []
    real = memory_store.get

    def read(key: ObjectKey, *, max_bytes: int) -> bytes:
        asked.append(len(body := real(key, max_bytes=max_bytes)))
        return body

    monkeypatch.setattr(memory_store, "get", read)
    for name in ("put", "delete"):
        monkeypatch.setattr(memory_store, name, lambda *_, **__: _raise(StoreDenied("read only")))
    (found,) = look_at_bucket(memory_store, KEY)
    assert (found.rentals, found.jobs, len(found.unread)) == ([], [], 3)
    assert [one.side for one in found.records] == [ONE]
    assert [*memory_store.list("")] == before
    memory_store.signer = Signer(bytes(ROOT_BYTES), "")
    with pytest.raises(InvalidInput, match="has signed none"):
        look_at_bucket(memory_store, KEY)
    assert max(asked) < MOST_BYTES


def test_of_a_block_that_was_renamed_the_newest_record_counts(memory_store: MemoryStore) -> None:
    records, other = _written(memory_store), WorkspaceName("other")
    records.keep(other, _settings("/data"), ONE, "host")
    found = {one.name: [*one.records] for one in look_at_bucket(memory_store, KEY)}
    assert [name for name, of in found.items() if of] == [other]
