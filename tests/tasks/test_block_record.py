"""The settings of a workspace in its bucket, as flows keep them and compare them before a
destroy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from flows import hibernate, watch
from tasks.block_record import SameSettings, keep_settings, other_settings
from tasks.guards import EndingMachine
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import Lab
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rentals import handed_over
from torpor.control.reports import HibernatePreview
from torpor.control.store.block_records import (
    DAY_S,
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.control.store.patience import StorePatience
from torpor.shared.errors import StoreDenied, StoreUnavailable, UnsavedWork
from torpor.shared.values import MIB, Machine, MachineId, ObjectKey, WorkspaceName

pytestmark = pytest.mark.rule(24)

DEMO = WorkspaceName("demo")
ONE, TWO = "11111111", "22222222"


class Side:
    """A control side and its Workspace block."""

    def __init__(self, lab: Lab, name: str, block: str = DEMO) -> None:
        self._lab, self.name, self.block = lab, name, block
        self.spec = lab.opened.spec
        self.key = record_key(DEMO, name, block)

    def edit(self, **spec: object) -> None:
        self.spec = msgspec.structs.replace(self.spec, **spec)
        self.keep()

    def settings(self) -> Settings:
        return settings_for(self.spec, self.block, sealed=False)

    @contextmanager
    def runs(self, settings: Callable[[], Settings | None] | None = None) -> Iterator[Any]:
        settings = settings or self.settings
        opened = replace(self._lab.opened, spec=self.spec, side=self.name, settings=settings)
        with PlainRunner(opened) as runner:
            yield runner.open(DEMO)

    @property
    def _records(self) -> BlockRecords:
        return BlockRecords(self._lab.store, None)

    def retire(self) -> None:
        """What `torpor recover --retire` does with its settings."""
        listed = [one.key for one in self._records.listed(DEMO)]
        self._records.withdraw(key for key in listed if f"/{self.name}/" in key)

    def keep(self) -> None:
        with self.runs() as opened:
            keep_settings(opened)

    def ends(self) -> None:
        """Asks, as a hibernation does before it destroys."""
        machine = Machine(MachineId("m"), "local", None, "running", None)
        with self.runs() as opened:
            SameSettings(opened, repeated=True).check(EndingMachine(machine, nothing_new=True))


def test_a_store_that_is_away_is_a_warning_and_the_next_flow_writes(
    lab: Lab, memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = Side(lab, ONE)
    memory_store.fails = StoreUnavailable("it is away")
    one.keep()
    assert "the next wake, backup or hibernate tries it again" in caplog.text
    one.ends()
    memory_store.fails = None
    one.keep()
    assert memory_store.head(one.key) is not None


@pytest.mark.parametrize("block", [DEMO, "other"])
def test_only_what_is_stored_keeps_a_machine_where_two_sides_differ(lab: Lab, block: str) -> None:
    """Whatever the other side calls its block of this workspace."""
    one, two = Side(lab, ONE), Side(lab, TWO, block)
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
    one.edit(exclude=["a", "b"])
    two.edit(exclude=["b", "a"])
    one.ends()
    two.edit(left_behind="refuse")
    with pytest.raises(UnsavedWork, match=r"\(left_behind\).* in its Tuning block on the UI") as it:
        one.ends()
    assert "torpor edit" not in str(it.value)


def test_a_side_that_is_gone_counts_until_a_person_withdraws_it(
    lab: Lab, memory_store: MemoryStore
) -> None:
    one, two = Side(lab, ONE), Side(lab, TWO)
    one.edit()
    two.edit(exclude=["*.tmp"])
    one.retire()
    two.ends()
    one.keep()  # it lives after all
    with pytest.raises(UnsavedWork):
        two.ends()


def _junk(store: MemoryStore) -> None:
    """What whoever writes in the bucket puts there."""
    store.put(record_key(DEMO, TWO, DEMO), b"junk")
    store.put(record_key(DEMO, "33333333", DEMO), bytes(MIB))
    store.put(record_key(DEMO, "no-side", DEMO), b"junk")
    store.put(record_key(DEMO, TWO, "a/b"), b"junk")
    for number in range(150):
        store.put(record_key(DEMO, "44444444", f"block-{number}"), b"junk")


def test_what_cannot_be_believed_keeps_no_machine_and_is_deleted_on_request(
    lab: Lab, memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = Side(lab, ONE)
    _junk(memory_store)
    one.edit()
    memory_store.put(one.key, b"junk")
    one.ends()
    assert record_key(DEMO, TWO, DEMO) in caplog.text
    Side(lab, "55555555").edit(exclude=["*.tmp"])
    with pytest.raises(UnsavedWork, match="55555555"):  # which no junk hides
        one.ends()
    one.keep()
    for name in (TWO, "33333333", "44444444"):
        Side(lab, name).retire()
    own = [one.key, record_key(DEMO, "55555555", DEMO)]
    assert [stored.key for stored in BlockRecords(memory_store, None).listed(DEMO)] == own


def test_no_number_of_junk_objects_hides_a_true_record(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they take to read."""
    one, other = Side(lab, ONE), Side(lab, "99999999")
    for number in range(40):
        memory_store.put(record_key(DEMO, f"000000{number:02}", DEMO), b"junk")
    other.edit(exclude=["*.tmp"])
    slow = count()  # each look at the clock takes a second
    monkeypatch.setattr(
        "tasks.block_record.StorePatience", lambda most_s: StorePatience(most_s, lambda: next(slow))
    )
    with pytest.raises(UnsavedWork, match="99999999"):
        one.ends()


def test_a_store_that_fails_hides_no_record_that_was_read(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, last = Side(lab, ONE), Side(lab, TWO), Side(lab, "99999999")
    for side in (other, last):
        side.edit(exclude=["*.tmp"])
    real = memory_store.read

    def read(key: ObjectKey, **how: Any) -> Any:
        if key == last.key:
            raise StoreUnavailable("it is away")
        return real(key, **how)

    monkeypatch.setattr(memory_store, "read", read)
    with pytest.raises(UnsavedWork, match=TWO):
        one.ends()


def _work(lab: Lab, machine: Machine) -> None:
    (lab.home(machine.id) / "workspace").mkdir()
    (lab.home(machine.id) / "workspace" / "work").write_bytes(b"mine")


def _raises(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


def test_an_own_record_that_cannot_be_written_keeps_no_machine_and_the_others_still_do(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that allows no writes there, or an `exclude` of thousands of lines."""
    one, two = Side(lab, ONE), Side(lab, TWO)
    two.edit()
    with monkeypatch.context() as patch:
        patch.setattr(memory_store, "put", _raises(StoreDenied("not there")))
        one.keep()
        one.ends()
    two.edit(exclude=["*.tmp"])
    one.edit(exclude=["x" * 400_000])
    assert memory_store.head(one.key) is None
    with pytest.raises(UnsavedWork, match="exclude"):
        one.ends()


def test_a_server_that_is_away_stops_no_hibernate_and_no_watch(
    lab: Lab,
    memory_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its client raises no error of torpor's."""
    one = Side(lab, ONE)
    monkeypatch.setattr(PlainRunner, "stores", _raises(httpx.ConnectError("no stores")))
    machine, _ = handed_over(lab.opened)
    _work(lab, machine)
    with one.runs(_raises(httpx.ConnectError("no server"))):
        watch.fn(dry_run=False)
        hibernate.fn(DEMO)
    assert lab.machines() == []
    assert "no server" in caplog.text
    assert "no stores" in caplog.text
    assert memory_store.head(one.key) is None


def test_a_dry_run_says_that_other_settings_would_keep_the_machine(lab: Lab) -> None:
    one, two = Side(lab, ONE), Side(lab, TWO)
    two.edit(exclude=["*.tmp"])
    machine, _ = handed_over(lab.opened)
    _work(lab, machine)
    with one.runs():
        report = hibernate.fn(DEMO, dry_run=True)
    assert isinstance(report, HibernatePreview)
    assert [TWO in words for words in report.keeps] == [True]


def _asked(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests for block records from now on."""
    asked: list[str] = []
    for name in ("put", "read", "head", "list"):
        real = getattr(store, name)

        def counted(key: str, *given: Any, _real: Any = real, _name: str = name, **how: Any) -> Any:
            asked.extend([_name] if key.startswith("settings/") else [])
            return _real(key, *given, **how)

        monkeypatch.setattr(store, name, counted)
    return asked


def _read(store: MemoryStore) -> dict[ObjectKey, BlockRecord]:
    records = BlockRecords(store, None)
    return records.read_all(records.listed(), {})


@pytest.mark.parametrize("others", [0, 3])
def test_a_hibernation_reads_each_record_once(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Its own when it begins; the others are listed after the snapshot and before the destroy."""
    one = Side(lab, ONE)
    one.edit()
    for number in range(others):
        Side(lab, f"2222222{number}").edit()
    machine, _ = handed_over(lab.opened)
    _work(lab, machine)
    asked = _asked(memory_store, monkeypatch)
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []
    assert asked == ["read", "list", *others * ["read"], "list"]


def test_watch_keeps_the_settings_of_each_workspace_once_a_day(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, ONE)

    def look() -> None:
        with one.runs():
            watch.fn(dry_run=False)

    look()
    found = _read(memory_store)
    assert [*found] == [one.key]
    one.spec = msgspec.structs.replace(one.spec, exclude=["*.tmp"])  # on the page Blocks
    asked = _asked(memory_store, monkeypatch)
    look()
    assert (_read(memory_store), asked[:1]) == (found, ["list"])
    assert asked.count("put") == 0
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + DAY_S + 1)
    look()
    (record,) = _read(memory_store).values()
    assert record.settings.stored["exclude"] == ["*.tmp"]


def test_watch_withdraws_what_was_deleted_or_renamed_on_the_page_blocks_a_day_later(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of another side, nor of a block that cannot be opened now."""
    one, other = Side(lab, ONE), Side(lab, TWO)
    deleted, damaged = Side(lab, ONE, "deleted"), Side(lab, ONE, "damaged")
    renamed = record_key(WorkspaceName("earlier"), ONE, DEMO)
    for side in (one, other, deleted, damaged):
        side.keep()
    BlockRecords(memory_store, None).keep(WorkspaceName("earlier"), one.settings(), ONE, "host")
    monkeypatch.setattr(PlainRunner, "workspaces", lambda _: [DEMO, "damaged"])
    kept = {one.key, other.key, damaged.key}

    def look(*names: str) -> None:
        with one.runs():
            watch.fn([*names], dry_run=False)

    look()
    assert {*_read(memory_store)} == {*kept, deleted.key, renamed}
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + DAY_S + 1)
    look(DEMO)  # it has not asked which others there are
    assert {*_read(memory_store)} == {*kept, deleted.key, renamed}
    look()
    assert {*_read(memory_store)} == kept


def test_watch_keeps_settings_after_all_that_it_does_for_machines(
    lab: Lab, memory_store: MemoryStore, tmp_path: Path
) -> None:
    """A server or a store that is slow there delays no alert, page or hibernation."""
    metrics, seen = tmp_path / "torpor.prom", list[bool]()
    machine, _ = handed_over(lab.opened)
    _work(lab, machine)
    lab.lose_machines()
    one = Side(lab, ONE)

    def settings() -> Settings:
        seen.append(metrics.exists())
        return one.settings()

    with one.runs(settings):
        watch.fn(dry_run=False, metrics=str(metrics))
    assert seen == [True]
    assert [*_read(memory_store)] == [one.key]
