"""Key objects: a wrong key, a damaged object, a hostile bucket, and a rotation that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.fixtures.faulty_stores import Killed
from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.key_objects import KeyObjects, Listed
from torpor.control.store.key_rotation import Rotated, rotate
from torpor.control.store.signatures import Signer, record_in
from torpor.shared.errors import (
    RecordRefused,
    StoreUnavailable,
    TorporError,
    WrongKey,
)
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import ObjectKey, StoredObject

PLACE = "bucket/kept/"
STORE_KEY = bytes(range(32))
MINE, ESCROW = UserKey(b"m" * 32, opens=True), UserKey(b"e" * 32, opens=True)


@pytest.fixture
def objects(memory_store: MemoryStore) -> KeyObjects:
    made = KeyObjects(memory_store, PLACE)
    made.add(MINE, STORE_KEY, "mine", 1.5)
    made.add(ESCROW, STORE_KEY, "escrow", 86_400 * 365)
    return made


def _blob(store: MemoryStore, key: UserKey) -> bytes:
    return store.get(_name(key), max_bytes=10_000)


def _name(key: UserKey) -> ObjectKey:
    return ObjectKey(f"keys/{key.id}")


def test_each_key_opens_the_store_until_it_is_removed(objects: KeyObjects) -> None:
    for key in (MINE, ESCROW):
        assert objects.open(key).store_key == STORE_KEY
    listed = objects.listed(STORE_KEY)
    assert [(one.id, one.found and one.found.label, one.genuine) for one in listed] == [
        (MINE.id, "mine", True),
        (ESCROW.id, "escrow", True),
    ]
    objects.remove([MINE.id])
    with pytest.raises(
        WrongKey, match=r"removed or rotated.*\"escrow\" \(.{8}, 1971-01-01\)"
    ) as no:
        objects.open(MINE)
    assert "damaged by that" in str(no.value)
    assert objects.open(ESCROW).store_key == STORE_KEY


def test_a_key_of_another_store_is_told_from_damage(memory_store: MemoryStore) -> None:
    with pytest.raises(WrongKey, match="It has no keys: see that endpoint, bucket and prefix"):
        KeyObjects(memory_store, PLACE).open(MINE)


def test_a_store_that_does_not_answer_is_no_wrong_key(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    memory_store.fails = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        objects.open(MINE)


Attack = Callable[[MemoryStore], bytes]


def _by_a_stranger(store: MemoryStore) -> bytes:
    """Whoever writes in the bucket, and knows the id, seals a key of their own."""
    own = bytes(32)
    made = UserKey(b"s" * 32, opens=True).seal(own, PLACE, "mine", 1)
    made = msgspec.structs.replace(made, id=MINE.id)
    return Signer(own, PLACE).sign(_name(MINE), msgspec.json.encode(made))


def _by_a_colleague(store: MemoryStore) -> bytes:
    """Whoever has the store key signs another label under another's id."""
    made = msgspec.json.decode(record_in(_blob(store, MINE)))
    return Signer(STORE_KEY, PLACE).sign(
        _name(MINE), msgspec.json.encode({**made, "label": "yours"})
    )


ATTACKS: dict[str, Attack] = {
    "empty": lambda store: b"",
    "cut": lambda store: _blob(store, MINE)[:-9],
    "long": lambda store: _blob(store, MINE) + b" " * 10_000,
    "no JSON": lambda store: b"\xff" * 100,
    "deep": lambda store: b"[" * 5_000,
    "another's": lambda store: _blob(store, ESCROW),
    "a newer version": lambda store: _blob(store, MINE).replace(b'"version":1', b'"version":2'),
    "another signature": lambda store: _blob(store, MINE).replace(
        b'{"signature":"', b'{"signature":"00'
    ),
    "a stranger's": _by_a_stranger,
    "a colleague's": _by_a_colleague,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_key_object_that_was_changed_opens_nothing_and_is_no_wrong_key(
    objects: KeyObjects, memory_store: MemoryStore, attack: Attack
) -> None:
    memory_store.put(_name(MINE), attack(memory_store))
    with pytest.raises(RecordRefused, match="damaged or was replaced"):
        objects.open(MINE)
    assert objects.open(ESCROW).store_key == STORE_KEY
    with pytest.raises(RecordRefused):
        rotate(objects, MINE, lambda gone, new: pytest.fail("saved"), 2)


def test_a_key_object_of_another_bucket_is_taken_only_as_moved(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    there = KeyObjects(memory_store, "copy/")
    with pytest.raises(RecordRefused, match=r"made for bucket/kept/, and this is copy/.*moved"):
        there.open(MINE)
    opened = there.open(MINE, moved=True)
    assert opened.store_key == STORE_KEY
    assert [one.genuine for one in there.listed(STORE_KEY)] == [False, False]
    there.add(MINE, opened.store_key, "mine", 1)
    assert there.open(MINE).store_key == STORE_KEY


def test_what_no_holder_of_a_key_has_made_is_listed_as_that(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    stranger = UserKey(b"s" * 32, opens=True)
    KeyObjects(memory_store, PLACE).add(stranger, bytes(32), "escrow", 3)
    memory_store.put(ObjectKey(f"keys/{'0' * 32}"), b"junk")
    memory_store.put(ObjectKey("keys/notes.txt"), b"a console's")
    listed = {one.id: one for one in objects.listed(STORE_KEY)}
    assert set(listed) == {MINE.id, ESCROW.id, stranger.id, "0" * 32}
    assert not listed[stranger.id].genuine
    assert listed["0" * 32] == Listed("0" * 32, None, False)


class Stepping(MemoryStore):
    """``left``: its caller is killed before or after a request, once so many moments have passed;
    -1 for never. ``asked``: each request, with its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.dead = -1, False
        self.asked: list[tuple[str, int]] = []

    def step(self) -> None:
        self.dead = self.dead or not self.left
        if self.dead:
            raise Killed
        self.left -= 1

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        self.step()
        self.asked.append(("PUT", len(body)))
        done = super().put(key, body, if_absent=if_absent, if_version=if_version)
        self.step()
        return done

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        self.step()
        body = super().get(key, max_bytes=max_bytes)
        self.asked.append(("GET", len(body)))
        self.step()
        return body

    def head(self, key: ObjectKey) -> StoredObject | None:
        self.step()
        self.asked.append(("HEAD", 0))
        return super().head(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self.step()
        self.asked.append(("LIST", 0))
        return super().list(prefix)

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        self.step()
        self.asked.append(("DELETE", 0))
        super().delete(keys)
        self.step()


@dataclass
class Blocks:
    """The keys of two blocks of one store, which a rotation saves one after the other."""

    store: Stepping
    keys: list[UserKey] = field(default_factory=lambda: [MINE, MINE])

    def rotate(self, objects: KeyObjects) -> Rotated:
        def save(gone: str, new: UserKey) -> None:
            for at, key in enumerate(self.keys):
                if not at or key.id == gone:
                    self.store.step()
                    self.keys[at] = new
                    self.store.step()

        return rotate(objects, self.keys[0], save, 2)


def test_a_rotation_that_is_killed_anywhere_leaves_keys_that_open_and_goes_on() -> None:
    steps = 0
    while True:
        store = Stepping()
        objects = KeyObjects(store, PLACE)
        objects.add(MINE, STORE_KEY, "mine", 1)
        blocks = Blocks(store)
        store.left = steps
        try:
            blocks.rotate(objects)
        except Killed:
            store.left, store.dead = -1, False
        else:
            break
        for key in blocks.keys:
            assert objects.open(key).store_key == STORE_KEY, steps
        blocks.rotate(objects)
        assert len(set(blocks.keys)) == 1, steps
        assert objects.open(blocks.keys[0]).store_key == STORE_KEY
        with pytest.raises(WrongKey):
            objects.open(MINE)
        steps += 1
    assert steps >= 10


def test_a_rotation_takes_four_requests_and_a_kilobyte_however_much_is_stored() -> None:
    store = Stepping()
    objects = KeyObjects(store, PLACE)
    objects.add(MINE, STORE_KEY, "mine", 1)
    store.asked.clear()
    done = Blocks(store).rotate(objects)
    assert [kind for kind, _ in store.asked] == ["GET", "PUT", "GET", "DELETE"]
    assert sum(size for _, size in store.asked) < 2_048
    found = objects.open(done.key).found
    assert found is not None and (found.label, found.replaces) == ("mine", MINE.id)


def test_the_store_key_itself_gets_a_key_beside_it_and_stays() -> None:
    store = Stepping()
    objects = KeyObjects(store, PLACE)
    itself = UserKey(STORE_KEY, opens=False)
    blocks = Blocks(store, [itself])
    done = blocks.rotate(objects)
    assert done.gone == "" and done.key.opens
    assert objects.open(done.key).store_key == STORE_KEY
    assert objects.open(itself).store_key == STORE_KEY


def test_a_block_that_cannot_be_saved_loses_no_key() -> None:
    store = Stepping()
    objects = KeyObjects(store, PLACE)
    objects.add(MINE, STORE_KEY, "mine", 1)

    def save(gone: str, new: UserKey) -> None:
        raise TorporError("somebody has saved it meanwhile")

    with pytest.raises(TorporError, match="meanwhile"):
        rotate(objects, MINE, save, 2)
    assert objects.open(MINE).store_key == STORE_KEY
