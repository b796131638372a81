"""The store contract over SeaweedFS, moto's server and rclone's, each really started, and over the
store in memory."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import msgspec
import pytest
from botocore import auth, compat

from tests.contracts.store_contract import KEY, StoreContract, download
from tests.fixtures.stores import Server
from torpor.control.store.memory import MemoryStore, md5_of
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import GrantExpired, StoreDenied, StoreMissing
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import MIB, Capabilities, Grant, object_key


class _OverABucket(StoreContract):
    """What only an adapter with buckets can be asked. A subclass gives ``server``."""

    @pytest.fixture
    def store(self, server: Server) -> ObjectStore:
        return server.store("team/alpha")

    def test_a_missing_bucket_is_an_error_and_no_missing_object(self, server: Server) -> None:
        store = S3Store.connect(server.settings("no-such-bucket-here"))
        for call in (
            lambda: store.head(KEY),
            lambda: store.get(KEY, max_bytes=1),
            lambda: store.get_range(KEY, Range(0, 1)),
            lambda: store.put(KEY, b"x"),
            lambda: list(store.list("")),
            store.probe,
        ):
            with pytest.raises(StoreMissing, match="no-such-bucket-here"):
                call()

    def test_neighbours_outside_the_prefix_are_not_seen(self, server: Server) -> None:
        bucket = server.bucket()
        alpha = S3Store.connect(server.settings(bucket, "team/alpha"))
        alphabet = S3Store.connect(server.settings(bucket, "team/alphabet"))
        alpha.put(KEY, b"1")
        alphabet.put(KEY, b"22")
        assert [found.bytes for found in alpha.list("")] == [1]
        alpha.delete([KEY])
        assert alphabet.get(KEY, max_bytes=2) == b"22"


class _ChecksSignatures(_OverABucket):
    """What only a server that checks signatures and their time can be asked."""

    @pytest.mark.rule(9, "H1")
    def test_a_grant_serves_no_other_verb_and_no_other_object(
        self, store: ObjectStore, transfer: Transfer
    ) -> None:
        store.put(KEY, b"secret")
        other = object_key("packs/two")
        put, get = (store.grant(verb, KEY, expires_s=300) for verb in ("PUT", "GET"))
        for url in (get.url, put.url.replace("packs/one", "packs/two")):
            with pytest.raises(StoreDenied, match="refused"):
                transfer.put(Grant(KEY, "PUT", url, put.expires_unix), [b"x"], md5_of(b"x"))
        for url in (put.url, get.url.replace("packs/one", "packs/two")):
            with pytest.raises(StoreDenied, match="refused"):
                download(transfer, Grant(KEY, "GET", url, get.expires_unix), [Range(0, 1)])
        assert store.get(KEY, max_bytes=6) == b"secret"
        assert store.head(other) is None

    @pytest.mark.rule(9)
    def test_a_grant_ends(
        self, store: ObjectStore, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = compat.get_current_datetime
        store.put(KEY, b"x")
        with monkeypatch.context() as an_hour_ago:
            an_hour_ago.setattr(
                auth, "get_current_datetime", lambda: real() - datetime.timedelta(hours=1)
            )
            put, get = (store.grant(verb, KEY, expires_s=60) for verb in ("PUT", "GET"))
        with pytest.raises(GrantExpired, match="ask for a new one"):
            transfer.put(put, [b"y"], md5_of(b"y"))
        with pytest.raises(GrantExpired, match="ask for a new one"):
            download(transfer, get, [Range(0, 1)])
        assert store.get(KEY, max_bytes=1) == b"x"

    def test_a_wrong_secret_and_a_wrong_key_id_are_denied(self, server: Server) -> None:
        bucket = server.bucket()
        for changes in ({"secret_key": "0" * 40}, {"access_key": "AK0000000000000000"}):
            store = S3Store.connect(server.settings(bucket, **changes))
            for call in (store.probe, lambda store=store: store.put(KEY, b"x")):
                with pytest.raises(StoreDenied, match="key"):
                    call()


class TestSeaweedFS(_ChecksSignatures):
    @pytest.fixture
    def server(self, seaweed: Server) -> Server:
        return seaweed

    @pytest.mark.rule("H2")
    def test_a_host_cannot_leave_the_condition_of_a_grant_out(
        self, store: ObjectStore, transfer: Transfer
    ) -> None:
        assert store.probe().conditional_put
        grant = store.grant("PUT", KEY, expires_s=300)
        for body, once in ((b"1", True), (b"2", False)):
            with contextlib.suppress(StoreDenied):
                transfer.put(msgspec.structs.replace(grant, once=once), [body], md5_of(body))
        assert store.get(KEY, max_bytes=1) == b"1"

    def test_listing_goes_on_beyond_a_page_of_1000(self, store: ObjectStore) -> None:
        keys = [object_key(f"packs/{n:05d}") for n in range(1100)]
        for key in keys:
            store.put(key, b"x")
        assert [found.key for found in store.list("packs/")] == keys
        store.delete(keys)  # two batches
        assert list(store.list("")) == []

    def test_a_multipart_upload_shows_no_md5(self, server: Server) -> None:
        bucket = server.bucket()
        store = S3Store.connect(server.settings(bucket))
        client = server.client()
        where = {"Bucket": bucket, "Key": KEY}
        upload = client.create_multipart_upload(**where)["UploadId"]
        parts = []
        for number, data in enumerate((bytes(5 * MIB), b"x"), 1):  # all but the last: 5 MiB or more
            answer = client.upload_part(**where, UploadId=upload, PartNumber=number, Body=data)
            parts.append({"ETag": answer["ETag"], "PartNumber": number})
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
        client.close()
        for found in (store.head(KEY), *store.list("")):
            assert (found.bytes, found.md5) == (5 * MIB + 1, None)


class TestMoto(_OverABucket):
    """Lax: it takes any key and any signature, and any body whatever its Content-MD5. It looks
    whether a name is taken, and takes it later: two writers may both be told that they won."""

    one_wins = False

    @pytest.fixture
    def server(self, moto: Server) -> Server:
        return moto


class TestRclone(_ChecksSignatures):
    """Limited: conditional writes are ignored, and ranges come with status 200."""

    expected = Capabilities(conditional_put=False, conditional_replace=False, etag_is_md5=True)

    @pytest.fixture
    def server(self, rclone: Server) -> Server:
        return rclone


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        with contextlib.closing(MemoryStore()) as store:
            yield store
