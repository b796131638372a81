"""The settings of workspaces in their bucket: who may write them, and what is believed."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.block_records import (
    DAY_S,
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.control.store.records import Unread
from torpor.control.store.signatures import ROOT_BYTES, Signer, record_in
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import RecordRefused
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import ObjectKey, StoredObject, WorkspaceName, WorkspaceSpec

pytestmark = pytest.mark.rule(24)

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
    unread: Unread = {}
    found = records.read_all([_listed(store, key)], unread)
    for error in unread.values():
        raise error
    return found[key]


def test_nobody_but_whoever_has_the_store_s_key_reads_a_record(memory_store: MemoryStore) -> None:
    """A machine has the workspace's key, and may come by the bucket's."""
    records = _written(memory_store)
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    assert b"PRIVATE" not in body
    assert b"workspace" not in record_in(body)
    for key in (workspace_key(KEY, DEMO), bytes(32)):
        with pytest.raises(RecordRefused, match=OBJECT):
            _read(BlockRecords(memory_store, key), memory_store)
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
        _read(records, memory_store, other)
    with pytest.raises(RecordRefused, match=beside):  # sealed for its own name
        _read(records, memory_store, beside)
    newer = msgspec.json.encode({"format": 2, "written_unix": 1.0, "anything": {}})
    memory_store.put(OBJECT, memory_store.signer.sign(OBJECT, newer))
    with pytest.raises(RecordRefused, match="format 2"):
        _read(records, memory_store)
    forger = Signer(bytes(ROOT_BYTES), "")
    memory_store.put(OBJECT, forger.sign(OBJECT, record_in(body)))
    with pytest.raises(RecordRefused, match="not believed"):
        _read(records, memory_store)


def test_a_plain_record_brings_no_command_and_no_login(memory_store: MemoryStore) -> None:
    """Whoever signed it; or the store got its key later: then it is read and written again."""
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


def test_who_believes_all_records_signs_no_settings(memory_store: MemoryStore) -> None:
    """A forged address of a market's API would get the market's key. Their own host writes them
    again."""
    records = _written(memory_store)
    signed = memory_store.get(OBJECT, max_bytes=1 << 20)
    for forged in (
        record_in(signed),
        Signer(bytes(ROOT_BYTES), "").sign(OBJECT, record_in(signed)),
    ):
        memory_store.put(OBJECT, forged)
        assert sign_records(memory_store).signed == []
        assert memory_store.get(OBJECT, max_bytes=1 << 20) == forged
    records.keep(DEMO, _settings(), ONE, "host")
    assert _read(records, memory_store).settings == _settings()


def test_a_side_writes_over_no_other_side_s_record(memory_store: MemoryStore) -> None:
    records = _written(memory_store)
    records.keep(DEMO, _settings("/data"), TWO, "host")
    assert _read(records, memory_store).settings == _settings()


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
