"""The settings of workspaces in their bucket: who may write them, and what is believed."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.block_records import (
    LATE_S,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.control.store.signatures import ROOT_BYTES, Signer, record_in
from torpor.shared.errors import RecordRefused
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName, WorkspaceSpec

DEMO = WorkspaceName("demo")
KEY = bytes(range(32))
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
OBJECT = record_key(DEMO, "mine")


def _settings(*paths: str, **changes: object) -> Settings:
    spec = WorkspaceSpec(DEMO, [*(paths or ("~/workspace",))])
    made = settings_for(spec, "mine", sealed=True)
    blocks = {"ssh-identity/default": {"private_key": SECRET}}
    return msgspec.structs.replace(made, blocks=blocks, **changes)


def _written(store: MemoryStore, key: bytes | None = KEY, side: str = "one") -> BlockRecords:
    records = BlockRecords(store, key)
    assert records.keep(DEMO, _settings(), side, "host") is None
    return records


def _listed(store: MemoryStore) -> StoredObject:
    found = store.head(OBJECT)
    assert found is not None
    return found


def test_nobody_but_whoever_has_the_store_s_key_reads_a_record(memory_store: MemoryStore) -> None:
    """A machine has the workspace's key, and may come by the bucket's."""
    records = _written(memory_store)
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    assert b"PRIVATE" not in body
    assert b"workspace" not in record_in(body)
    for key in (workspace_key(KEY, DEMO), bytes(32)):
        with pytest.raises(RecordRefused, match=OBJECT):
            BlockRecords(memory_store, key).read(DEMO, "mine")
    found = records.read(DEMO, "mine")
    assert found is not None
    assert found[0].settings == _settings()


def test_a_record_that_is_forged_moved_plain_or_of_a_newer_torpor_is_refused_by_name(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store)
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    other = record_key(WorkspaceName("other"), "mine")
    beside = record_key(DEMO, "beside")
    memory_store.put(other, body)
    memory_store.put(beside, memory_store.signer.sign(beside, record_in(body)))
    with pytest.raises(RecordRefused, match=other):
        records.read(WorkspaceName("other"), "mine")
    with pytest.raises(RecordRefused, match=beside):  # sealed for its own name
        records.read(DEMO, "beside")
    changed = {
        "newer": {"format": 2, "written_unix": 1.0, "anything": {}},
        "plain": {"format": 1, "written_unix": 1.0, "plain": {"workspace": "demo"}},
    }
    for changes in changed.values():
        blob = memory_store.signer.sign(OBJECT, msgspec.json.encode(changes))
        memory_store.put(OBJECT, blob)
        with pytest.raises(RecordRefused, match=OBJECT):
            records.read(DEMO, "mine")
    forger = Signer(bytes(ROOT_BYTES), "")
    memory_store.put(OBJECT, forger.sign(OBJECT, record_in(body)))
    with pytest.raises(RecordRefused, match="not believed"):
        records.read(DEMO, "mine", _listed(memory_store))


def test_an_older_record_that_is_put_back_is_refused_where_settings_are_recovered() -> None:
    now = 1e9
    store = MemoryStore(lambda: now)
    records = _written(store)
    older = store.get(OBJECT, max_bytes=1 << 20)
    now += LATE_S - 10
    store.put(OBJECT, older)  # its own request, sent again and again
    assert records.read(DEMO, "mine", _listed(store)) is not None
    now += 2 * LATE_S
    records.keep(DEMO, _settings("~/new"), "one", "host")
    assert records.read(DEMO, "mine", _listed(store)) is not None
    store.put(OBJECT, older)
    with pytest.raises(RecordRefused, match="older state back"):
        records.read(DEMO, "mine", _listed(store))
    assert records.read(DEMO, "mine") is not None  # a person may take it all the same
    store.close()


def test_what_another_control_side_has_written_stays_unless_a_person_says_so(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store, side="one")
    new, old = _settings("~/workspace", "/data"), _settings()
    other = records.keep(DEMO, new, "two", "host")
    assert other is not None
    assert other.side == "one"
    assert new.differs_from(other.settings) == ["paths"]
    assert records.keep(DEMO, new, "two", "host", was=old) is None  # an edit of what both have
    found = records.read(DEMO, "mine")
    assert found is not None
    assert (found[0].side, found[0].number) == ("two", 2)
    assert records.keep(DEMO, old, "one", "host", was=old) is not None  # of an old state
    assert records.keep(DEMO, old, "one", "host", force=True) is None


def test_a_record_that_cannot_be_believed_is_written_over_only_where_a_person_says_so(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store)
    memory_store.put(OBJECT, b"junk")
    with pytest.raises(RecordRefused):
        records.keep(DEMO, _settings(), "one", "host")
    assert records.keep(DEMO, _settings(), "one", "host", force=True) is None
    assert records.read(DEMO, "mine") is not None


def test_an_unchanged_record_costs_one_request(memory_store: MemoryStore) -> None:
    records = _written(memory_store)
    before = _listed(memory_store)
    puts: list[ObjectKey] = []
    real = memory_store.put
    memory_store.put = lambda key, *a, **k: puts.append(key) or real(key, *a, **k)  # type: ignore[method-assign, func-returns-value]
    assert records.keep(DEMO, _settings(), "one", "host") is None
    assert records.keep(DEMO, _settings(), "two", "host") is None  # nothing to choose
    assert (puts, _listed(memory_store)) == ([], before)
