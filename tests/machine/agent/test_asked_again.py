"""A request whose answer did not come is asked again, maybe while the first is still at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torpor.machine.agent.snapshot as snapshot_module
from tests.fixtures.engine import Engine
from tests.fixtures.syncs import begin_sync, finish_sync, stage_sync, sync, sync_part
from tests.fixtures.trees import Facts, differences, facts, kept, let_settle
from torpor.machine.tree.apply import TreeChanger
from torpor.machine.tree.staging import Staging
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import RunCancelled, WorkspaceInvalid
from torpor.shared.values import SnapshotId

_WAIT_S = 20

Ask = Callable[[], dict[str, Any]]


@contextmanager
def _one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first: Ask, second: Ask
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Ask ``first`` and, while it is within ``owner.name``, ``second``, which must not get there;
    yields both answers."""
    inner = getattr(owner, name)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        begun.release()
        go_on.wait(_WAIT_S)
        return inner(*args, **options)

    monkeypatch.setattr(owner, name, slow)
    with ThreadPoolExecutor(2) as threads:
        answers: list[Future[dict[str, Any]]] = [threads.submit(first)]
        try:
            assert begun.acquire(timeout=_WAIT_S)
            answers.append(threads.submit(second))
            assert not begun.acquire(timeout=0.5), "two were at it at once"
        finally:
            go_on.set()
        done = [answer.result(_WAIT_S) for answer in answers]
    monkeypatch.setattr(owner, name, inner)
    yield done[0], done[1]


def _changed(
    engine: Engine, was: Path, name: str, content: bytes
) -> tuple[SnapshotId, dict[bytes, Facts]]:
    """A snapshot in which one file is another, and its facts; the machine is back at the first."""
    first = engine.snapshot([was])
    (was / name).write_bytes(content)
    let_settle()
    second, after = engine.snapshot([was]), kept(was)
    sync(engine, first)
    return second, after


@pytest.mark.parametrize("again", ["finish", "check"])
def test_a_sync_changes_the_tree_once(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    second, after = _changed(engine, was, "small", b"changed")
    run, _ = begin_sync(engine, second)
    for part in stage_sync(engine, run)["parts"]:
        sync_part(engine, run, part)
    options = {"full": True} if again == "check" else {}
    with _one_at_a_time(
        monkeypatch,
        TreeChanger,
        "apply",
        lambda: engine.call("sync.finish", run=run),
        lambda: engine.call(f"sync.{again}", run=run, **options),
    ) as (finished, answered):
        assert answered == finished if again == "finish" else answered["differences"] == []
    finish_sync(engine, run)
    assert differences(after, facts(was)) == []


def test_a_sync_that_was_stopped_within_its_changes_says_so(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, after = _changed(engine, was, "small", b"changed")
    run, _ = begin_sync(engine, second)
    for part in stage_sync(engine, run)["parts"]:
        sync_part(engine, run, part)

    def fails(*args: Any) -> None:
        raise RunCancelled("the request was cancelled")

    with monkeypatch.context() as patched:
        patched.setattr(TreeChanger, "apply", fails)
        with pytest.raises(RunCancelled):
            engine.call("sync.finish", run=run)
    with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {second}: sync to that"):
        engine.call("sync.finish", run=run)
    engine.restart()
    sync(engine, second)
    assert differences(after, facts(was)) == []


def test_a_restore_is_finished_once(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.begin_restore(engine.snapshot([was]), [tmp_path / "new"])
    for part in engine.planned["parts"]:
        engine.restore_part(run, part)
    with _one_at_a_time(
        monkeypatch,
        TreeWriter,
        "finish",
        lambda: engine.call("restore.finish", run=run),
        lambda: engine.call("restore.check", run=run, full=True),
    ) as (_, checked):
        assert checked["differences"] == []
    assert differences(kept(was), facts(tmp_path / "new")) == []


@contextmanager
def _first_hangs_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first: Ask
) -> Iterator[tuple[Future[dict[str, Any]], threading.Event]]:
    """``first``, asked and now within ``owner.name`` until the event; who comes later passes."""
    inner = getattr(owner, name)
    begun, go_on = threading.Event(), threading.Event()

    def hangs_once(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            go_on.wait(_WAIT_S)
        return inner(*args)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as threads:
        patched.setattr(owner, name, hangs_once)
        answer = threads.submit(first)
        try:
            assert begun.wait(_WAIT_S)
            yield answer, go_on
        finally:
            go_on.set()


def test_a_restore_is_finished_behind_a_part_that_was_asked_for_twice(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is cut off, and still writes when the second has written it all."""
    run = engine.begin_restore(engine.snapshot([was]), [tmp_path / "new"])
    part, *others = engine.planned["parts"]
    with (
        _first_hangs_in(
            monkeypatch, TreeWriter, "write_at", lambda: engine.restore_part(run, part)
        ) as (cut_off, go_on),
        ThreadPoolExecutor(2) as threads,
    ):
        for one in (part, *others):
            engine.restore_part(run, one)
        finished = threads.submit(engine.call, "restore.finish", run=run)
        with pytest.raises(TimeoutError):
            finished.result(0.5)
        late = threads.submit(engine.restore_part, run, part)
        go_on.set()
        cut_off.result(_WAIT_S)
        finished.result(_WAIT_S)
        assert late.result(_WAIT_S)["stored_bytes"] == 0
    assert engine.call("restore.check", run=run, full=True)["differences"] == []
    assert differences(kept(was), facts(tmp_path / "new")) == []


def test_a_sync_changes_nothing_before_its_last_part_is_written(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, after = _changed(engine, was, "big", bytes(range(256)) * (5 << 12))
    run, _ = begin_sync(engine, second)
    part, *others = stage_sync(engine, run)["parts"]
    with (
        _first_hangs_in(monkeypatch, Staging, "write_at", lambda: sync_part(engine, run, part)) as (
            cut_off,
            go_on,
        ),
        ThreadPoolExecutor(1) as threads,
    ):
        for one in (part, *others):
            sync_part(engine, run, one)
        finished = threads.submit(engine.call, "sync.finish", run=run)
        with pytest.raises(TimeoutError):
            finished.result(0.5)
        go_on.set()
        cut_off.result(_WAIT_S)
        finished.result(_WAIT_S)
    finish_sync(engine, run)
    assert differences(after, facts(was)) == []


def test_a_workspace_is_walked_by_one_at_a_time(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk changes what the run knows of every file."""
    run = engine.begin([was])
    for part in engine.scan(run, 1)["parts"]:
        engine.part(run, 1, part)
    with _one_at_a_time(
        monkeypatch,
        snapshot_module,
        "walk",
        lambda: engine.scan(run, 2),
        lambda: engine.scan(run, 2),
    ) as (seen, again):
        assert seen["read_files"] == 0
        assert again == seen
    snapshot, _ = engine.commit(run)
    engine.call("snapshot.end", run=run, committed=True)
    assert snapshot in engine.snapshots()


def test_one_manifest_is_made_at_a_time(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.begin([was])
    for part in engine.scan(run, 1)["parts"]:
        engine.part(run, 1, part)
    engine.scan(run, 2)
    with _one_at_a_time(
        monkeypatch,
        snapshot_module,
        "encode_manifest",
        lambda: engine.commit(run)[1],
        lambda: engine.commit(run)[1],
    ) as (committed, again):
        assert committed["files"] == again["files"] == 3
