"""The autosave process: what it says of its saves."""

from __future__ import annotations

import os
import secrets
import select
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
from torpor.machine.checkpoint.tree import mark
from torpor.machine.supervisor import autosave, requests, schedule
from torpor.machine.supervisor.autosave import Autosaver
from torpor.machine.supervisor.folder import AutosaveFolder, JobFolder, Kept
from torpor.machine.supervisor.freezing import Freeze
from torpor.machine.supervisor.marker import mark_home
from torpor.machine.supervisor.processes import identify
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.autosave import Autosave, AutosaveState, Book, LookAtAutosave, SaveGrant
from torpor.shared.wire.job import JobState, OwnSave
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import Envelope, parse_line, request_line
from torpor.shared.wire.request import Request, parse_answer
from torpor.shared.wire.snapshot import IMAGE_FILES, KnownSnapshot

JOB = "3f2a9c81d04e"
DEMO = WorkspaceName("demo")


def process_in(home: Path, given: Book, save: list[str]) -> Autosaver:
    """It is given a book as it starts."""
    mark_home(home)
    folder = AutosaveFolder(home, DEMO)
    folder.make()
    lock = folder.take()
    asked = parse_line(request_line("first", Autosave(given, [])))
    assert lock is not None and isinstance(asked, Envelope)
    return Autosaver(home, lock, "a bundle", save, asked)


def runs_in(home: Path, freeze: Freeze | None = None) -> None:
    """What the supervisor of a command that runs has written; this process stands for both."""
    folder, me = JobFolder(home, JOB), identify(os.getpid())
    folder.make()
    folder.write(Kept(JobState(JOB, 1, "running"), me, me, "/nowhere", "/a", freeze=freeze))


def book(every_s: float) -> Book:
    snapshot = SnapshotId("20261120T000000Z-00000000")
    key = ObjectKey(f"workspaces/{DEMO}/snapshots/{snapshot}")
    grant = Grant(key, "PUT", "https://store", 0)
    return Book(
        job="",
        workspace=DEMO,
        roots=["~/workspace"],
        exclude=[],
        accepted=[],
        compression=Compression(),
        key=None,
        known=[],
        unusable=[],
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
    said = Rescued(OwnSave(SnapshotId("20261120T000000Z-00000000"), "00", 1, time.time()))
    line = msgspec.json.encode(said).decode()
    save = [sys.executable, "-c", f"print({line!r})"]
    clock_s = [100.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: clock_s[0])
    monkeypatch.setattr(autosave, "time", clock)
    process = process_in(tmp_path, book(600.0), save)
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
    begun = tmp_path / "begun"
    line = msgspec.json.encode(said).decode()
    code = f"open({str(begun)!r}, 'a').write('.'); print({line!r})"
    process = process_in(tmp_path, book(0.1), [sys.executable, "-c", code])

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


def test_what_somebody_else_has_stored_is_not_said_to_be_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a job saves, and after it `watch` would tell of a save that is hours old."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    clock_s = [100.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: clock_s[0])
    monkeypatch.setattr(autosave, "time", clock)
    folder, given = AutosaveFolder(tmp_path, DEMO), book(600.0)
    process = process_in(tmp_path, given, ["false"])
    grant = Grant(ObjectKey(f"workspaces/{DEMO}/snapshots/x"), "GET", "https://store", 0)
    stored = msgspec.structs.replace(given, known=[KnownSnapshot("of its driver", 1, grant)])
    unsaved_s = []

    def seen() -> None:
        try:
            clock_s[0] += 500.0
            _asked(folder, Autosave(given, []))
            unsaved_s.append(_look(folder).unsaved_s)
            _asked(folder, Autosave(stored, []))
            unsaved_s.append(_look(folder).unsaved_s)
        finally:
            _asked(folder, Bye())

    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()
    assert unsaved_s == [500.0, 0.0]


@pytest.mark.parametrize("why", ["its grants have ended", "the command stays frozen"])
def test_a_save_that_is_due_and_cannot_begin_keeps_no_core_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nobody may drive the job for hours, and the user's command works beside it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    waits_s: list[float] = []

    def waits(*given: Any) -> Any:
        waits_s.append(given[3])
        return select.select(*given)

    monkeypatch.setattr(requests, "select", SimpleNamespace(select=waits))
    images = tmp_path / "images"
    images.mkdir()
    for name in IMAGE_FILES:
        (images / name).write_text("{}")
    mark(images, SnapshotId("20261120T000000Z-00000000"))
    runs_in(tmp_path, Freeze(JOB, str(images), "/criu"))
    lasts_s = 0.0 if why == "its grants have ended" else 3600.0
    given = msgspec.structs.replace(book(1e-6), job=JOB, lasts_s=lasts_s)
    process = process_in(tmp_path, given, ["false"])
    folder = AutosaveFolder(tmp_path, DEMO)

    def seen() -> None:
        try:
            for _ in range(4):
                _look(folder)
        finally:
            _asked(folder, Bye())

    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()
    assert len(waits_s) >= 4
    assert min(waits_s) > 0.5


def test_a_process_that_nobody_waits_for_any_more_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save after a notice may go on beyond the time that an agent waits for the process's end:
    the agent has said that the process stays."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    clock_s = [100.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: clock_s[0])
    monkeypatch.setattr(autosave, "time", clock)
    folder, begun, go = AutosaveFolder(tmp_path, DEMO), tmp_path / "begun", tmp_path / "go"
    process = process_in(tmp_path, book(600.0), _fails_at(begun, go))

    def seen() -> None:
        try:
            until(begun.exists, "the save has begun")
            _asked(folder, Bye())
            clock_s[0] += autosave.LEAVES_S
            go.touch()
            until(lambda: _look(folder).error, "the save is over")
            _look(folder)
        finally:
            go.touch()
            _asked(folder, Bye())

    handlers[signal.SIGTERM](signal.SIGTERM, None)
    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()


def test_a_signal_during_a_save_after_a_notice_is_followed_by_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may have been for a recommendation, without the user's quiesce command."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    folder, begun, go = AutosaveFolder(tmp_path, DEMO), tmp_path / "begun", tmp_path / "go"
    given = book(600.0)
    given = msgspec.structs.replace(given, saves=given.saves * 2)
    process = process_in(tmp_path, given, _fails_at(begun, go))

    def seen() -> None:
        try:
            until(begun.exists, "the first save has begun")
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            _look(folder)
            _look(folder)  # it has heard the signal by now
            go.touch()
            until(lambda: begun.read_text() == "..", "another save begins")
        finally:
            go.touch()
            _asked(folder, Bye())

    handlers[signal.SIGTERM](signal.SIGTERM, None)
    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()


def _look(folder: AutosaveFolder) -> AutosaveState:
    state: AutosaveState = _asked(folder, LookAtAutosave(DEMO))
    return state


def _fails_at(begun: Path, go: Path) -> list[str]:
    """A save that says in ``begun`` that it has begun, and fails once ``go`` is there."""
    line = msgspec.json.encode(Rescued(None, "it failed")).decode()
    code = (
        "import os, time\n"
        f"open({str(begun)!r}, 'a').write('.')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        f"print({line!r})"
    )
    return [sys.executable, "-c", code]


def _asked(folder: AutosaveFolder, request: Request[Any]) -> Any:
    with folder.connect() as peer:
        answer = ask(peer, request_line(secrets.token_hex(4), request))
    assert answer is not None and answer.error is None
    return parse_answer(type(request), answer.result or {})
