"""`torpor store`, with a real Prefect server and a real S3 server: who opens a store, and when."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect_aws import AwsCredentials
from pydantic import SecretStr

import blocks
from blocks import ObjectStore, Workspace
from blocks.reference import load_named, saved_names
from deployments.installation import CHECKOUT
from tasks.watch import patient
from tasks.workspace import OpenWorkspace
from tests.fixtures.faulty_stores import Killed
from tests.fixtures.manifests import honest
from tests.fixtures.rentals import asked
from tests.fixtures.world import World
from torpor.control.hosts import KnownHosts
from torpor.control.store.key_objects import KeyObjects
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.control.store.s3_requests import S3Requests
from torpor.control.upkeep.prune import PruneRules, plan_prune
from torpor.shared.errors import (
    InvalidInput,
    KeyUnknown,
    RecordRefused,
    StoreError,
    StoreUnavailable,
    WrongKey,
)
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key, settings_key
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import MIB, Endpoint, SnapshotId, WorkspaceName, object_key
from torpor_cli import setup, store_keys
from torpor_cli.key_files import key_file
from torpor_cli.recovery import recover

NAME = "with-keys"
WORKSPACE = WorkspaceName(NAME)
SECOND = "second-side"
DAMAGED = "damaged-side"
SNAPSHOTS = [SnapshotId(f"20261120T2349{n:02}Z-1f0c9ab2") for n in range(20)]


@pytest.fixture
def made(
    own_prefect_server: object, world: World, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A store as `torpor init` makes it, with snapshots of a workspace."""
    _forget()
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    blocks.LocalProvider(folder=world.access.machines).save(f"{NAME}-here", overwrite=True)
    _identity(world).save("default", overwrite=True)
    _init(world)
    _store_snapshots()
    yield world
    _forget()
    blocks.SSHIdentity.delete("default")


def _identity(world: World) -> blocks.SSHIdentity:
    """As `torpor up` makes one."""
    return blocks.SSHIdentity(private_key=SecretStr(world.access.private_key), on_record=True)


def _init(world: World, name: str = NAME, prefix: str = "kept") -> None:
    setup.init(
        name,
        flavour="other",
        bucket=world.access.bucket,
        prefix=prefix,
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
    for file in key_file(NAME).parent.glob("*"):
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


def _dumped(kind: type[Block], name: str = NAME) -> dict[str, str]:
    block = load_named(kind, name, of="test")
    return {field: str(getattr(block, field)) for field in kind.model_fields}


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
    probe = asked.count("probe")
    assert [one for one in asked if one != "probe"] == [
        *["get", "get"],  # the key, for the command and for the rotation
        *["list", "delete"],  # of the probe
        *["put", "get", "get", "get", "delete", "get"],
        "get",  # the new key object, for the copy of it on this host
    ]
    assert probe < 25
    new = _key()
    assert new != old and _block().key() == store_key
    _open_all()
    with pytest.raises(KeyUnknown, match="It has other keys"):
        _block().key_objects().open(old)
    assert _second(old).key() == store_key  # a process that has opened the store goes on
    file = key_file(NAME)
    assert UserKey.of(file.read_text()) == new
    assert UserKey.of(file.with_name(f"{NAME}.before").read_text()) == old
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
    assert "an earlier one was stopped, and was finished first" in capsys.readouterr().out
    assert _key() == _key(SECOND) not in (old, new)
    assert objects.ids() == [_key().id]


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
    with pytest.raises(InvalidInput, match=f"object-store/{SECOND} uses"):
        store_keys.remove_key(NAME, escrow.id[:8], yes=True)
    ObjectStore.delete(SECOND)
    with pytest.raises(InvalidInput, match="Nobody is at the terminal"):
        store_keys.remove_key(NAME, escrow.id[:8])
    store_keys.remove_key(NAME, escrow.id[:8], yes=True)
    with pytest.raises(KeyUnknown, match="removed or rotated"):
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
    typed = re.search(r"^Key +(torpor-store\n(?: +[A-Z2-7-]+\n)+)", text, re.M)
    file_of_key = re.search(r"cat > ~/.local/state/torpor/keys/(\S+)\)$", text, re.M)
    command = re.search(r"3\. torpor recover (.*)$", text, re.M)
    assert typed and file_of_key and command
    settings = _dumped(Workspace)
    _block().key_objects().store.delete([object_key(f"keys/{_key().id}")])
    _forget()
    key_file(file_of_key[1]).write_text(typed[1])
    words = shlex.split(command[1])
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert (
        recover(
            store=named["--store"],
            flavour=named["--flavour"],
            bucket=named["--bucket"],
            prefix=named["--prefix"],
            endpoint=named["--endpoint"],
            key=key_file(Path(named["--key"]).name),
            access_key=made.access.access_key,
        )
        == 0
    )
    assert _block().key() == store_key
    assert _dumped(Workspace) == settings
    _open_all()


def test_each_key_of_a_store_recovers_its_workspaces_and_one_that_was_removed_is_named(
    made: World, tmp_path: Path
) -> None:
    """After a rotation, too: what is sealed follows from the store key."""
    first, store_key, settings = _key(), _block().key(), _dumped(Workspace)
    assert store_key is not None
    objects = _block().key_objects()
    record = settings_key(WORKSPACE)
    kept = objects.store.get(record, max_bytes=MIB)
    store_keys.add_key(NAME, label="escrow", into=str(tmp_path / "escrow"))
    store_keys.rotate(NAME, yes=True)
    assert objects.store.get(record, max_bytes=MIB) == kept

    _forget()
    with pytest.raises(KeyUnknown, match=r"removed or rotated.* other keys \(2\)"):
        _recover(made, first)
    assert not any(NAME in saved_names(kind) for kind in (ObjectStore, AwsCredentials, Workspace))
    assert not key_file(NAME).exists()

    itself, escrow = UserKey(store_key, opens=False), UserKey.of((tmp_path / "escrow").read_text())
    for key in (escrow, itself):
        _forget()
        key_file(NAME).write_text("the last copy of another key")
        assert _recover(made, key) == 0
        assert _key() == UserKey.of(key_file(NAME).read_text()) == key
        before = key_file(NAME).with_name(f"{NAME}.before")
        assert before.read_text() == "the last copy of another key"
        assert _dumped(Workspace) == settings
        _open_all()

    store_keys.rotate(NAME, yes=True)
    assert _recover(made, itself) == 0  # the block here opens the same store
    assert _key() not in (escrow, itself)
    with pytest.raises(InvalidInput, match="has another key, and stays"):
        _recover(made, UserKey(bytes(32), opens=False))
    objects.remove(escrow.id, itself)
    with pytest.raises(KeyUnknown, match="removed or rotated"):
        _recover(made, escrow)


def _recover(made: World, key: UserKey) -> int:
    """On another host, by somebody who has this key in a file."""
    access = made.access
    file = Path(access.machines).parent / "given"
    file.write_text(key.text)
    return recover(
        store=NAME,
        bucket=access.bucket,
        prefix="kept",
        endpoint=access.endpoint_url,
        access_key=access.access_key,
        key=file,
    )


def test_the_page_shows_the_sheet_as_the_command_prints_it(made: World, tmp_path: Path) -> None:
    """But for the place, the names, the day and the letters of the key."""
    file, access = tmp_path / "sheet", made.access
    store_keys.sheet(NAME, into=str(file))
    page = (CHECKOUT / "docs" / "guide" / "keys.md").read_text()
    shown = re.search(r"^\$ torpor store sheet mywork\n(.*?)^```$", page, re.M | re.S)
    assert shown

    def bare(text: str, *names: str) -> str:
        for number, name in enumerate(names):
            text = text.replace(name, f"<{number}>")
        text = re.sub(r"\d{4}-\d\d-\d\d|(?<= id )\w+(?=\.$)", "<>", text, flags=re.M)
        return re.sub(r"^( +)[A-Z2-7-]{19,24}$", r"\1<>", text, flags=re.M)

    wanted = bare(file.read_text(), access.endpoint_url, access.bucket, NAME)
    assert bare(shown[1], "https://s3.example.com", "my-snapshots", "mywork") == wanted


def test_a_key_object_that_the_bucket_lost_is_put_back_from_this_host(made: World) -> None:
    """As a rule of the bucket deletes it. After a rotation, too."""
    for rotated in (False, True):
        if rotated:
            store_keys.rotate(NAME, yes=True)
        kept = key_file(NAME).with_name(f"{NAME}.object").read_bytes()
        store, name = _block().key_objects().store, object_key(f"keys/{_key().id}")
        store.delete([name])
        with pytest.raises(KeyUnknown, match="It has no keys"):
            _block().key_objects().open(_key())
        store.put(name, kept)
        _open_all()
        assert _key().text.encode() not in kept


def test_no_error_repeats_a_key(made: World) -> None:
    text = _key().text
    with pytest.raises(InvalidInput) as refused:
        store_keys.remove_key(NAME, text)
    assert text not in str(refused.value)
    with pytest.raises(InvalidInput, match="is a file with the key") as unread:
        recover(store=NAME, key=Path(text))
    assert text not in str(unread.value)


def test_init_makes_no_second_store_key_where_a_store_is(made: World) -> None:
    key, objects = _key(), _block().key_objects()
    _forget()
    with pytest.raises(InvalidInput, match=r"has keys, and no key in .*--store"):
        _init(made)
    objects.store.delete([object_key(f"keys/{key.id}")])  # as in a copy of the bucket without keys/
    key_file(NAME).write_text(key.text)
    with pytest.raises(InvalidInput, match=r"has snapshots .*recovery sheet"):
        _init(made)
    objects.store.delete([found.key for found in objects.store.list("workspaces/")])
    with pytest.raises(InvalidInput, match=r"has settings of workspaces.*recovery sheet"):
        _init(made)
    assert objects.ids() == []


def test_init_uses_no_key_in_two_places_and_overwrites_none(made: World) -> None:
    """`init` once more under the same name, at another prefix: the key file holds the first key."""
    first, kept = _key(), _block()
    Workspace.delete(NAME)
    ObjectStore.delete(NAME)
    AwsCredentials.delete(NAME)
    _init(made, prefix="other")
    assert _key() != first and _block().key() != kept.key()
    files = {file.name: file.read_text() for file in key_file(NAME).parent.iterdir()}
    assert UserKey.of(files[f"{NAME}.before"]) == first and UserKey.of(files[NAME]) == _key()


def test_init_under_another_name_takes_the_key_that_a_failed_one_left(made: World) -> None:
    key = _key()
    for kind in (Workspace, ObjectStore, AwsCredentials):
        kind.delete(NAME)
    _init(made, SECOND)
    assert _key(SECOND) == key


@pytest.mark.rule("H17")
@pytest.mark.parametrize("snapshots", [True, False])
def test_init_takes_no_store_key_of_another_store(made: World, snapshots: bool) -> None:
    if not snapshots:
        store = _block().open()
        store.delete([found.key for found in store.list("workspaces/")])
    _forget()
    key_file(NAME).write_text(bytes(32).hex())
    with pytest.raises(WrongKey, match="another"):
        _init(made)


def test_of_two_stores_that_are_made_at_once_none_takes_the_others_key_away(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command makes its store between the look and the key object of this one."""
    real, other, second = KeyObjects.add, UserKey.new(), [True]

    def add(self: KeyObjects, *how: Any, **more: Any) -> Any:
        if second.pop() if second else False:
            real(self, other, bytes(32), "theirs", 1)
        return real(self, *how, **more)

    for kind in (Workspace, ObjectStore, AwsCredentials):
        kind.delete(NAME)
    monkeypatch.setattr(KeyObjects, "add", add)
    with pytest.raises(InvalidInput, match="at the same moment"):
        _init(made, prefix="twice")
    access = made.access
    store = S3Store.connect(
        S3Settings(
            access.bucket,
            access.access_key,
            access.secret_key,
            access.endpoint_url,
            prefix="twice",
        )
    )
    assert KeyObjects(store).ids() == [other.id]


def test_snapshots_that_a_machine_forges_keep_nobody_from_changing_keys(
    made: World, tmp_path: Path
) -> None:
    """Headers are not authenticated, and a machine writes snapshots: of a key object, its own seal
    proves the store key."""
    block = Workspace(name=NAME, paths=["~/w"], store=NAME, provider=f"local-provider/{NAME}-here")
    block.save(NAME, overwrite=True)
    seal = Seal(workspace_key(bytes(32), WORKSPACE))
    for number in range(3):
        snapshot = SnapshotId(f"20261121T00000{number}Z-1f0c9ab2")
        blob, _ = encode_manifest(honest(workspace=WORKSPACE, snapshot=snapshot), seal)
        _block().open().put(manifest_key(WORKSPACE, snapshot), blob)
    old = _key()
    store_keys.add_key(NAME, label="escrow", into=str(tmp_path / "escrow"))
    store_keys.sheet(NAME, into=str(tmp_path / "sheet"))
    store_keys.rotate(NAME, yes=True)
    assert not _block().key_objects().there(old.id)


def test_the_key_file_opens_a_copy_of_the_bucket_under_another_name(made: World) -> None:
    key, store = _key(), _block().key_objects().store
    for kind in (Workspace, ObjectStore, AwsCredentials):
        kind.delete(NAME)
    access = made.access
    settings = S3Settings(
        access.bucket, access.access_key, access.secret_key, access.endpoint_url, prefix="copied"
    )
    copy = S3Store.connect(settings)
    for found in [*store.list("keys/"), *store.list("workspaces/")]:
        copy.put(found.key, store.get(found.key, max_bytes=MIB))
    store.delete([found.key for found in [*store.list("keys/"), *store.list("workspaces/")]])
    _init(made, prefix="copied")
    assert _key() == key
    _open_all()
    [listed], _ = _block().key_objects().listed(_block().key() or b"")
    assert listed.genuine  # so it can be removed there
    store_keys.rotate(NAME, yes=True)
    assert _block().key_objects().ids() == [_key().id] != [key.id]


def test_a_stale_block_of_the_same_store_keeps_no_key_from_being_rotated(made: World) -> None:
    """Its access key is revoked; it gets the new key without a request."""
    old = _key()
    second = _second(old)
    AwsCredentials(aws_access_key_id="revoked", aws_secret_access_key=SecretStr("revoked")).save(
        SECOND, overwrite=True
    )
    second.credentials = f"aws-credentials/{SECOND}"
    second.save(SECOND, overwrite=True)
    store_keys.rotate(NAME, yes=True)
    assert _key(SECOND) == _key() != old
    assert _block().key_objects().ids() == [_key().id]


@pytest.mark.rule("H17")
def test_a_key_object_that_this_store_has_not_made_is_not_removed(made: World) -> None:
    other, objects = UserKey.new(), _block().key_objects()
    objects.add(other, bytes(32), "theirs", 1)
    with pytest.raises(InvalidInput, match="only key of another"):
        store_keys.remove_key(NAME, other.id, yes=True)
    assert objects.there(other.id)


def test_no_key_is_removed_or_rotated_where_snapshots_are_of_another_store(made: World) -> None:
    """By a block with the store key itself, which nothing else proves."""
    block = Workspace(
        name=SECOND, paths=["~/w"], store=NAME, provider=f"local-provider/{NAME}-here"
    )
    block.save(SECOND, overwrite=True)
    name = WorkspaceName(SECOND)
    seal = Seal(workspace_key(bytes(32), name))
    blob, _ = encode_manifest(honest(workspace=name, snapshot=SNAPSHOTS[0]), seal)
    _block().open().put(manifest_key(name, SNAPSHOTS[0]), blob)
    escrow, objects, store_key = UserKey.new(), _block().key_objects(), _block().key()
    assert store_key is not None
    old, kept = UserKey(store_key, opens=False), _key().id
    objects.add(escrow, store_key, "escrow", 1)
    block_of_store = _block()
    block_of_store.encryption_key = SecretStr(old.text)
    block_of_store.save(NAME, overwrite=True)
    for refused in (
        lambda: store_keys.rotate(NAME, yes=True),
        lambda: store_keys.remove_key(NAME, escrow.id, yes=True),
    ):
        with pytest.raises(WrongKey, match=SECOND):
            refused()
    assert _key() == old and sorted(objects.ids()) == sorted([kept, escrow.id])


def test_a_rotation_leaves_blocks_of_other_stores_and_their_key_files(made: World) -> None:
    """An older torpor, or a person, has one key in two places."""
    old, elsewhere = _key(), _block()
    elsewhere.prefix = "elsewhere"
    elsewhere.save(SECOND, overwrite=True)
    elsewhere.key_objects().add(old, bytes(32), "theirs", 1)
    file = key_file(SECOND)
    file.write_text(old.text)
    key_file(f"{NAME}.before").write_text("the last copy of another key")
    store_keys.rotate(NAME, yes=True)
    assert _key(SECOND) == old and _block(SECOND).key() == bytes(32)
    assert file.read_text() == old.text
    kept = {one.read_text().strip() for one in key_file(NAME).parent.iterdir()}
    assert {"the last copy of another key", old.text, _key().text} <= kept


def test_a_killed_rotation_leaves_the_new_key_in_its_file_too(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the old key object goes: else the only copy is in Prefect's database."""

    def killed(self: KeyObjects, one: str, own: UserKey) -> None:
        raise Killed

    monkeypatch.setattr(KeyObjects, "remove", killed)
    with pytest.raises(Killed):
        store_keys.rotate(NAME, yes=True)
    assert UserKey.of(key_file(NAME).read_text()) == _key()


def test_a_rotation_that_cannot_save_its_block_says_how_to_take_the_unused_key_away(
    made: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, objects = _key(), _block().key_objects()

    def save(self: ObjectStore, *how: Any, **more: Any) -> Any:
        raise OSError("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "save", save)
        with pytest.raises(OSError, match="away"):
            store_keys.rotate(NAME, yes=True)
    assert _key() == old
    said = capsys.readouterr().out
    advice = re.search(r"`torpor store remove-key (\S+) (\S+)`", said)
    assert advice and "Give the command again" in said
    store_keys.rotate(NAME, yes=True)
    store_keys.remove_key(*advice.groups(), yes=True)
    assert objects.ids() == [_key().id] != [old.id]


@pytest.mark.rule("H17")
def test_a_rotation_whose_new_key_somebody_removes_gives_the_block_its_old_key_back(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, real = _key(), KeyObjects.remove

    def remove(self: KeyObjects, one: str, own: UserKey) -> None:
        self.store.delete([object_key(f"keys/{own.id}")])
        real(self, one, own)

    monkeypatch.setattr(KeyObjects, "remove", remove)
    with pytest.raises(KeyUnknown, match="opens nothing"):
        store_keys.rotate(NAME, yes=True)
    assert _key() == UserKey.of(key_file(NAME).read_text()) == old
    _block().key_objects().open(old)


@pytest.mark.rule("H17")
def test_a_key_object_that_is_not_seen_seals_nothing(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = _second(UserKey.new())  # as after a wrong bucket, or a deleted key object
    with pytest.raises(KeyUnknown, match="nothing is sealed with this key"):
        unseen.key()
    with pytest.raises(KeyUnknown, match="nothing is sealed with this key"):
        _ = unseen.open().signer

    def away(self: S3Store, *args: Any, **how: Any) -> bytes:
        raise StoreUnavailable("away")

    monkeypatch.setattr(S3Store, "get", away)
    with pytest.raises(StoreUnavailable):
        unseen.key()
    with pytest.raises(StoreUnavailable):
        _ = unseen.open().signer


@pytest.mark.rule("H17")
def test_nothing_is_written_where_the_key_objects_of_two_stores_of_one_key_are_swapped(
    made: World,
) -> None:
    """A person has made two stores with one key by hand, and whoever writes in the bucket swaps
    the key objects: what was stored is of the other store key."""
    key, own, other = _key(), _block().key(), bytes(32)
    assert own is not None
    block = _block()
    block.prefix = "swapped"
    block.save(SECOND, overwrite=True)
    KeyObjects(S3Store.connect(block.reach())).add(key, other, "theirs", 1)
    store = S3Store.connect(replace(block.reach(), root=own))
    endpoint = Endpoint("machine.example.org", 22, "root")
    KnownHosts(store, WORKSPACE).pin(endpoint, "ssh-ed25519 AAAA")
    blob, _ = encode_manifest(honest(workspace=WORKSPACE, snapshot=SNAPSHOTS[0]), _seal())
    store.put(manifest_key(WORKSPACE, SNAPSHOTS[0]), blob)
    _identity(made).save(NAME, overwrite=True)
    workspace = load_named(Workspace, NAME, of="test")
    workspace.identity, workspace.store = NAME, SECOND
    opened = OpenWorkspace.of(workspace)
    rental = asked(replace(opened, store=store))
    there = [*store.list("")]
    assert _block(SECOND).key() == other
    with pytest.raises(RecordRefused, match="is not believed"):
        opened.hosts.pin(endpoint, "ssh-ed25519 BBBB")
    for write in (
        lambda: opened.rentals.change(rental, state="abandoned"),
        opened.rentals.open,
    ):
        with pytest.raises(RecordRefused, match="is not believed"):
            write()
    with pytest.raises(WrongKey, match="sealed with another key"):
        plan_prune(opened.store, WORKSPACE, opened.seal, PruneRules())
    assert [*store.list("")] == there


def test_a_workspace_is_opened_without_a_request_and_its_key_within_the_looks_patience(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is away would hold up `watch` once for each of its workspaces."""
    monkeypatch.setattr(S3Requests, "send", lambda *how: pytest.fail("the store was asked"))
    _identity(made).save(NAME, overwrite=True)
    block = load_named(Workspace, NAME, of="test")
    block.identity, block.store = NAME, SECOND
    _second(UserKey.new())  # no key that this process has opened the store with
    opened = patient({NAME: OpenWorkspace.of(block)}, most_s=0.0)[NAME]
    for ask in (lambda: opened.key, lambda: opened.store.signer, opened.rentals.open):
        with pytest.raises(StoreError, match="has held up this run"):
            ask()


def test_a_store_key_itself_stays_and_the_commands_say_so(
    own_prefect_server: object,
    sealed_world: World,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    sealed_world.named(NAME).access.save_blocks(NAME)
    itself = _key()
    assert not itself.opens
    _store_snapshots()
    sheet = tmp_path / "sheet"
    store_keys.sheet(NAME, into=str(sheet))
    assert "It is the store key" in sheet.read_text()
    store_keys.rotate(NAME, yes=True)
    assert "nothing takes it away" in " ".join(capsys.readouterr().out.split())
    assert _key().opens
    before = key_file(NAME).with_name(f"{NAME}.before")  # no file had the key: it was pasted
    assert UserKey.of(before.read_text()) == itself
    _open_all()
    assert _second(itself).key() == _block().key()
    store_keys.rotate(NAME, yes=True)  # the key that opens the key object goes
    assert len(_block().key_objects().ids()) == 1

    _second(UserKey(bytes(32), opens=False)).save(NAME, overwrite=True)
    for command in (store_keys.keys, store_keys.rotate):
        with pytest.raises(WrongKey, match="does not mean that anything is damaged"):
            command(NAME)
    _second(None).save(NAME, overwrite=True)
    with pytest.raises(InvalidInput, match=r"snapshots are plain.*torpor-records-"):
        store_keys.keys(NAME)
    _forget()
