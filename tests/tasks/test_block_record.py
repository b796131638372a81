"""The settings of a workspace in its bucket, as flows keep them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from tasks.block_record import SameSettings, keep_settings
from tasks.guards import EndingMachine
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import Lab
from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.block_records import BlockRecords, record_key, settings_for
from torpor.shared.errors import RecordRefused, StoreUnavailable, UnsavedWork
from torpor.shared.values import WorkspaceName

DEMO = WorkspaceName("demo")


def _side(lab: Lab, name: str, **spec: object) -> OpenWorkspace:
    of = msgspec.structs.replace(lab.opened.spec, **spec)
    settings = partial(settings_for, of, DEMO, sealed=False)
    return replace(lab.opened, spec=of, side=name, settings=settings)


def test_a_store_that_is_away_is_a_warning_and_the_next_flow_writes(
    lab: Lab, memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = _side(lab, "one")
    memory_store.fails = StoreUnavailable("it is away")
    assert keep_settings(one) is None
    assert "the next wake, backup or hibernate tries it again" in caplog.text
    memory_store.fails = None
    keep_settings(one)
    assert memory_store.head(record_key(DEMO, DEMO)) is not None


def test_only_what_is_stored_keeps_a_machine_where_two_sides_differ(lab: Lab) -> None:
    ending = EndingMachine(lab.rent(), nothing_new=True)
    one, two = _side(lab, "one"), _side(lab, "two", exclude=["*.tmp"])
    keep_settings(one)
    SameSettings(one, repeated=True).check(ending)
    with pytest.raises(UnsavedWork, match=r"other settings .*\(exclude\)"):
        SameSettings(two, repeated=True).check(ending)
    SameSettings(_side(lab, "two", save_minutes=7), repeated=True).check(ending)
    keep_settings(two, force=True)
    SameSettings(two, repeated=True).check(ending)
    with pytest.raises(UnsavedWork):
        SameSettings(one, repeated=True).check(ending)


def test_a_record_that_cannot_be_believed_keeps_the_machine(
    lab: Lab, memory_store: MemoryStore
) -> None:
    """It may say that more is stored than this side knows."""
    one, key = _side(lab, "one"), record_key(DEMO, DEMO)
    memory_store.put(key, b"junk")
    keep_settings(one)
    with pytest.raises(RecordRefused, match=key):
        SameSettings(one, repeated=True).check(EndingMachine(lab.rent(), nothing_new=True))
    keep_settings(one, force=True)
    assert BlockRecords(memory_store, None).read(DEMO, DEMO) is not None
    SameSettings(one, repeated=True).check(EndingMachine(lab.rent(), nothing_new=True))
