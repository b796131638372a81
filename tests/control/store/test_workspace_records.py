"""The records of workspaces in their bucket: who may write them, and what is believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.signatures import ROOT_BYTES, Signer, record_in
from torpor.control.store.workspace_records import Settings, WorkspaceRecord, WorkspaceRecords
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import InvalidInput, KeyUnknown, RecordRefused
from torpor.shared.format.keys import workspace_key
from torpor.shared.format.names import settings_key
from torpor.shared.values import ObjectKey, WorkspaceName

pytestmark = pytest.mark.rule(24)

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")
KEY = bytes(range(32))
ONE, TWO = "11111111", "22222222"
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
OBJECT = settings_key(DEMO)


def _settings(*paths: str, **more: object) -> Settings:
    blocks: dict[str, dict[str, Any]] = {
        "ssh-identity/default": {"private_key": SECRET},
        "workspace/mine": {"name": DEMO, "paths": [*paths], **more},
    }
    return Settings(block="mine", blocks=blocks)


def _raise(error: Exception) -> None:
    raise error


def _written(store: MemoryStore, key: bytes | None = KEY, side: str = ONE) -> WorkspaceRecords:
    records = WorkspaceRecords(store, key)
    records.keep(DEMO, _settings(), side, "host", _raise)
    return records


def _read(records: WorkspaceRecords, name: WorkspaceName = DEMO) -> WorkspaceRecord:
    found = records.read(name)
    assert found is not None
    return found


def test_nobody_but_whoever_has_the_store_s_key_reads_a_record(memory_store: MemoryStore) -> None:
    """A machine has the workspace's key, and may come by the bucket's."""
    records = _written(memory_store)
    records.take(DEMO, ONE, "host")
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    assert b"PRIVATE" not in body
    assert b"workspace" not in record_in(body)
    for key in (workspace_key(KEY, DEMO), bytes(32)):
        with pytest.raises(RecordRefused, match=OBJECT):
            WorkspaceRecords(memory_store, key).read(DEMO)
    assert _read(records).settings == _settings()


def test_a_key_that_opens_nothing_any_more_is_no_damage_of_the_record(
    memory_store: MemoryStore,
) -> None:
    """It was removed or rotated. A damaged record counts as one without an owner, and this one
    may name another."""
    _written(memory_store).take(DEMO, TWO, "new")
    removed = WorkspaceRecords(memory_store, lambda store: _unknown())
    before = memory_store.get(OBJECT, max_bytes=1 << 20)
    for does in (
        lambda: removed.read(DEMO),
        lambda: removed.keep(DEMO, _settings("/data"), ONE, "host", _raise),
        lambda: removed.take(DEMO, ONE, "host"),
    ):
        with pytest.raises(KeyUnknown):
            does()
    assert memory_store.get(OBJECT, max_bytes=1 << 20) == before
    asked: list[MemoryStore] = []
    lazy = WorkspaceRecords(memory_store, lambda store: asked.append(store) or KEY)  # type: ignore[func-returns-value, arg-type]
    assert asked == []
    assert _read(lazy).settings == _settings()


def _unknown() -> bytes:
    raise KeyUnknown("the key 7faa21fc opens nothing")


def test_a_record_that_is_forged_moved_or_of_a_newer_torpor_is_refused_by_name(
    memory_store: MemoryStore,
) -> None:
    records = _written(memory_store)
    body = memory_store.get(OBJECT, max_bytes=1 << 20)
    moved = settings_key(OTHER)
    memory_store.put(moved, body)
    with pytest.raises(RecordRefused, match=moved):
        records.read(OTHER)
    memory_store.put(moved, memory_store.signer.sign(moved, record_in(body)))
    with pytest.raises(RecordRefused, match=moved):  # sealed for its own name
        records.read(OTHER)
    newer = msgspec.json.encode({"format": 2, "written_unix": 1.0, "anything": {}})
    memory_store.put(OBJECT, memory_store.signer.sign(OBJECT, newer))
    with pytest.raises(InvalidInput, match="format 2"):
        records.read(DEMO)
    memory_store.put(OBJECT, Signer(bytes(ROOT_BYTES), "").sign(OBJECT, record_in(body)))
    with pytest.raises(RecordRefused, match="not believed"):
        records.read(DEMO)
    unread: dict[ObjectKey, Any] = {}
    assert records.read_all(records.listed(), unread) == {}
    assert {*unread} == {OBJECT, moved}


def test_a_plain_record_brings_no_command_and_no_login(memory_store: MemoryStore) -> None:
    """Whoever signed it."""
    evil = _settings(quiesce=["evil"], programs=["evil"])
    WorkspaceRecords(memory_store, None).keep(DEMO, evil, ONE, "host", _raise)
    for key in (None, KEY):
        said = str(_read(WorkspaceRecords(memory_store, key)))
        assert "evil" not in said
        assert SECRET not in said


def test_who_believes_all_records_signs_none_of_a_workspace(memory_store: MemoryStore) -> None:
    """A forged address of a market's API would get the market's key."""
    _written(memory_store)
    signed = memory_store.get(OBJECT, max_bytes=1 << 20)
    forger = Signer(bytes(ROOT_BYTES), "")
    for forged in (record_in(signed), forger.sign(OBJECT, record_in(signed))):
        memory_store.put(OBJECT, forged)
        assert sign_records(memory_store).signed == []
        assert memory_store.get(OBJECT, max_bytes=1 << 20) == forged


def test_a_side_that_reads_no_owner_writes_over_none_that_is_named_meanwhile(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round: the newest settings stay when an owner is named."""
    records = _written(memory_store)
    real = memory_store.read

    def between(does: Any) -> None:
        def read(key: ObjectKey, **how: Any) -> Any:
            answer = real(key, **how)
            monkeypatch.setattr(memory_store, "read", real)
            does()
            return answer

        monkeypatch.setattr(memory_store, "read", read)

    between(lambda: records.take(DEMO, TWO, "new"))
    found = records.keep(DEMO, _settings("/data"), ONE, "host", _raise)
    assert found is not None
    assert found.owned_elsewhere(ONE) is not None
    assert _read(records).settings == _settings()
    between(lambda: records.keep(DEMO, _settings("/new"), TWO, "new", _raise))
    records.take(DEMO, ONE, "host")
    record = _read(records)
    assert record.settings == _settings("/new")
    assert record.owner is not None
    assert record.owner.side == ONE


def test_an_owner_who_recovers_again_writes_nothing(memory_store: MemoryStore) -> None:
    records = _written(memory_store)
    records.take(DEMO, ONE, "host")
    before = memory_store.get(OBJECT, max_bytes=1 << 20)
    records.take(DEMO, ONE, "host")
    assert memory_store.get(OBJECT, max_bytes=1 << 20) == before


def test_no_private_key_of_another_side_is_dropped_and_a_key_of_one_s_own_at_its_user_s_wish(
    memory_store: MemoryStore,
) -> None:
    """The new host names its identity alike; machines that stand let only the old one in."""
    records = _written(memory_store)
    records.take(DEMO, TWO, "new")
    mine = {"ssh-identity/default": {"private_key": "MINE"}, "workspace/mine": {"name": DEMO}}
    new = Settings(block="mine", blocks=mine)
    for _ in range(2):
        records.keep(DEMO, new, TWO, "new", _raise)
        kept = _read(records).settings
        assert kept is not None
        keys = [fields.get("private_key") for fields in kept.blocks.values()]
        assert [key for key in keys if key] == ["MINE", SECRET]
        assert kept.blocks["ssh-identity/default"] == {"private_key": "MINE"}
    blocks = {**mine, "ssh-identity/default": {}}
    off = Settings(block="mine", blocks=blocks, withheld={"ssh-identity/default": ["private_key"]})
    records.keep(DEMO, off, TWO, "new", _raise)
    assert "MINE" not in str(_read(records).settings)
    assert SECRET in str(_read(records).settings)


def test_the_time_of_settings_is_when_they_were_written_not_when_an_owner_was(
    memory_store: MemoryStore,
) -> None:
    """Of a budget that two records hold, the newest counts."""
    records = _written(memory_store)
    before = _read(records).written_unix
    records.take(DEMO, TWO, "new")
    assert _read(records).written_unix == before
