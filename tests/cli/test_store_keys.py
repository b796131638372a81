"""`torpor store`, with a real Prefect server and a real S3 server: who opens a store, and when."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect_aws import AwsCredentials
from pydantic import SecretStr

import blocks
from blocks import ObjectStore, Workspace
from blocks.reference import load_named
from tests.fixtures.manifests import honest
from tests.fixtures.world import World
from torpor.control.own_server import state_folder
from torpor.control.store.key_objects import MOST_BYTES
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.store.s3 import S3Store
from torpor.control.store.s3_requests import S3Requests
from torpor.shared.errors import (
    InvalidInput,
    RecordRefused,
    RunCancelled,
    StoreUnavailable,
    WrongKey,
)
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor_cli import setup, store_keys

NAME = "with-keys"
WORKSPACE = WorkspaceName(NAME)
SECOND = "second-side"
DAMAGED = "damaged-side"
SNAPSHOTS = [SnapshotId(f"20261120T2349{n:02}Z-1f0c9ab2") for n in range(20)]


@pytest.fixture
def made(prefect_server: object, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A store as `torpor init` makes it, with snapshots of a workspace."""
    _forget()
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    blocks.LocalProvider(folder=world.access.machines).save(f"{NAME}-here", overwrite=True)
    _init(world)
    _store_snapshots()
    yield world
    _forget()


def _init(world: World) -> None:
    setup.init(
        NAME,
        flavour="other",
        bucket=world.access.bucket,
        prefix="kept",
        endpoint=world.access.endpoint_url,
        access_key=world.access.access_key,
        provider=f"local-provider/{NAME}-here",
        path=["~/w"],
        gpu="none",
        max_price=0.0,
    )


def _forget() -> None:
    for kind in (Workspace, ObjectStore, AwsCredentials):
        for name in (NAME, SECOND, DAMAGED):
            with suppress(ValueError):
                kind.delete(name)
    for file in (state_folder() / "keys").glob(f"{NAME}*"):
        file.unlink()


def _seal() -> Seal:
    """What seals the snapshots of the workspace, as each process of the block has it."""
    store_key = _block().key()
    assert store_key is not None
    return Seal(workspace_key(store_key, WORKSPACE))


def _store_snapshots() -> None:
    store, seal = _block().open(), _seal()
    for snapshot in SNAPSHOTS:
        blob, _ = encode_manifest(honest(workspace=WORKSPACE, snapshot=snapshot), seal)
        store.put(manifest_key(WORKSPACE, snapshot), blob)


def _open_all() -> None:
    store, seal = _block().open(), _seal()
    assert snapshot_ids(store, WORKSPACE) == SNAPSHOTS
    for snapshot in SNAPSHOTS:
        found, _ = open_manifest(store, WORKSPACE, snapshot, seal)
        assert found.snapshot == snapshot


def _block(name: str = NAME) -> ObjectStore:
    return load_named(ObjectStore, name, of="test")


def _key(name: str = NAME) -> UserKey:
    key = _block(name).user_key()
    assert key is not None
    return key


def _second(key: UserKey | None) -> ObjectStore:
    """The block of another control side of the same bucket."""
    block = _block()
    block.encryption_key = None if key is None else SecretStr(key.text)
    block.save(SECOND, overwrite=True)
    return _block(SECOND)


def _damage(name: str) -> None:
    """Save a store block that cannot be loaded."""
    _block().save(name, overwrite=True)
    damage = BlockDocumentUpdate(data={"encryption_key": "short"}, merge_existing_data=True)
    with get_client(sync_client=True) as client:
        saved = client.read_block_document_by_name(name, "object-store")
        client.update_block_document(saved.id, damage)
    with pytest.raises(InvalidInput, match="cannot be used"):
        _block(name)


def test_a_rotation_stores_nothing_again_and_takes_the_old_key_away(
    made: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, store_key = _key(), _block().key()
    assert old.opens and store_key != old.secret
    asked: list[str] = []
    real = S3Requests.send

    def counted(self: S3Requests, what: str, *args: Any, **how: Any) -> Any:
        asked.append(what.partition(" ")[0])
        return real(self, what, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(S3Requests, "send", counted)
        store_keys.rotate(NAME, yes=True)
    assert "opens nothing here any more" in capsys.readouterr().out
    check = ["get", "list", "get"]  # the key, the snapshots' names, and one header
    assert asked == [*check, "get", "put", "get", "delete"]
    new = _key()
    assert new != old and _block().key() == store_key
    _open_all()
    with pytest.raises(WrongKey, match='keys labelled "first key"'):
        _block().key_objects().open(old)
    assert _second(old).key() == store_key  # a process that has opened the store goes on
    file = state_folder() / "keys" / NAME
    assert UserKey.of(file.read_text()) == new
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_rotation_that_was_killed_is_finished_in_every_block(
    made: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after it saved the first of two blocks. A damaged block of another store is no
    reason to stop."""
    old, objects, store_key = _key(), _block().key_objects(), _block().key()
    assert store_key is not None
    new = UserKey.new()
    objects.add(new, store_key, "first key", 2, old.id)
    _second(old)
    block = _block()
    block.encryption_key = SecretStr(new.text)
    block.save(NAME, overwrite=True)
    _damage(DAMAGED)
    store_keys.rotate(NAME, yes=True)
    assert "an earlier one was stopped, and is finished now" in capsys.readouterr().out
    assert _key() == _key(SECOND) == new
    assert not objects.there(old.id)


def test_a_second_key_opens_the_store_until_it_is_removed(
    made: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "escrow"
    with pytest.raises(InvalidInput, match="a key does not belong in a log"):
        store_keys.add_key(NAME, label="escrow")
    store_keys.add_key(NAME, label="escrow", into=str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    escrow = UserKey.of(file.read_text())
    said = capsys.readouterr().out
    assert escrow.id[:8] in said and escrow.text not in said
    assert _second(escrow).key() == _block().key()

    store_keys.keys(NAME)
    rows = capsys.readouterr().out
    assert re.search(rf"{_key().id[:8]} +first key +\d{{4}}-\d\d-\d\d +here", rows)
    assert re.search(rf"{escrow.id[:8]} +escrow", rows)
    assert f"The newest snapshots of {NAME} were sealed with this store's key" in rows

    with pytest.raises(InvalidInput, match="rotate"):
        store_keys.remove_key(NAME, _key().id[:8], yes=True)
    with pytest.raises(InvalidInput, match="0 ids"):
        store_keys.remove_key(NAME, "ffffffffffff", yes=True)
    with pytest.raises(InvalidInput, match="Nobody is at the terminal"):
        store_keys.remove_key(NAME, escrow.id[:8])
    store_keys.remove_key(NAME, escrow.id[:8], yes=True)
    with pytest.raises(WrongKey, match="removed or rotated"):
        _block().key_objects().open(escrow)
    _open_all()


def test_the_sheet_alone_brings_the_store_back_on_another_host(
    made: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store_key = tmp_path / "sheet", _block().key()
    store_keys.sheet(NAME, into=str(file))
    with pytest.raises(InvalidInput, match="is there already"):
        store_keys.sheet(NAME, into=str(file))
    text = file.read_text()
    assert made.access.secret_key not in text and made.access.bucket in text
    typed = re.search(r"^Key +(torpor-opens\n(?: +[A-Z2-7-]+\n)+)", text, re.M)
    command = re.search(r"3\. (torpor init .*)$", text, re.M)
    assert typed and command
    _forget()
    (state_folder() / "keys" / NAME).write_text(typed[1])
    words = shlex.split(command[1])[2:]
    named = dict(zip(words[1::2], words[2::2], strict=True))
    setup.init(
        words[0],
        flavour=named["--flavour"],
        bucket=named["--bucket"],
        prefix=named["--prefix"],
        endpoint=named["--endpoint"],
        access_key=made.access.access_key,
        provider=f"local-provider/{NAME}-here",
        path=["~/w"],
        gpu="none",
        max_price=0.0,
    )
    assert _block().key() == store_key
    _open_all()


def test_init_makes_no_second_store_key_where_a_store_is(made: World) -> None:
    key, objects = _key(), _block().key_objects()
    _forget()
    with pytest.raises(InvalidInput, match=r'has keys labelled "first key".*--store'):
        _init(made)
    objects.remove([key.id])  # as in a copy of the bucket without keys/
    (state_folder() / "keys" / NAME).write_text(key.text)
    with pytest.raises(InvalidInput, match=r"has snapshots .*copy keys/ too"):
        _init(made)
    assert not objects.there(key.id)


def test_a_key_object_that_is_not_seen_seals_nothing(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = _second(UserKey.new())  # as after a wrong bucket, or a deleted key object
    with pytest.raises(WrongKey, match="nothing is sealed with this key"):
        unseen.open()

    def away(self: S3Store, *args: Any, **how: Any) -> bytes:
        raise StoreUnavailable("away")

    monkeypatch.setattr(S3Store, "get", away)
    for ask in (unseen.key, unseen.open, unseen.settings):
        with pytest.raises(StoreUnavailable):
            ask()
    assert unseen.reach().root is None  # the address, for whoever starts the store


def test_a_store_key_itself_stays_and_the_commands_say_so(
    prefect_server: object, sealed_world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sealed_world.named(NAME).access.save_blocks(NAME)
    itself = _key()
    assert not itself.opens
    _store_snapshots()
    sheet = tmp_path / "sheet"
    store_keys.sheet(NAME, into=str(sheet))
    assert "is the store key itself" in sheet.read_text()
    store_keys.rotate(NAME, yes=True)
    assert "nothing takes it away" in " ".join(capsys.readouterr().out.split())
    assert _key().opens
    _open_all()
    assert _second(itself).key() == _block().key()
    store_keys.rotate(NAME, yes=True)  # the key that opens the key object goes
    assert len(_block().key_objects().listed(itself.secret)) == 1

    _second(UserKey(bytes(32), opens=False)).save(NAME, overwrite=True)
    for command in (store_keys.keys, store_keys.rotate):
        with pytest.raises(WrongKey, match="does not mean that anything is damaged"):
            command(NAME)
    _second(None).save(NAME, overwrite=True)
    with pytest.raises(InvalidInput, match=r"snapshots are plain.*torpor-records-"):
        store_keys.keys(NAME)
    _forget()


def test_a_copied_bucket_opens_once_its_user_says_that_it_moved(
    made: World, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store_key = _block().open(), _block().key()
    block = _block()
    block.prefix = "copied"
    block.save(NAME, overwrite=True)
    there = S3Store.connect(block.reach())
    for found in source.list("keys/"):
        there.put(found.key, source.get(found.key, max_bytes=MOST_BYTES))
    with pytest.raises(RecordRefused, match=r"made for .*kept/, and this is .*copied/"):
        block.open()
    with pytest.raises((InvalidInput, RunCancelled)):
        store_keys.moved(NAME)  # nobody answers
    store_keys.moved(NAME, yes=True)
    assert _block().key() == store_key
    assert "--believe-records" in capsys.readouterr().out
