"""The settings of a workspace in its bucket, as flows keep them and ask them before a destroy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from flows import watch
from tasks.block_record import DAY_S, SameSettings, keep_settings, other_settings, retire_side
from tasks.guards import EndingMachine
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import Lab
from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.block_records import LATE_S, BlockRecords, record_key, settings_for
from torpor.control.store.settings_memory import ShortMemory
from torpor.shared.errors import RecordRefused, StoreUnavailable, UnsavedWork
from torpor.shared.values import WorkspaceName

DEMO = WorkspaceName("demo")


class Side:
    """A control side, with what it remembers, and its Workspace block."""

    def __init__(self, lab: Lab, name: str, block: str = DEMO) -> None:
        self._lab, self.name, self.block = lab, name, block
        self.memory = ShortMemory()
        self.spec = lab.opened.spec
        self.key = record_key(DEMO, name, block)

    def edit(self, **spec: object) -> None:
        self.spec = msgspec.structs.replace(self.spec, **spec)
        self.keep()

    @contextmanager
    def runs(self) -> Iterator[OpenWorkspace]:
        settings = partial(settings_for, self.spec, self.block, sealed=False)
        opened = replace(self._lab.opened, spec=self.spec, side=self.name, settings=settings)
        with PlainRunner(opened, memory=self.memory):
            yield opened

    def keep(self) -> None:
        with self.runs() as opened:
            keep_settings(opened)

    def ends(self) -> None:
        """Asks, as a hibernation does before it destroys."""
        with self.runs() as opened:
            guard = SameSettings(opened, repeated=True)
            guard.check(EndingMachine(self._lab.rent(), nothing_new=True))

    def retire(self, side: str) -> None:
        with self.runs() as opened:
            retire_side(opened, side)


def test_a_store_that_is_away_is_a_warning_and_the_next_flow_writes(
    lab: Lab, memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = Side(lab, "one")
    memory_store.fails = StoreUnavailable("it is away")
    one.keep()
    assert "the next wake, backup or hibernate tries it again" in caplog.text
    memory_store.fails = None
    one.keep()
    assert memory_store.head(one.key) is not None


@pytest.mark.parametrize("block", [DEMO, "other"])
def test_only_what_is_stored_keeps_a_machine_where_two_sides_differ(lab: Lab, block: str) -> None:
    """Whatever the other side calls its block of this workspace."""
    one, two = Side(lab, "one"), Side(lab, "two", block)
    one.edit()
    two.edit(exclude=["*.tmp"])
    for side in (one, two):
        with pytest.raises(UnsavedWork, match=r"other settings .*\(exclude\)"):
            side.ends()
        with side.runs() as opened:
            assert ["(exclude)" in words for words in other_settings(opened)] == [True]
    two.edit(exclude=[], save_minutes=7)
    one.ends()
    two.ends()


def test_a_side_that_is_gone_counts_until_a_person_withdraws_it(lab: Lab) -> None:
    one, two = Side(lab, "one"), Side(lab, "two")
    one.edit()
    two.edit(exclude=["*.tmp"])
    two.retire("one")
    two.ends()
    one.keep()  # it lives after all
    with pytest.raises(UnsavedWork):
        two.ends()


def test_a_record_that_was_seen_and_is_gone_or_older_keeps_the_machine(
    lab: Lab, memory_store: MemoryStore
) -> None:
    one, two = Side(lab, "one"), Side(lab, "two")
    one.edit()
    older = memory_store.get(one.key, max_bytes=1 << 20)
    one.edit(exclude=["*.tmp"])
    two.edit(exclude=["*.tmp"])
    two.ends()  # has seen both
    memory_store.delete([one.key])
    with pytest.raises(UnsavedWork, match="was deleted"):
        two.ends()
    memory_store.put(one.key, older)
    two.edit(exclude=[])  # as the older one says
    with pytest.raises(UnsavedWork, match="is older than"):
        two.ends()
    two.retire("one")
    two.ends()
    memory_store.put(one.key, older)
    with pytest.raises(UnsavedWork, match="is older than"):
        two.ends()


def test_a_copy_of_a_host_has_its_name_and_is_another_side_all_the_same(lab: Lab) -> None:
    one = Side(lab, "one")
    one.edit()
    copy = Side(lab, "one")
    for kept in one.memory.remembered():
        copy.memory.remember(kept)
    one.edit(exclude=["*.tmp"])
    with pytest.raises(UnsavedWork, match="copy of this host"):
        copy.ends()
    one.ends()


def test_a_kill_makes_no_copy_and_an_own_record_that_was_put_back_is_written_again(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, "one")
    one.edit()
    older = memory_store.get(one.key, max_bytes=1 << 20)
    real = memory_store.put

    def killed(*asked: Any, **how: Any) -> None:
        real(*asked, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory_store, "put", killed)
        one.edit(exclude=["*.tmp"])
    one.edit(exclude=["*.old"])
    one.ends()
    one.edit(exclude=[])
    memory_store.put(one.key, older)
    one.ends()
    assert memory_store.get(one.key, max_bytes=1 << 20) != older


def test_a_side_writes_its_own_record_again_in_a_bucket_that_was_copied(lab: Lab) -> None:
    """Every object is younger there than its signature."""
    now = 1e9
    store = MemoryStore(lambda: now)
    lab.opened = replace(lab.opened, store=store)
    one, two = Side(lab, "one"), Side(lab, "two")
    one.edit()
    body = store.get(one.key, max_bytes=1 << 20)
    now += 2 * LATE_S
    store.put(one.key, body)
    one.ends()
    two.edit()
    two.ends()
    store.close()


def test_a_record_that_cannot_be_believed_keeps_the_machine(
    lab: Lab, memory_store: MemoryStore
) -> None:
    """It may say that more is stored than this side knows."""
    one, other = Side(lab, "one"), record_key(DEMO, "two", DEMO)
    memory_store.put(other, b"junk")
    one.keep()
    with pytest.raises(RecordRefused, match=other):
        one.ends()
    one.retire("two")
    one.ends()


def test_watch_keeps_the_settings_of_each_workspace_once_a_day(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, "one")

    def look() -> None:
        with one.runs():
            watch.fn(dry_run=False)

    look()
    found = BlockRecords(memory_store, None).all_of(DEMO)
    assert [*found] == [one.key]
    one.spec = msgspec.structs.replace(one.spec, exclude=["*.tmp"])  # on the page Blocks
    look()
    assert BlockRecords(memory_store, None).all_of(DEMO) == found
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + DAY_S + 1)
    look()
    (record,) = BlockRecords(memory_store, None).all_of(DEMO).values()
    assert record.settings.stored["exclude"] == ["*.tmp"]
