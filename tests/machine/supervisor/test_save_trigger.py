"""When a machine's own saves are due."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.fixtures.waiting import until
from tests.machine.supervisor.test_autosave import JOB, book, runs_in
from torpor.machine.supervisor import saves, schedule
from torpor.machine.supervisor.freezing import Freeze
from torpor.machine.supervisor.save_trigger import SaveTrigger
from torpor.machine.supervisor.saves import Rescued, SaveDue
from torpor.shared.values import Grant, ObjectKey, SnapshotId
from torpor.shared.wire.job import OwnSave
from torpor.shared.wire.snapshot import KnownSnapshot


def test_what_somebody_else_stored_counts_as_a_save_of_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a job saves too, and gives it a book on that save. A book on a save of the
    machine's own changes nothing."""
    clock_s = [0.0]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    said = Rescued(OwnSave(SnapshotId("20261120T000000Z-00000000"), "own", 1, time.time()))
    line = msgspec.json.encode(said).decode()
    trigger = SaveTrigger(tmp_path, [sys.executable, "-c", f"print({line!r})"], lambda: None)

    def known(root: str) -> list[KnownSnapshot]:
        grant = Grant(ObjectKey("workspaces/demo/snapshots/x"), "GET", "https://store", 0)
        return [KnownSnapshot(root, 1, grant)]

    first = msgspec.structs.replace(book(600.0), known=known("first"))
    trigger.stand_by(first)
    clock_s[0] += 500.0
    trigger.stand_by(first)
    assert trigger.schedule.wait_s == 100.0
    trigger.stand_by(msgspec.structs.replace(first, known=known("of its driver")))
    assert trigger.schedule.wait_s == 600.0
    trigger.save_if_due()
    assert not trigger.saves_now
    clock_s[0] += 600.0
    trigger.save_if_due()
    until(lambda: any(isinstance(news, Rescued) for news in trigger.news()), "it has saved")
    clock_s[0] += 200.0
    trigger.stand_by(msgspec.structs.replace(first, known=known("own")))
    assert trigger.schedule.wait_s == 400.0


@pytest.mark.parametrize(
    ("of_book", "criu", "why"),
    [
        (JOB, "/criu", ""),
        (JOB, "", "has not proven"),
        ("", "/criu", "no grants for this job"),
    ],
    ids=["it may be", "unproven", "the book is not the job's"],
)
def test_a_notice_says_at_once_where_a_command_is_not_frozen(
    tmp_path: Path, of_book: str, criu: str, why: str
) -> None:
    """Whoever waits for that keeps back saves of its own."""
    runs_in(tmp_path, Freeze(JOB, "/images", criu))
    trigger = SaveTrigger(tmp_path, ["false"], lambda: None)
    trigger.stand_by(msgspec.structs.replace(book(600.0), job=of_book))
    said = trigger.why_never_frozen(JOB)
    assert why in said and bool(said) is bool(why)
    runs_in(tmp_path)
    assert trigger.why_never_frozen(JOB) == ""  # it is not to be


_DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
open(sys.argv[1], "w").close()
time.sleep(1)
def gives_way(*_):
    print('{"saved": null, "gave_way": true, "packs": 0, "unsent": true}', flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, gives_way)
time.sleep(600)
"""
_DIES = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"


def test_a_save_gets_its_orders_also_where_its_process_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are longer than what a pipe takes, and it reads them only once it runs."""
    monkeypatch.setattr(saves, "REPEAT_S", 0.05)
    go = tmp_path / "go"
    os.mkfifo(go)
    code = (
        "import sys; open(sys.argv[1]).close(); sys.stdin.buffer.read(); "
        'print(\'{"saved": null, "unchanged": true}\')'
    )
    looks: list[None] = []

    def is_urgent() -> bool:
        looks.append(None)
        if len(looks) == 3:  # two times was it not heard of
            os.close(os.open(go, os.O_WRONLY))
        return False

    kept = saves.RescueSaves([sys.executable, "-c", code, str(go)], is_urgent=is_urgent)
    kept.stand_by(msgspec.structs.replace(book(600.0), exclude=["x" * 1024] * 1024))
    assert kept.save(SaveDue(0.0)).unchanged


@pytest.mark.parametrize("code", [_DEAF, _DIES], ids=["it does not hear it", "it dies of it"])
def test_a_scheduled_save_that_has_just_begun_gives_way_with_all_its_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Its process hears SIGTERM only once it has started."""
    monkeypatch.setattr(saves, "REPEAT_S", 0.2)
    begun = tmp_path / "begun"
    notice = threading.Event()
    start = [sys.executable, "-c", code, str(begun)]
    kept = saves.RescueSaves(start, is_urgent=notice.is_set)
    kept.stand_by(book(600.0))
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(kept.save, SaveDue(0.0))
        until(begun.exists, "it has started")
        notice.set()
        kept.end_scheduled()
        assert done.result().gave_way
    assert kept.left == 1
