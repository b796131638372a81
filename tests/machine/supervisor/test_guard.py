"""When a machine's own saves are due."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import msgspec
import pytest

from tests.fixtures.waiting import until
from tests.machine.supervisor.test_autosave import book
from torpor.machine.supervisor import schedule
from torpor.machine.supervisor.guard import Guard
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.values import Grant, ObjectKey, SnapshotId
from torpor.shared.wire.job import OwnSave
from torpor.shared.wire.snapshot import KnownSnapshot


def test_what_somebody_else_stored_counts_as_a_save_of_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver of a job saves too, and hands over a book on that save. A book on a save of the
    machine's own changes nothing."""
    clock_s = [0.0]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    said = Rescued(OwnSave(SnapshotId("20261120T000000Z-00000000"), "own", 1, time.time()))
    line = msgspec.json.encode(said).decode()
    guard = Guard([], [sys.executable, "-c", f"print({line!r})"], lambda: None, rests=False)

    def known(root: str) -> list[KnownSnapshot]:
        grant = Grant(ObjectKey("workspaces/demo/snapshots/x"), "GET", "https://store", 0)
        return [KnownSnapshot(root, 1, grant)]

    first = msgspec.structs.replace(book(600.0), known=known("first"))
    guard.stand_by(first)
    clock_s[0] += 500.0
    guard.stand_by(first)
    assert guard.schedule.wait_s == 100.0
    guard.stand_by(msgspec.structs.replace(first, known=known("of its driver")))
    assert guard.schedule.wait_s == 600.0
    guard.save_if_due()
    assert not guard.saves_now
    clock_s[0] += 600.0
    guard.save_if_due()
    until(lambda: any(isinstance(news, Rescued) for news in guard.news()), "it has saved")
    clock_s[0] += 200.0
    guard.stand_by(msgspec.structs.replace(first, known=known("own")))
    assert guard.schedule.wait_s == 400.0
