"""What every object store must do for torpor; run over each adapter and server.

A subclass gives the fixture ``store`` (an empty ObjectStore), and ``expected`` (what the probe must
find) where that is not everything. Where a store lacks a feature, the suite asserts that the probe
says so and that the operation stays correct.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tests.fixtures.waiting import PATIENCE_S
from torpor.control.store.memory import md5_of
from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    StoreCorrupt,
    StoreError,
    StoreMissing,
)
from torpor.shared.transfer import retries
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import MIB, Capabilities, Grant, ObjectKey, object_key

KEY = object_key("packs/one")
RACERS = 16


def download(transfer: Transfer, grant: Grant, ranges: list[Range]) -> list[bytes]:
    return [bytes(view) for view in transfer.get_ranges(grant, ranges)]


class StoreContract:
    """Names are free: every test has an empty store. ``one_wins``: of writers that race for a name,
    where the store has conditional writes."""

    one_wins = True
    expected = Capabilities(conditional_put=True, conditional_replace=True, etag_is_md5=True)

    @pytest.fixture
    def transfer(self) -> Iterator[Transfer]:
        with Transfer(timeout_s=PATIENCE_S, attempts=2, sleep=lambda _: None) as transfer:
            yield transfer

    # What the probe finds

    def test_probe_finds_what_this_server_can_do_and_leaves_nothing(
        self, store: ObjectStore
    ) -> None:
        found = store.probe()
        if not self.one_wins:  # a probe's races may show it, or may not
            found = msgspec.structs.replace(found, conditional_put=True, conditional_replace=True)
        assert found == self.expected
        assert list(store.list("")) == []

    # Whole objects

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 4096])
    def test_what_was_put_is_got(self, store: ObjectStore, body: bytes) -> None:
        stored = store.put(KEY, body)
        assert (stored.key, stored.bytes) == (KEY, len(body))
        assert stored.md5 == md5_of(body).hex()
        assert store.get(KEY, max_bytes=len(body)) == body

    def test_an_object_can_be_replaced_and_head_and_list_agree(self, store: ObjectStore) -> None:
        store.put(KEY, b"first")
        stored = store.put(KEY, b"abc")
        assert store.get(KEY, max_bytes=100) == b"abc"
        with pytest.raises(StoreCorrupt, match="more than the 2 bytes"):
            store.get(KEY, max_bytes=2)
        found, (listed,) = store.head(KEY), store.list("")
        assert (found.key, found.bytes, found.md5) == (KEY, 3, stored.md5)
        assert (listed.key, listed.bytes, listed.md5) == (found.key, found.bytes, found.md5)
        assert abs(listed.modified_unix - found.modified_unix) <= 1

    def test_a_range_is_read_alone(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)  # a wrong length is read again
        body = bytes(range(256)) * 4096
        store.put(KEY, body)
        for wanted in (Range(0, 60), Range(300_001, 70_000), Range(len(body) - 3, 3)):
            assert store.get_range(KEY, wanted) == body[wanted.offset : wanted.end]
        for wanted in (Range(len(body) - 3, 4), Range(len(body), 1)):
            with pytest.raises(StoreCorrupt, match="packs/one"):
                store.get_range(KEY, wanted)

    def test_what_is_not_there(self, store: ObjectStore) -> None:
        assert store.head(KEY) is None
        with pytest.raises(StoreMissing, match="packs/one"):
            store.get(KEY, max_bytes=10)
        with pytest.raises(StoreMissing, match="packs/one"):
            store.get_range(KEY, Range(0, 1))
        assert list(store.list("")) == []
        store.delete([KEY])

    # Write-once names

    def test_a_taken_name_is_not_written_again(self, store: ObjectStore) -> None:
        store.put(KEY, b"mine", if_absent=True)
        with pytest.raises(ObjectExists, match="packs/one"):
            store.put(KEY, b"theirs", if_absent=True)
        assert store.get(KEY, max_bytes=100) == b"mine"

    def test_one_of_racing_writers_wins_where_the_store_can_tell(self, store: ObjectStore) -> None:
        won = self._race(store, if_absent=True)
        kept = store.get(KEY, max_bytes=100)
        if self.expected.conditional_put and self.one_wins:
            assert won == [kept]
        else:
            # Either may win. The object kept is whole, and its writer got True.
            assert kept in won

    # Versions

    @pytest.mark.rule(18)
    def test_only_the_version_that_was_read_is_replaced(self, store: ObjectStore) -> None:
        store.put(KEY, b"first")
        body, version = store.read(KEY, max_bytes=100)
        assert body == b"first"
        store.put(KEY, b"second", if_version=version)
        with pytest.raises(ObjectChanged, match="packs/one"):
            store.put(KEY, b"third", if_version=version)
        body, version = store.read(KEY, max_bytes=100)
        assert body == b"second"
        store.delete([KEY])
        with pytest.raises(ObjectChanged, match="packs/one"):
            store.put(KEY, b"third", if_version=version)
        assert store.head(KEY) is None

    @pytest.mark.rule(18)
    def test_one_of_racing_replacers_wins_where_the_store_can_tell(
        self, store: ObjectStore
    ) -> None:
        store.put(KEY, b"first")
        won = self._race(store, if_version=store.read(KEY, max_bytes=100)[1])
        kept = store.get(KEY, max_bytes=100)
        if self.expected.conditional_replace and self.one_wins:
            assert won == [kept]
        else:
            # Several may believe that they won, or none: the object kept is whole.
            assert kept.startswith(b"racer")

    def _race(self, store: ObjectStore, **condition: Any) -> list[bytes]:
        """What was written by those that believe that they won."""
        store.probe()
        start = threading.Barrier(RACERS)

        def write(number: int) -> bytes | None:
            start.wait()
            body = f"racer {number}".encode()
            with suppress(ObjectExists, ObjectChanged):
                store.put(KEY, body, **condition)
                return body
            return None

        with ThreadPoolExecutor(RACERS) as pool:
            return [body for body in pool.map(write, range(RACERS)) if body is not None]

    def test_the_store_s_clock_is_this_host_s(self, store: ObjectStore) -> None:
        store.put(KEY, b"x")
        assert store.clock_ahead_s() == 0.0

    # Names

    @pytest.mark.parametrize(
        "name",
        ["", "/a", "a/", "a//b", "../a", "a/../b", "a b", "ä", "a\nb", "a?b", "x" * 901, ".a"],
    )
    def test_odd_names_are_refused_before_anything_is_sent(
        self, store: ObjectStore, name: str
    ) -> None:
        key = ObjectKey(name)
        for call in (
            lambda: store.put(key, b""),
            lambda: store.put(key, b"", if_version='"v"'),
            lambda: store.get(key, max_bytes=1),
            lambda: store.get_range(key, Range(0, 1)),
            lambda: store.head(key),
            lambda: store.delete([key]),
            lambda: store.grant("GET", key, expires_s=60),
        ):
            with pytest.raises(InvalidInput):
                call()

    def test_long_and_dotted_names_work(self, store: ObjectStore) -> None:
        # File-backed servers allow 255 bytes a step.
        key = object_key("/".join(["s" * 200, "a.b_c-d", "20261120T234913Z-1f0c9ab2.manifest"]))
        store.put(key, b"x")
        assert [found.key for found in store.list("")] == [key]

    # Listing

    def test_listing_is_by_prefix_and_in_key_order(self, store: ObjectStore) -> None:
        names = ["a/1", "a/10", "a/2", "a-b/1", "a.c", "ab", "b/x/y", "B/z"]
        for name in names:
            store.put(object_key(name), name.encode())
        assert [found.key for found in store.list("")] == sorted(names)
        assert [found.key for found in store.list("a/")] == ["a/1", "a/10", "a/2"]
        assert [found.key for found in store.list("a/1")] == ["a/1", "a/10"]
        assert [found.key for found in store.list("c/")] == []

    def test_deleting_many_and_again(self, store: ObjectStore) -> None:
        keys = [object_key(f"many/{n}") for n in range(20)]
        for key in keys:
            store.put(key, b"x")
        store.put(KEY, b"stays")
        store.delete(iter(keys))
        store.delete(keys)
        assert [found.key for found in store.list("")] == [KEY]

    # Grants

    def test_a_grant_moves_a_pack_both_ways(self, store: ObjectStore, transfer: Transfer) -> None:
        body = secrets.token_bytes(9 * MIB + 1)
        pieces: list[bytes | bytearray | memoryview] = [
            body[:7],
            memoryview(body)[7 : 5 * MIB],
            bytearray(body[5 * MIB :]),
        ]
        transfer.put(store.grant("PUT", KEY, expires_s=300), pieces, md5_of(body))
        stored = store.head(KEY)
        assert (stored.bytes, stored.md5) == (len(body), md5_of(body).hex())
        ranges = [
            Range(0, 1),
            Range(1, 1 * MIB),
            Range(MIB + 30_000, 2 * MIB),
            Range(6 * MIB, 999),
            Range(len(body) - 3, 3),
        ]
        got = download(transfer, store.grant("GET", KEY, expires_s=300), ranges)
        assert got == [body[wanted.offset : wanted.end] for wanted in ranges]

    def test_a_range_beyond_the_end_is_corrupt(
        self, store: ObjectStore, transfer: Transfer
    ) -> None:
        store.put(KEY, b"0123456789")
        grant = store.grant("GET", KEY, expires_s=300)
        for wanted in (Range(5, 6), Range(100, 5)):
            with pytest.raises(StoreCorrupt, match="packs/one"):
                download(transfer, grant, [wanted])

    def test_a_grant_for_what_is_not_there(self, store: ObjectStore, transfer: Transfer) -> None:
        with pytest.raises(StoreMissing, match="packs/one"):
            download(transfer, store.grant("GET", KEY, expires_s=300), [Range(0, 1)])

    def test_a_body_that_is_not_its_md5_is_refused(
        self, store: ObjectStore, transfer: Transfer
    ) -> None:
        grant = store.grant("PUT", KEY, expires_s=300)
        with pytest.raises(StoreCorrupt, match="packs/one"):
            transfer.put(grant, [b"these"], md5_of(b"those"))

    @pytest.mark.rule("H2")
    def test_a_grant_to_write_replaces_nothing_where_the_store_honours_that(
        self, store: ObjectStore, transfer: Transfer
    ) -> None:
        honours = store.probe().conditional_put
        grant = store.grant("PUT", KEY, expires_s=300)
        assert grant.once is honours
        transfer.put(grant, [b"verified"], md5_of(b"verified"))
        if honours:
            with pytest.raises(ObjectExists, match="is there already"):
                transfer.put(grant, [b"replaced"], md5_of(b"replaced"))
        else:
            transfer.put(grant, [b"replaced"], md5_of(b"replaced"))
        assert store.get(KEY, max_bytes=8) == (b"verified" if honours else b"replaced")

    def test_grants_are_bounded(self, store: ObjectStore) -> None:
        for expires_s in (0, -1, 7 * 24 * 3600 + 1):
            with pytest.raises(InvalidInput, match="lasts 1 to"):
                store.grant("GET", KEY, expires_s=expires_s)
        with pytest.raises(InvalidInput, match="PUT or GET"):
            store.grant("DELETE", KEY, expires_s=60)

    def test_a_grant_shows_no_signature(self, store: ObjectStore, transfer: Transfer) -> None:
        grant = store.grant("GET", KEY, expires_s=300)
        assert "Signature" in grant.url
        with pytest.raises(StoreError) as caught:
            download(transfer, grant, [Range(0, 1)])
        assert "Signature" not in f"{grant!r} {caught.value} {caught.value!r}"
