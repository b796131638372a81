"""The settings of a workspace in its bucket, as flows keep them and compare them before a
destroy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    LATE_S,
    BlockRecords,
    Settings,
    record_key,
    settings_for,
)
from torpor.shared.errors import StoreDenied, StoreUnavailable, UnsavedWork
from torpor.shared.values import MIB, Machine, MachineId, WorkspaceName

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
    assert BlockRecords(memory_store, None).retire(DEMO, ONE) == [DEMO]
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
    records = BlockRecords(memory_store, None)
    for side in (TWO, "33333333", "44444444"):
        assert records.retire(DEMO, side)
    own = [one.key, record_key(DEMO, "55555555", DEMO)]
    assert [stored.key for stored in records.listed(DEMO)] == own
    assert [*records.all_of(DEMO, {})] == own


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
    lab: Lab, memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client raises no error of torpor's."""
    one = Side(lab, ONE)
    machine, _ = handed_over(lab.opened)
    _work(lab, machine)
    with one.runs(_raises(httpx.ConnectError("no server"))):
        watch.fn(dry_run=False)
        hibernate.fn(DEMO)
    assert lab.machines() == []
    assert "no server" in caplog.text
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
    asked: list[str] = []
    for name in ("put", "read", "head", "list", "delete"):
        real = getattr(memory_store, name)

        def counted(*given: Any, _real: Any = real, _name: str = name, **how: Any) -> Any:
            asked.extend([_name] if "/blocks/" in str(given[0]) else [])
            return _real(*given, **how)

        monkeypatch.setattr(memory_store, name, counted)
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []
    assert asked == ["read", "list", *others * ["read"], "list"]


def test_an_older_record_that_is_put_back_is_not_compared(lab: Lab) -> None:
    """Nor is one in a bucket that was copied; its own side writes it again within a day."""
    now = 1e9
    store = MemoryStore(lambda: now)
    lab.opened = replace(lab.opened, store=store)
    one, two = Side(lab, ONE), Side(lab, TWO)
    one.edit(exclude=["*.tmp"])
    body = store.get(one.key, max_bytes=1 << 20)
    now = time.time() + 2 * LATE_S
    store.put(one.key, body)
    two.edit()
    two.ends()
    store.close()


def test_watch_keeps_the_settings_of_each_workspace_once_a_day(
    lab: Lab, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, ONE)

    def look() -> None:
        with one.runs():
            watch.fn(dry_run=False)

    look()
    found = BlockRecords(memory_store, None).all_of(DEMO, {})
    assert [*found] == [one.key]
    one.spec = msgspec.structs.replace(one.spec, exclude=["*.tmp"])  # on the page Blocks
    look()
    assert BlockRecords(memory_store, None).all_of(DEMO, {}) == found
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + DAY_S + 1)
    look()
    (record,) = BlockRecords(memory_store, None).all_of(DEMO, {}).values()
    assert record.settings.stored["exclude"] == ["*.tmp"]
