"""The settings of workspaces in their bucket: who may write them, and what is believed."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.block_records import (
    DAY_S,
    LATE_S,
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.control.store.signatures import ROOT_BYTES, Signer, record_in
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import RecordRefused
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName, WorkspaceSpec

DEMO = WorkspaceName("demo")
KEY = bytes(range(32))
ONE, TWO = "11111111", "22222222"
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
OBJECT = record_key(DEMO, ONE, "mine")


def _settings(*paths: str, **changes: object) -> Settings:
    spec = WorkspaceSpec(DEMO, [*(paths or ("~/workspace",))])
    made = settings_for(spec, "mine", sealed=True)
    blocks = {
        "ssh-identity/default": {"private_key": SECRET},
        "workspace/mine": {"name": DEMO, "paths": spec.paths},
    }
    return msgspec.structs.replace(made, blocks=blocks, **changes)


def _written(store: MemoryStore, key: bytes | None = KEY, side: str = ONE) -> BlockRecords:
    records = BlockRecords(store, key)
    records.keep(DEMO, _settings(), side, "host")
    return records


def _listed(store: MemoryStore, key: ObjectKey = OBJECT) -> StoredObject:
    found = store.head(key)
    assert found is not None
    return found


def _read(records: BlockRecords, store: MemoryStore, key: ObjectKey = OBJECT) -> BlockRecord:
    found = records.read(_listed(store, key))
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
            BlockRecords(memory_store, key).read(_listed(memory_store))
    assert _read(records, memory_store).settings == _settings()


def test_a_record_that_is_forged_moved_or_of_a_newer_torpor_is_refused_by_name(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store)
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    other = record_key(WorkspaceName("other"), ONE, "mine")
    beside = record_key(DEMO, TWO, "mine")
    memory_store.put(other, body)
    memory_store.put(beside, memory_store.signer.sign(beside, record_in(body)))
    with pytest.raises(RecordRefused, match=other):
        records.read(_listed(memory_store, other))
    with pytest.raises(RecordRefused, match=beside):  # sealed for its own name
        records.read(_listed(memory_store, beside))
    newer = msgspec.json.encode({"format": 2, "written_unix": 1.0, "anything": {}})
    memory_store.put(OBJECT, memory_store.signer.sign(OBJECT, newer))
    with pytest.raises(RecordRefused, match="format 2"):
        records.read(_listed(memory_store))
    forger = Signer(bytes(ROOT_BYTES), "")
    memory_store.put(OBJECT, forger.sign(OBJECT, record_in(body)))
    with pytest.raises(RecordRefused, match="not believed"):
        records.read(_listed(memory_store))


def test_a_plain_record_brings_no_command_and_no_login(memory_store: MemoryStore) -> None:
    """Its user signed all that was there (`--believe-records`), and somebody had written a command
    into it; or the store got its key later: then it is read and written again."""
    evil = _settings()
    workspace = evil.blocks["workspace/mine"] | {"quiesce": ["evil"], "programs": ["evil"]}
    evil = msgspec.structs.replace(
        evil,
        stored=evil.stored | {"quiesce": ["evil"]},
        blocks=evil.blocks | {"workspace/mine": workspace},
    )
    BlockRecords(memory_store, None).keep(DEMO, evil, ONE, "host")
    for key in (None, KEY):
        said = str(_read(BlockRecords(memory_store, key), memory_store))
        assert "evil" not in said
        assert SECRET not in said
    records = BlockRecords(memory_store, KEY)
    records.keep(DEMO, _settings(), ONE, "host")
    assert b"workspace" not in record_in(memory_store.get(OBJECT, max_bytes=1 << 20))


def test_an_older_record_that_is_put_back_is_refused_and_one_that_is_signed_again_is_not() -> None:
    now = 1e9
    store = MemoryStore(lambda: now)
    records = _written(store)
    older = store.get(OBJECT, max_bytes=1 << 20)
    now += LATE_S - 10
    store.put(OBJECT, older)  # its own request, sent again and again
    _read(records, store)
    now += 2 * LATE_S
    records.keep(DEMO, _settings("~/new"), ONE, "host")
    _read(records, store)
    store.put(OBJECT, older)
    with pytest.raises(RecordRefused, match="older state back"):
        _read(records, store)
    assert sign_records(store, KEY).signed == [OBJECT]  # its user had copied the bucket
    assert sign_records(store, KEY).signed == []
    _read(records, store)
    now += 2 * LATE_S
    store.signer = Signer(bytes(ROOT_BYTES), "elsewhere")  # its user gave it another key
    sign_records(store, KEY)
    _read(records, store)
    store.close()


def test_who_believes_all_records_signs_no_settings_that_anybody_may_have_written(
    memory_store: MemoryStore,
) -> None:
    """A forged address of a market's API would get the market's key."""
    evil = _settings()
    evil = msgspec.structs.replace(evil, blocks={"vast-provider/default": {"url": "https://evil"}})
    for store_key in (None, bytes(32)):  # plain, and sealed with a key of the forger
        BlockRecords(memory_store, store_key).keep(DEMO, evil, ONE, "host")
        signed = memory_store.get(OBJECT, max_bytes=1 << 20)
        forger = Signer(bytes(ROOT_BYTES), "")
        for forged in (record_in(signed), forger.sign(OBJECT, record_in(signed))):
            memory_store.put(OBJECT, forged)
            done = sign_records(memory_store, KEY)
            assert (done.signed, [*done.left]) == ([], [OBJECT])
            assert memory_store.get(OBJECT, max_bytes=1 << 20) == forged
    BlockRecords(memory_store, KEY).keep(DEMO, _settings(), ONE, "host")
    own = record_in(memory_store.get(OBJECT, max_bytes=1 << 20))
    memory_store.put(OBJECT, forger.sign(OBJECT, own))  # before the key that signs was lost
    assert sign_records(memory_store, KEY).signed == [OBJECT]
    BlockRecords(memory_store, None).keep(DEMO, evil, ONE, "host")
    memory_store.put(OBJECT, record_in(memory_store.get(OBJECT, max_bytes=1 << 20)))
    assert sign_records(memory_store).signed == []  # also in a plain store


def test_a_side_writes_over_no_other_side_s_record(memory_store: MemoryStore) -> None:
    records = _written(memory_store)
    records.keep(DEMO, _settings("/data"), TWO, "host")
    assert _read(records, memory_store).settings == _settings()


def test_a_record_that_is_withdrawn_stays_so_and_is_written_again_by_its_own_side_only(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store)
    records.withdraw(DEMO, ONE, "mine")
    before = _listed(memory_store)
    assert _read(records, memory_store).withdrawn
    records.withdraw(DEMO, ONE, "mine")
    assert _listed(memory_store) == before
    records.keep(DEMO, _settings(), ONE, "host")
    assert not _read(records, memory_store).withdrawn


def test_an_unchanged_record_is_written_once_a_day(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the newest is of a host that lives."""
    records = _written(memory_store)
    before = _listed(memory_store)
    records.keep(DEMO, _settings(), ONE, "host")
    assert _listed(memory_store) == before
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + DAY_S + 1)
    records.keep(DEMO, _settings(), ONE, "host")
    assert _read(records, memory_store).written_unix > before.modified_unix + DAY_S


@pytest.mark.parametrize("store_key", [KEY, None])
def test_a_long_exclude_is_kept_once(memory_store: MemoryStore, store_key: bytes | None) -> None:
    """Twice it would be too long."""
    settings = _settings()
    patterns = [f"scratch/{number:010}" for number in range(5000)]
    fields = settings.blocks["workspace/mine"] | {"exclude": patterns}
    long = msgspec.structs.replace(
        settings,
        stored=settings.stored | {"exclude": patterns},
        blocks={"workspace/mine": fields},
    )
    records = BlockRecords(memory_store, store_key)
    records.keep(DEMO, long, ONE, "host")
    assert _read(records, memory_store).settings.stored["exclude"] == patterns


def test_the_store_of_a_record_is_named_as_recover_takes_it() -> None:
    """A Workspace block may name it with its type."""
    fields = {"workspace/mine": {"store": "object-store/main"}}
    assert Settings(block="mine", blocks=fields).store == "main"
