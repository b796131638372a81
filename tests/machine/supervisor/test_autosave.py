"""The autosave process: what it says of its saves."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from torpor.machine.supervisor.autosave import AutosaveFolder, Autosaver
from torpor.machine.supervisor.saves import Rescued
from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.autosave import Autosave
from torpor.shared.wire.job import Notice, OwnSave, SaveGrant, StandBy

DEMO = WorkspaceName("demo")


def _book() -> StandBy:
    snapshot = SnapshotId("20261120T000000Z-00000000")
    key = ObjectKey(f"workspaces/{DEMO}/snapshots/{snapshot}")
    grant = Grant(key, "PUT", "https://store", 0.0)
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
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: -1)
    AutosaveFolder(tmp_path, DEMO).make()
    said = Rescued(OwnSave(SnapshotId("20261120T000000Z-00000000"), "00", 1, time.time()))
    line = msgspec.json.encode(said).decode()
    save = [sys.executable, "-c", f"print({line!r})"]
    process = Autosaver(tmp_path, Autosave(_book(), 600.0, []), save)
    at_unix = time.time()
    process._guard.hear(Notice("aws-rebalance", "it may end soon", at_unix))
    process._leaving = True
    process.run()
    state = process._state
    assert (state.error, state.saved, state.stored_unix) == ("", said.saved, at_unix)
