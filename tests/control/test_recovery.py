"""What a bucket says of its workspaces to a host that knows nothing else of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import put_save
from torpor.control.recovery import look_at_bucket
from torpor.control.store.manifests import open_manifest
from torpor.control.store.signatures import ROOT_BYTES, Signer
from torpor.control.store.workspace_records import MOST_BYTES, Settings, WorkspaceRecords
from torpor.shared.errors import InvalidInput, StoreArchived, StoreUnavailable
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key, settings_key
from torpor.shared.values import ObjectKey, WorkspaceName

pytestmark = pytest.mark.rule(24)

DEMO = WorkspaceName("demo")
KEY = bytes(range(32))
ONE = "11111111"
SETTINGS = Settings(block="mine", blocks={"workspace/mine": {"name": DEMO, "project": "p"}})


def _written(store: MemoryStore, name: WorkspaceName = DEMO) -> WorkspaceRecords:
    records = WorkspaceRecords(store, KEY)
    records.keep(name, SETTINGS, ONE, "host", _raise)
    return records


def _raise(error: Exception) -> bytes:
    raise error


def test_junk_hides_no_true_record_and_is_not_read_where_it_is_a_giant(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        memory_store.put(settings_key(WorkspaceName(f"a{number}")), bytes(2 * MOST_BYTES))
    memory_store.put(ObjectKey("settings/other/program"), b"junk")
    _written(memory_store).take(DEMO, ONE, "new-host")
    asked: list[int] = []
    real = memory_store.get

    def get(key: ObjectKey, *, max_bytes: int) -> bytes:
        asked.append(len(body := real(key, max_bytes=max_bytes)))
        return body

    monkeypatch.setattr(memory_store, "get", get)
    found, every = look_at_bucket(memory_store, KEY)
    assert [one.name for one in found if one.settings is not None] == [DEMO]
    assert sum(bool(one.unread) for one in found) == 40
    assert (every, max(asked, default=0) < MOST_BYTES) == ([SETTINGS], True)
    (row,) = [one.row() for one in found if one.name == DEMO]
    assert (row["block"], row["owner"].startswith("new-host since ")) == ("mine", True)


def test_the_settings_of_all_workspaces_are_known_where_some_are_wanted(
    memory_store: MemoryStore,
) -> None:
    _written(memory_store)
    _written(memory_store, WorkspaceName("other"))
    found, every = look_at_bucket(memory_store, KEY, [DEMO])
    assert ([one.name for one in found], len(every)) == ([DEMO], 2)
    with pytest.raises(InvalidInput, match="has nothing of workspace missing"):
        look_at_bucket(memory_store, KEY, [WorkspaceName("missing")])


def test_a_store_that_is_away_is_not_a_wrong_key(memory_store: MemoryStore) -> None:
    _written(memory_store)
    memory_store.get = lambda *a, **k: _raise(StoreUnavailable("it is away"))  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="away"):
        look_at_bucket(memory_store, KEY)


def test_an_object_that_the_store_keeps_to_itself_stops_no_other_workspace(
    memory_store: MemoryStore,
) -> None:
    """A lifecycle rule may have moved it into an archive."""
    other = WorkspaceName("other")
    _written(memory_store)
    _written(memory_store, other)
    kept = ObjectKey(f"workspaces/{other}/rentals/open/12345678-torpor")
    memory_store.put(kept, b"anything")
    real = memory_store.get

    def get(key: ObjectKey, **how: Any) -> bytes:
        return real(key, **how) if key != kept else _raise(StoreArchived("in an archive"))

    memory_store.get = get  # type: ignore[method-assign]
    found, _ = look_at_bucket(memory_store, KEY)
    named = {one.name: [str(error) for error in one.unread.values()] for one in found}
    assert named == {DEMO: [], other: ["in an archive"]}


def test_a_key_that_only_signs_seals_nothing_and_a_store_key_signs_no_plain_store(
    memory_store: MemoryStore,
) -> None:
    """Both sign the records: what is taken for the other kind would seal a plain store, or store
    plain snapshots beside sealed ones."""
    _written(memory_store)
    with pytest.raises(InvalidInput, match="leave --plain out"):
        look_at_bucket(memory_store, None)
    newer = msgspec.json.encode({"format": 2, "written_unix": 1.0})
    other = settings_key(WorkspaceName("another"))
    memory_store.put(other, memory_store.signer.sign(other, newer))
    look_at_bucket(memory_store, KEY)
    memory_store.delete([other])
    plain = WorkspaceRecords(memory_store, None)
    plain.delete(DEMO)
    plain.keep(DEMO, SETTINGS, ONE, "host", _raise)
    with pytest.raises(InvalidInput, match="give --plain too"):
        look_at_bucket(memory_store, KEY)
    look_at_bucket(memory_store, None)


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
    (found,), _ = look_at_bucket(memory_store, KEY)
    assert (found.snapshots, found.settings) == ([made], None)
    assert [*found.unread] == [settings_key(DEMO)]
    with pytest.raises(InvalidInput, match="has signed none"):
        look_at_bucket(memory_store, bytes(32))
