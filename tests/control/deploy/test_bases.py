"""Environments in the store: which one is used, and when one is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.fixtures import engine as engine_fixture
from tests.fixtures.clocked_agent import ClockedStore
from tests.fixtures.engine import Engine
from tests.fixtures.memory_store import MemoryStore
from torpor.control.deploy import bases
from torpor.control.safety import Verified, verify_snapshot
from torpor.control.store.manifests import find_snapshot, snapshot_ids
from torpor.control.upkeep.pins import pin, pin_times, unpin
from torpor.shared.errors import KeyUnknown
from torpor.shared.format.keys import Seal
from torpor.shared.format.names import manifest_key
from torpor.shared.values import BASE, BENCHMARK, SnapshotId, WorkspaceName, reserved_name

NAME = WorkspaceName(f"{BASE}{'a' * 32}")
PLAIN = Seal(None)
DAY = 24 * 3600.0


class Lab:
    """Environments of one name in a store whose clock the test moves."""

    def __init__(self, folder: Path) -> None:
        self.store = ClockedStore(MemoryStore())
        self.engine = Engine(self.store, folder / "agent")
        self.tree = folder / "environment"
        self.tree.mkdir()

    def made(self, words: str) -> Verified:
        """A verified snapshot of an environment."""
        (self.tree / "made").write_text(words * 100)
        stored = find_snapshot(self.store, NAME, self.engine.snapshot([self.tree]))
        return verify_snapshot(self.store, stored, PLAIN)

    def expire(self, days: float) -> list[SnapshotId]:
        self.store.look()
        return bases.expire(self.store, lambda name: PLAIN, days * DAY, self.store.now)

    def used(self, paths: list[str] | None = None) -> SnapshotId | None:
        found = bases.find(self.store, NAME, PLAIN, "a test", paths or [str(self.tree)])
        return None if found is None else found.snapshot

    def packs(self) -> int:
        return len([*self.store.list(f"workspaces/{NAME}/packs/")])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with patch.object(engine_fixture, "WORKSPACE", NAME):
        yield Lab(tmp_path)


@pytest.mark.rule(17)
def test_only_a_pinned_environment_is_used(lab: Lab) -> None:
    assert lab.used() is None
    made = lab.made("one")
    assert lab.used() is None, "its deploy was killed before it kept it"
    assert bases.keep(lab.store, made, "a test")
    assert lab.used() == made.snapshot


@pytest.mark.rule(7)
def test_an_environment_with_other_directories_is_used_no_more(lab: Lab) -> None:
    assert bases.keep(lab.store, lab.made("one"), "a test")
    assert lab.used(["~/elsewhere"]) is None
    assert lab.used() is None, "it has no pin any more"


@pytest.mark.rule(17)
def test_of_two_that_are_kept_the_oldest_stays(lab: Lab) -> None:
    first, second = lab.made("one"), lab.made("two")
    assert bases.keep(lab.store, second, "a test")
    assert bases.keep(lab.store, first, "a test")
    assert lab.used() == first.snapshot
    assert snapshot_ids(lab.store, NAME) == [first.snapshot]
    third = lab.made("three")
    assert not bases.keep(lab.store, third, "a test")
    assert snapshot_ids(lab.store, NAME) == [first.snapshot]


def test_a_pin_without_a_snapshot_and_a_damaged_snapshot_are_passed_over(lab: Lab) -> None:
    first, second = lab.made("one"), lab.made("two")
    pin(lab.store, NAME, first.snapshot, "a test")
    pin(lab.store, NAME, second.snapshot, "a test")
    key = next(found.key for found in lab.store.list(f"workspaces/{NAME}/snapshots/"))
    lab.store.put(key, lab.store.get(key, max_bytes=1 << 20)[:-4] + b"wrong"[:4])
    assert lab.used() == second.snapshot
    lab.store.delete([key])
    assert lab.used() == second.snapshot


def test_a_use_renews_the_pin_and_an_unused_environment_is_deleted(lab: Lab) -> None:
    made = lab.made("one")
    bases.keep(lab.store, made, "a test")
    lab.store.advance(20 * DAY)
    assert lab.used() == made.snapshot
    lab.store.advance(20 * DAY)
    assert lab.expire(30) == []
    lab.store.advance(20 * DAY)
    assert lab.expire(30) == [made.snapshot]
    assert lab.used() is None and pin_times(lab.store, NAME) == {}
    lab.store.advance(4 * DAY)
    lab.expire(30)  # marks its packs
    lab.store.advance(2 * DAY)
    lab.expire(30)
    assert lab.packs() == 0


@pytest.mark.rule(17)
def test_what_a_killed_deploy_left_goes_after_a_day(lab: Lab) -> None:
    left = lab.made("one")
    assert lab.expire(30) == [] and snapshot_ids(lab.store, NAME) == [left.snapshot]
    lab.store.advance(2 * DAY)
    assert lab.expire(30) == [left.snapshot]


@pytest.mark.rule(13)
def test_a_listing_that_lacks_the_pin_of_an_environment_deletes_it_not(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases.keep(lab.store, lab.made("one"), "a test")
    lab.store.advance(20 * DAY)
    monkeypatch.setattr("torpor.control.deploy.bases.pin_times", lambda *_: {})
    assert lab.expire(30) == []


@pytest.mark.rule(17)
def test_a_block_whose_key_opens_nothing_deletes_no_environment(lab: Lab) -> None:
    made = lab.made("one")
    bases.keep(lab.store, made, "a test")
    lab.store.advance(40 * DAY)

    def seal_of(name: WorkspaceName) -> Seal:
        raise KeyUnknown("it was removed")

    with pytest.raises(KeyUnknown):
        bases.expire(lab.store, seal_of, 30 * DAY, lab.store.now)
    assert lab.used() == made.snapshot


def test_one_that_is_taken_into_use_while_it_expires_stays(lab: Lab) -> None:
    """Another deploy pins it between the unpinning and the deletion."""
    made = lab.made("one")
    bases.keep(lab.store, made, "a test")
    lab.store.advance(60 * DAY)

    def unpin_before_another(*where: Any) -> None:
        unpin(*where)
        lab.used() or pin(lab.store, NAME, made.snapshot, "now")

    with patch.object(bases, "unpin", unpin_before_another):
        assert lab.expire(30) == []
    assert lab.used() == made.snapshot


def test_a_damaged_environment_makes_room_for_another_one(lab: Lab) -> None:
    first = lab.made("one")
    assert bases.keep(lab.store, first, "a test")
    lab.store.delete([found.key for found in lab.store.list(f"workspaces/{NAME}/packs/")])
    assert lab.used() is None
    second = lab.made("two")
    assert bases.keep(lab.store, second, "a test")
    assert lab.used() == second.snapshot


def test_a_workspace_of_an_older_version_is_no_environment(lab: Lab) -> None:
    made = lab.made("one")
    blob = lab.store.get(manifest_key(NAME, made.snapshot), max_bytes=1 << 20)
    lab.store.put(manifest_key(WorkspaceName(f"{BASE}mine"), made.snapshot), blob)
    lab.store.look()
    lab.store.advance(100 * DAY)
    lab.expire(days=1)
    assert snapshot_ids(lab.store, WorkspaceName(f"{BASE}mine")) == [made.snapshot]


def test_only_what_a_benchmark_of_that_name_made_is_forgotten(lab: Lab) -> None:
    scratch = reserved_name(BENCHMARK, WorkspaceName("demo"))
    other = reserved_name(BENCHMARK, WorkspaceName("demo-2"))
    assert bases.keep(lab.store, lab.made("one"), f"{other}: environment of stack s")
    bases.forget_measured(lab.store, scratch)
    assert lab.used() is not None  # which pins it for "a test"
    bases.forget_measured(lab.store, scratch)
    kept = lab.used()
    pin(lab.store, NAME, kept, f"{scratch}: environment of stack s")
    bases.forget_measured(lab.store, scratch)
    assert lab.used() is None and snapshot_ids(lab.store, NAME) == []
