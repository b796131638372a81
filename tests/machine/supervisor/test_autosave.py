"""The autosave process: what it says of its saves."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent.processes import ask
from torpor.machine.supervisor import autosave, schedule
from torpor.machine.supervisor.autosave import AutosaveFolder, Autosaver
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.autosave import Autosave, AutosaveState, LookAtAutosave
from torpor.shared.wire.job import OwnSave, SaveGrant, StandBy
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import request_line
from torpor.shared.wire.request import Request, parse_answer

DEMO = WorkspaceName("demo")


def book(every_s: float) -> StandBy:
    snapshot = SnapshotId("20261120T000000Z-00000000")
    key = ObjectKey(f"workspaces/{DEMO}/snapshots/{snapshot}")
    grant = Grant(key, "PUT", "https://store", 0)
    return StandBy(
        job="",
        workspace=DEMO,
        roots=["~/workspace"],
        exclude=[],
        accepted=[],
        compression=Compression(),
        key=None,
        known=[],
        parent=None,
        lost=[],
        saves=[SaveGrant(snapshot, 0, grant)],
        packs=[],
        save_argv=[],
        save_timeout_s=PATIENCE_S,
        every_s=every_s,
    )


def test_a_save_after_a_notice_says_when_it_began_though_none_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    folder = AutosaveFolder(tmp_path, DEMO)
    folder.make()
    said = Rescued(OwnSave(SnapshotId("20261120T000000Z-00000000"), "00", 1, time.time()))
    line = msgspec.json.encode(said).decode()
    save = [sys.executable, "-c", f"print({line!r})"]
    clock_s = [100.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: clock_s[0])
    monkeypatch.setattr(autosave, "time", clock)
    process = Autosaver(tmp_path, Autosave(book(600.0), []), save)
    unsaved_s = []

    def seen() -> AutosaveState:
        try:
            looked = until(lambda: (now := _look(folder)).saved and now, "it has saved")
            clock_s[0] += 120.0
            unsaved_s.append(_look(folder).unsaved_s)
        finally:
            _asked(folder, Bye())
        return looked

    began_unix = time.time()
    clock_s[0] += 500.0  # before the next scheduled save
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    state = looks.result()
    assert (state.error, state.saved) == ("", said.saved)
    assert state.stored_unix is not None
    assert began_unix <= state.stored_unix <= time.time()
    assert unsaved_s == [120.0]


@pytest.mark.parametrize(
    ("said", "again"),
    [
        (Rescued(None, "its grants did not suffice"), True),
        (Rescued(None, gave_way=True, unsent=True), False),
    ],
    ids=["failed, and there is a new book", "gave way to a run"],
)
def test_the_next_save_does_not_rest_after_one_that_stored_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Rescued, again: bool
) -> None:
    """Else a first save of an hour, whose grants did not suffice, would go on two days later."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    monkeypatch.setattr(schedule, "CLOCK_REST", 1e6)
    folder = AutosaveFolder(tmp_path, DEMO)
    folder.make()
    begun = tmp_path / "begun"
    line = msgspec.json.encode(said).decode()
    code = f"open({str(begun)!r}, 'a').write('.'); print({line!r})"
    process = Autosaver(tmp_path, Autosave(book(0.1), []), [sys.executable, "-c", code])

    def seen() -> None:
        try:
            if again:
                until(lambda: _look(folder).error, "the first save has failed")
                assert _look(folder).unsaved_s > 0.0
                assert begun.read_text() == "."
                _asked(folder, Autosave(book(0.1), []))
            until(lambda: begun.exists() and begun.read_text() >= "..", "the next save begins")
        finally:
            _asked(folder, Bye())

    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()


def _look(folder: AutosaveFolder) -> AutosaveState:
    state: AutosaveState = _asked(folder, LookAtAutosave(DEMO))
    return state


def _asked(folder: AutosaveFolder, request: Request[Any]) -> Any:
    with folder.connect() as peer:
        answer = ask(peer, request_line("look", request))
    assert answer is not None and answer.error is None
    return parse_answer(type(request), answer.result or {})
