"""Key objects: a wrong key, a damaged object, a hostile bucket, and a rotation that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import pytest

from tests.fixtures.faulty_stores import Killed
from tests.fixtures.manifests import honest
from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.key_objects import MOST_READ, KeyObjects, Listed, opened_key
from torpor.control.store.key_rotation import Rotated, rotate
from torpor.control.store.manifests import open_manifest
from torpor.control.store.signatures import Signer, record_in
from torpor.shared.errors import (
    KeyDamaged,
    KeyUnknown,
    StoreCorrupt,
    StoreMissing,
    StoreUnavailable,
    TorporError,
)
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import ObjectKey, SnapshotId, StoredObject, WorkspaceName

WORKSPACE = WorkspaceName("mywork")
STORE_KEY = bytes(range(32))
MINE, ESCROW = UserKey(b"m" * 32, opens=True), UserKey(b"e" * 32, opens=True)


@pytest.fixture
def objects(memory_store: MemoryStore) -> KeyObjects:
    made = KeyObjects(memory_store)
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
    listed, more = objects.listed(STORE_KEY)
    assert more == 0
    assert [(one.id, one.found and one.found.label, one.genuine) for one in listed] == [
        (MINE.id, "mine", True),
        (ESCROW.id, "escrow", True),
    ]
    objects.remove(MINE.id, ESCROW)
    with pytest.raises(KeyUnknown, match=r"removed or rotated.*other keys \(1\)") as no:
        objects.open(MINE)
    assert "damaged by that" in str(no.value)
    assert objects.open(ESCROW).store_key == STORE_KEY


def test_a_key_of_another_store_is_told_from_damage(memory_store: MemoryStore) -> None:
    with pytest.raises(KeyUnknown, match="It has no keys: see that endpoint, bucket and prefix"):
        KeyObjects(memory_store).open(MINE)


@pytest.mark.rule("H17")
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
    made = UserKey(b"s" * 32, opens=True).seal(own, "mine", 1)
    made = msgspec.structs.replace(made, id=MINE.id)
    return Signer(own, "").sign(_name(MINE), msgspec.json.encode(made))


def _by_a_colleague(store: MemoryStore) -> bytes:
    """Whoever has the store key signs another label under another's id."""
    made = msgspec.json.decode(record_in(_blob(store, MINE)))
    return Signer(STORE_KEY, "").sign(_name(MINE), msgspec.json.encode({**made, "label": "yours"}))


ATTACKS: dict[str, Attack] = {
    "empty": lambda store: b"",
    "cut": lambda store: _blob(store, MINE)[:-9],
    "long": lambda store: _blob(store, MINE) + b" " * 10_000,
    "no JSON": lambda store: b"\xff" * 100,
    "deep": lambda store: b"[" * 5_000,
    "another's": lambda store: _blob(store, ESCROW),
    "a newer version": lambda store: _blob(store, MINE).replace(b'"version":1', b'"version":2'),
    "a stranger's": _by_a_stranger,
    "a colleague's": _by_a_colleague,
}


@pytest.mark.rule("H17")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_key_object_that_was_changed_opens_nothing_and_is_no_wrong_key(
    objects: KeyObjects, memory_store: MemoryStore, attack: Attack
) -> None:
    memory_store.put(_name(MINE), attack(memory_store))
    with pytest.raises(KeyDamaged, match="does not open"):
        objects.open(MINE)
    assert objects.open(ESCROW).store_key == STORE_KEY
    with pytest.raises(KeyDamaged):
        rotate(objects, MINE, lambda gone, new: pytest.fail("saved"), 2)


@pytest.mark.rule("H17")
def test_of_two_who_remove_each_others_key_at_once_one_puts_it_back(
    objects: KeyObjects, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, first = memory_store.delete, [True]

    def delete(keys: Iterable[ObjectKey]) -> None:
        """The other one removes this one's key just before."""
        if first.pop() if first else False:
            objects.remove(MINE.id, ESCROW)
        real(keys)

    monkeypatch.setattr(memory_store, "delete", delete)
    with pytest.raises(KeyUnknown, match="was put back"):
        objects.remove(ESCROW.id, MINE)
    assert objects.open(ESCROW).store_key == STORE_KEY


@pytest.mark.rule("H17")
@pytest.mark.parametrize("unanswered", ["list", "get"])
def test_a_removal_whose_check_the_store_does_not_answer_takes_no_last_key(
    objects: KeyObjects, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, unanswered: str
) -> None:
    """Somebody removes this one's key at the same moment, and the store's next answer is 503."""
    real = memory_store.delete

    def away(*how: object, **more: object) -> NoReturn:
        raise StoreUnavailable("503")

    def delete(keys: Iterable[ObjectKey]) -> None:
        real([*keys, _name(MINE)])
        monkeypatch.setattr(memory_store, unanswered, away)

    monkeypatch.setattr(memory_store, "delete", delete)
    with pytest.raises(KeyUnknown if unanswered == "list" else StoreUnavailable):
        objects.remove(ESCROW.id, MINE)
    monkeypatch.undo()
    assert objects.open(ESCROW).store_key == STORE_KEY


@pytest.mark.rule("H17")
def test_whoever_has_lost_the_own_key_meanwhile_removes_no_other_one(
    objects: KeyObjects, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removed it while a person was asked; what is put back may not arrive."""
    objects.remove(MINE.id, ESCROW)

    def put(*how: object, **more: object) -> NoReturn:
        raise StoreUnavailable("503")

    monkeypatch.setattr(memory_store, "put", put)
    with pytest.raises(KeyUnknown):
        objects.remove(ESCROW.id, MINE)
    assert objects.ids() == [ESCROW.id]


@pytest.mark.rule("H17")
def test_bytes_that_are_damaged_on_their_way_take_no_key_and_are_no_damage(
    objects: KeyObjects, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory_store.get

    def damaged(name: ObjectKey, **how: Any) -> bytes:
        raise StoreCorrupt(f"get {name}: the bytes that came do not have the MD5")

    monkeypatch.setattr(memory_store, "get", damaged)
    for asks in (
        lambda: objects.remove(ESCROW.id, MINE),
        lambda: objects.read(ESCROW.id, STORE_KEY),
        lambda: opened_key(MINE, memory_store),
    ):
        with pytest.raises(StoreCorrupt):
            asks()
    monkeypatch.setattr(memory_store, "get", real)
    assert opened_key(MINE, memory_store) == STORE_KEY
    assert objects.read(ESCROW.id, STORE_KEY).genuine
    memory_store.put(_name(ESCROW), bytes(1 << 20))  # longer than any key object
    assert not objects.read(ESCROW.id, STORE_KEY).genuine
    objects.remove(ESCROW.id, MINE)
    assert objects.ids() == [MINE.id]


def test_a_second_store_key_is_never_put_over_the_key_object_of_the_first(
    objects: KeyObjects,
) -> None:
    """Two commands at once that make a store with one key file."""
    with pytest.raises(KeyDamaged, match="reads back as another"):
        objects.add(MINE, bytes(32), "mine", 1.5)
    assert objects.open(MINE).store_key == STORE_KEY


def test_nothing_shows_the_store_key(objects: KeyObjects) -> None:
    assert repr(STORE_KEY) not in repr(objects.open(MINE))


def test_what_no_holder_of_a_key_has_made_is_listed_as_that(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    stranger = UserKey(b"s" * 32, opens=True)
    KeyObjects(memory_store).add(stranger, bytes(32), "escrow", 3)
    memory_store.put(ObjectKey(f"keys/{'0' * 32}"), b"junk")
    memory_store.put(ObjectKey("keys/notes.txt"), b"a console's")
    listed = {one.id: one for one in objects.listed(STORE_KEY)[0]}
    assert set(listed) == {MINE.id, ESCROW.id, stranger.id, "0" * 32}
    assert not listed[stranger.id].genuine
    assert listed["0" * 32] == Listed("0" * 32, None, False)


def test_any_number_of_junk_hides_neither_the_own_key_nor_that_more_is_there(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    for number in range(MOST_READ + 7):
        memory_store.put(ObjectKey(f"keys/{number:032}"), b"junk")
    listed, more = objects.listed(STORE_KEY, MINE.id)
    assert MINE.id in {one.id for one in listed}
    assert more == 9 and {MINE.id, ESCROW.id} <= {*objects.ids()}


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


def _manifests() -> dict[SnapshotId, bytes]:
    """A thousand small snapshots of a workspace, sealed."""
    seal = Seal(workspace_key(STORE_KEY, WORKSPACE))
    names = [SnapshotId(f"20261120T{n // 60:04}{n % 60:02}Z-1f0c9ab2") for n in range(1_000)]
    return {
        name: encode_manifest(honest(workspace=WORKSPACE, snapshot=name), seal)[0] for name in names
    }


def _made(manifests: dict[SnapshotId, bytes]) -> tuple[Stepping, KeyObjects]:
    store = Stepping()
    objects = KeyObjects(store)
    objects.add(MINE, STORE_KEY, "mine", 1)
    for name, blob in manifests.items():
        store.put(manifest_key(WORKSPACE, name), blob)
    store.asked.clear()
    return store, objects


def _opens_all(objects: KeyObjects, key: UserKey, manifests: Iterable[SnapshotId]) -> bool:
    seal = Seal(workspace_key(objects.open(key).store_key, WORKSPACE))
    opened = [open_manifest(objects.store, WORKSPACE, one, seal)[0] for one in manifests]
    return [one.snapshot for one in opened] == list(manifests)


@pytest.mark.rule("H17")
def test_a_rotation_that_is_killed_anywhere_leaves_keys_that_open_and_goes_on() -> None:
    """Killed before and after each request and each save. All 1,000 snapshots open then."""
    steps, manifests = 0, _manifests()
    while True:
        store, objects = _made(manifests)
        blocks = Blocks(store)
        store.left = steps
        try:
            blocks.rotate(objects)
        except Killed:
            store.left, store.dead = -1, False
        else:
            break
        for key in set(blocks.keys):
            assert _opens_all(objects, key, manifests), steps
        blocks.rotate(objects)
        assert len(set(blocks.keys)) == 1 and blocks.keys[0] != MINE, steps
        assert objects.open(blocks.keys[0]).store_key == STORE_KEY
        with pytest.raises(KeyUnknown):
            objects.open(MINE)
        steps += 1
    assert steps >= 10


def test_a_key_that_opens_nothing_is_asked_for_once_of_each_store_object() -> None:
    """A look reads many records, each of which needs the store key."""
    store, again, key = Stepping(), Stepping(), UserKey.new()
    for _ in range(3):
        with pytest.raises(KeyUnknown, match="removed or rotated"):
            opened_key(key, store)
    assert store.asked == [("LIST", 0)]  # after one get, which fails
    KeyObjects(again).add(key, STORE_KEY, "mine", 1)
    assert opened_key(key, again) == STORE_KEY  # the next look


def test_a_rotation_takes_few_requests_and_kilobytes_however_much_is_stored() -> None:
    manifests = _manifests()
    store, objects = _made(manifests)
    done = Blocks(store).rotate(objects)
    assert [kind for kind, _ in store.asked] == ["GET", "PUT", "GET", "GET", "GET", "DELETE", "GET"]
    assert sum(size for _, size in store.asked) < 2_048
    assert _opens_all(objects, done.key, manifests)
    with pytest.raises(KeyUnknown):
        objects.open(MINE)
    found = objects.open(done.key).found
    assert found is not None and (found.label, found.replaces) == ("mine", MINE.id)


def test_the_store_key_itself_gets_a_key_beside_it_and_stays() -> None:
    store = Stepping()
    objects = KeyObjects(store)
    itself = UserKey(STORE_KEY, opens=False)
    blocks = Blocks(store, [itself])
    done = blocks.rotate(objects)
    assert done.gone == [] and done.key.opens
    assert objects.open(done.key).store_key == STORE_KEY
    assert objects.open(itself).store_key == STORE_KEY


@pytest.mark.rule("H17")
def test_a_replaced_key_object_that_was_put_back_keeps_no_key_from_being_rotated(
    objects: KeyObjects, memory_store: MemoryStore
) -> None:
    """Else whoever has the bucket has each rotation finish the last one, and the key stays."""
    replaced = _blob(memory_store, MINE)
    now = rotate(objects, MINE, lambda gone, new: None, 2).key
    memory_store.put(_name(MINE), replaced)
    done = rotate(objects, now, lambda gone, new: None, 3)
    assert done.resumed and done.gone == [MINE.id, now.id]
    for key in (MINE, now):
        with pytest.raises(KeyUnknown):
            objects.open(key)
    assert objects.open(done.key).store_key == STORE_KEY


def test_a_rotation_whose_new_key_was_removed_meanwhile_puts_the_old_one_back(
    objects: KeyObjects,
) -> None:
    saved: list[UserKey] = []

    def save(gone: str, new: UserKey) -> None:
        if not saved:
            objects.remove(new.id, ESCROW)
        saved.append(new)

    with pytest.raises(KeyUnknown, match="opens nothing"):
        rotate(objects, MINE, save, 2)
    assert saved[-1] == MINE  # in the blocks, too
    assert objects.open(MINE).store_key == STORE_KEY


def test_a_block_gets_no_key_back_that_another_rotation_has_taken_away(
    objects: KeyObjects, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two control sides rotate one key, and the store does not show the new key object yet."""
    saved: list[UserKey] = []
    real = memory_store.get

    def save(gone: str, new: UserKey) -> None:
        saved.append(new)
        memory_store.delete([_name(MINE)])

        def lagging(name: ObjectKey, **how: Any) -> bytes:
            monkeypatch.setattr(memory_store, "get", real if name == _name(new) else lagging)
            raise StoreMissing(name)

        monkeypatch.setattr(memory_store, "get", lagging)

    with pytest.raises(KeyUnknown):
        rotate(objects, MINE, save, 2)
    assert len(saved) == 1 and objects.open(saved[0]).store_key == STORE_KEY


def test_a_block_that_cannot_be_saved_loses_no_key() -> None:
    store = Stepping()
    objects = KeyObjects(store)
    objects.add(MINE, STORE_KEY, "mine", 1)

    def save(gone: str, new: UserKey) -> None:
        raise TorporError("somebody has saved it meanwhile")

    with pytest.raises(TorporError, match="meanwhile"):
        rotate(objects, MINE, save, 2)
    assert objects.open(MINE).store_key == STORE_KEY
