"""The autosave process: what it says of its saves."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.waiting import until
from torpor.machine.agent.processes import ask
from torpor.machine.supervisor.autosave import AutosaveFolder, Autosaver
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.autosave import Autosave, AutosaveState, LookAtAutosave
from torpor.shared.wire.job import OwnSave, SaveGrant, StandBy
from torpor.shared.wire.machine import Bye
from torpor.shared.wire.protocol import request_line
from torpor.shared.wire.request import Request, parse_answer

DEMO = WorkspaceName("demo")


def _book() -> StandBy:
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
        save_timeout_s=1.0,
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
    process = Autosaver(tmp_path, Autosave(_book(), 600.0, []), save)

    def asked(request: Request[Any]) -> Any:
        with folder.connect() as peer:
            answer = ask(peer, request_line("look", request))
        assert answer is not None
        return parse_answer(type(request), answer.result or {})

    def seen() -> AutosaveState:
        found = until(lambda: (now := asked(LookAtAutosave(DEMO))).saved and now, "it has saved")
        asked(Bye())
        return found

    began_unix = time.time()
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    state = looks.result()
    assert (state.error, state.saved) == ("", said.saved)
    assert state.stored_unix is not None
    assert began_unix <= state.stored_unix <= time.time()


def test_a_save_that_failed_comes_again_with_the_next_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a first save of an hour, whose grants did not suffice, would go on two days later."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    folder = AutosaveFolder(tmp_path, DEMO)
    folder.make()
    begun = tmp_path / "begun"
    line = msgspec.json.encode(Rescued(None, "its grants did not suffice")).decode()
    code = f"import time; open({str(begun)!r}, 'a').write('.'); time.sleep(0.3); print({line!r})"
    process = Autosaver(tmp_path, Autosave(_book(), 0.1, []), [sys.executable, "-c", code])

    def asked(request: Request[Any]) -> Any:
        with folder.connect() as peer:
            answer = ask(peer, request_line("look", request))
        assert answer is not None and answer.error is None
        return parse_answer(type(request), answer.result or {})

    def seen() -> None:
        until(lambda: asked(LookAtAutosave(DEMO)).error, "the first save has failed")
        assert begun.read_text() == "."
        asked(Autosave(_book(), 0.1, []))
        until(lambda: begun.read_text() == "..", "the next save begins")
        asked(Bye())

    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(seen)
        process.run()
    looks.result()
