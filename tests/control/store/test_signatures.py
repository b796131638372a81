"""What a signature is over, and what is refused without one."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record, read_record, signed
from tests.fixtures.stores import Server
from torpor.control.rental.canaries import CanaryRecords
from torpor.control.store.deletion_records import Deletions
from torpor.control.store.signatures import Forged, Signer, Unsigned
from torpor.shared.errors import InvalidInput, RecordRefused
from torpor.shared.values import ObjectKey, SnapshotId, WorkspaceName

NAME = ObjectKey("workspaces/demo/jobs/open/0123456789ab")
OTHER = ObjectKey("workspaces/other/jobs/open/0123456789ab")
BODY = b'{"command":["true"],"version":3}'


def test_a_record_is_read_as_it_was_signed() -> None:
    signer = Signer(bytes(32), "bucket/")
    blob = signer.sign(NAME, BODY)
    assert Signer(bytes(32), "bucket/").check(NAME, blob) == BODY
    assert msgspec.json.decode(blob)["record"] == msgspec.json.decode(BODY)  # people read it


@pytest.mark.rule("H17")
def test_another_name_bucket_prefix_key_or_byte_is_refused() -> None:
    signer = Signer(bytes(32), "bucket/")
    blob = signer.sign(NAME, BODY)
    others = [
        Signer(bytes(32), "bucket/team/"),
        Signer(bytes(32), "twin/"),
        Signer(b"k" * 32, "bucket/"),
    ]
    for other in others:
        with pytest.raises(Forged):
            other.check(NAME, blob)
    with pytest.raises(Forged):
        signer.check(OTHER, blob)
    for at in range(len(blob)):
        changed = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        with pytest.raises((Forged, Unsigned)):
            signer.check(NAME, changed)


@pytest.mark.rule("H17")
@pytest.mark.parametrize(
    "blob",
    [
        BODY,
        b"",
        b"\xff",
        b"[" * 200_000,
        b"null",
        b'{"signature":"","record":{}}',
        b'{"record":{}}',
    ],
    ids=lambda blob: repr(blob[:20]),
)
def test_what_has_no_signature_is_refused(blob: bytes) -> None:
    with pytest.raises((Forged, Unsigned)):
        Signer(bytes(32), "").check(NAME, blob)


def test_a_refused_record_is_named_with_what_to_do() -> None:
    store = MemoryStore()
    demo, snapshot = WorkspaceName("demo"), SnapshotId("20270101T000000Z-00000000")
    deletions = Deletions(store, demo)
    deletions.write(snapshot, "by hand")
    (found,) = store.list("workspaces/demo/deleted/")
    record = read_record(store, found.key)
    store.put(found.key, msgspec.json.encode(record))
    with pytest.raises(RecordRefused) as caught:
        deletions.of(snapshot)
    for words in (found.key, store.address, "no signature", "delete the object", "access key"):
        assert words in str(caught.value)
    assert not caught.value.retryable
    put_record(store, found.key, record)
    assert deletions.of(snapshot) is not None


def test_a_record_of_one_account_is_none_of_another() -> None:
    store = MemoryStore()
    one, two = (ObjectKey(f"canaries/{name}") for name in ("a", "b"))
    store.put(two, signed(store, one, {"provider": "vast:1", "canaries": []}))
    with pytest.raises(RecordRefused, match="canaries/b"):
        CanaryRecords(store).results()


def test_a_store_that_has_no_key_for_records_reads_and_writes_none(seaweed: Server) -> None:
    store = seaweed.same(seaweed.store(), root=None)
    with pytest.raises(InvalidInput, match=r"nobody gave .* a key that signs its records"):
        Deletions(store, WorkspaceName("demo")).write(SnapshotId("s"), "x")
