"""A user whose key was lost has the records of the stores signed as they are."""

from __future__ import annotations

import secrets

import msgspec
import pytest
from prefect.blocks.system import Secret
from pydantic import SecretStr

from blocks import ObjectStore
from blocks.records_key import records_key, secret_name
from blocks.reference import load_named
from deployments import record_signing
from deployments.record_signing import sign_stores
from deployments.server import Server as PrefectServer
from tests.fixtures.records import read_record
from tests.fixtures.world import World
from torpor.control.store.deletion_records import Deletions
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import InvalidInput, RecordRefused
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName

SNAPSHOT = SnapshotId("20270101T000000Z-00000000")
DEMO = WorkspaceName("demo")


@pytest.fixture
def name(world: World, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only store of an installation."""
    name = f"signing-{secrets.token_hex(4)}"
    world.access.save_blocks(name)
    monkeypatch.setattr(record_signing, "saved_names", lambda kind: [name])
    return name


def _unsigned(store: S3Store) -> ObjectKey:
    """A record that no key has signed."""
    deletions = Deletions(store, DEMO)
    deletions.write(SNAPSHOT, "by hand")
    (found,) = store.list("workspaces/demo/deleted/")
    store.put(found.key, msgspec.json.encode(read_record(store, found.key)))
    return found.key


@pytest.mark.rule("H17")
def test_records_are_signed_where_their_user_asks_for_it_and_never_by_themselves(
    name: str,
) -> None:
    store = load_named(ObjectStore, name, of="a test").open()
    _unsigned(store)
    with pytest.raises(RecordRefused):
        Deletions(store, DEMO).of(SNAPSHOT)
    (said,) = sign_stores()
    assert said.startswith(f"object-store/{name}: 1 records were signed")
    assert Deletions(store, DEMO).of(SNAPSHOT) is not None
    assert sign_stores() == []
    _unsigned(store)  # by somebody else, later
    with pytest.raises(RecordRefused):
        Deletions(store, DEMO).of(SNAPSHOT)


def test_a_store_that_is_away_is_named_with_the_next_step(name: str) -> None:
    block = load_named(ObjectStore, name, of="a test")
    block.bucket = "no-such-bucket"
    block.save(name, overwrite=True)
    (said,) = sign_stores()
    assert "not signed" in said and "no-such-bucket" in said
    assert said.endswith("run `torpor up --believe-records` again once that is mended")


@pytest.mark.usefixtures("prefect_server")
def test_a_plain_store_has_a_key_of_its_own_which_is_made_once() -> None:
    keys = {records_key("plain-one", ""), records_key("plain-one", "/")}
    assert len(keys) == 1
    assert records_key("plain-one", "team") not in keys
    (key,) = keys
    assert load_named(Secret, secret_name("plain-one", ""), of="a test").get() == key.hex()
    shared: Secret[str] = Secret(value=SecretStr("33" * 32))  # the other control side's
    shared.save(secret_name("plain-one", ""), overwrite=True)
    assert records_key("plain-one", "") == b"\x33" * 32
    wrong: Secret[str] = Secret(value=SecretStr("never-to-be-seen"))
    wrong.save(secret_name("plain-one", ""), overwrite=True)
    with pytest.raises(InvalidInput, match="holds no key of 32 bytes") as caught:
        records_key("plain-one", "")
    assert "never-to-be-seen" not in str(caught.value)
