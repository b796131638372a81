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
from tests.fixtures.snapshots import commit, scan_and_store
from tests.fixtures.trees import Facts, differences, facts, kept, let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.tree.apply import TreeChanger
from torpor.machine.tree.staging import Staging
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import RunCancelled, WorkspaceInvalid
from torpor.shared.values import SnapshotId
from torpor.shared.wire.restore import Checked

Ask = Callable[[], Any]


def _one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first: Ask, second: Ask
) -> tuple[Any, Any]:
    """Ask ``first`` and, while it is within ``owner.name``, ``second``, which must not get there;
    returns both answers."""
    inner = getattr(owner, name)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        begun.release()
        go_on.wait(PATIENCE_S)
        return inner(*args, **options)

    monkeypatch.setattr(owner, name, slow)
    with ThreadPoolExecutor(2) as threads:
        answers: list[Future[Any]] = [threads.submit(first)]
        try:
            assert begun.acquire(timeout=PATIENCE_S)
            answers.append(threads.submit(second))
            assert not begun.acquire(timeout=0.5), "two were at it at once"
        finally:
            go_on.set()
        done = [answer.result(PATIENCE_S) for answer in answers]
    monkeypatch.setattr(owner, name, inner)
    return done[0], done[1]


def _changed(
    engine: Engine, was: Path, name: str, content: bytes
) -> tuple[SnapshotId, dict[bytes, Facts]]:
    """A snapshot in which one file is another, and its facts; the machine is back at the first."""
    first = engine.snapshot([was])
    (was / name).write_bytes(content)
    let_settle()
    second, after = engine.snapshot([was]), kept(was)
    engine.sync(first)
    return second, after


@pytest.mark.parametrize("again", ["finish", "check"])
def test_a_sync_changes_the_tree_once(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    second, after = _changed(engine, was, "small", b"changed")
    run = engine.staged_sync(second)
    asked = run.finish if again == "finish" else lambda: run.check(full=True)
    finished, answered = _one_at_a_time(monkeypatch, TreeChanger, "apply", run.finish, asked)
    assert answered == (finished if again == "finish" else Checked([], 0))
    assert run.check(full=True).differences == []
    run.end()
    assert differences(after, facts(was)) == []


def test_a_sync_that_was_stopped_within_its_changes_says_so(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, after = _changed(engine, was, "small", b"changed")
    run = engine.staged_sync(second)

    def fails(*args: Any) -> None:
        raise RunCancelled("the request was cancelled")

    with monkeypatch.context() as patched:
        patched.setattr(TreeChanger, "apply", fails)
        with pytest.raises(RunCancelled):
            run.finish()
    with pytest.raises(WorkspaceInvalid, match=f"only half of snapshot {second}: sync to that"):
        run.finish()
    engine.restart()
    engine.sync(second)
    assert differences(after, facts(was)) == []


def test_a_restore_is_finished_once(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.fetched_restore(engine.snapshot([was]), [tmp_path / "new"])
    _, checked = _one_at_a_time(
        monkeypatch, TreeWriter, "finish", run.finish, lambda: run.check(full=True)
    )
    assert checked.differences == []
    assert differences(kept(was), facts(tmp_path / "new")) == []


@pytest.mark.parametrize("asked", ["finish_first", "finish"])
def test_what_comes_first_is_finished_once(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    run, plan = engine.begin_restore(engine.snapshot([was]), [tmp_path / "new"], first=["big"])
    for part in plan.parts:
        run.restore_part(part)
    checked, _ = _one_at_a_time(
        monkeypatch, TreeWriter, "finish", run.finish_first, getattr(run, asked)
    )
    assert checked.differences == []
    assert run.check(full=True).differences == []
    assert run.finish_first().differences == []  # an old request, after all
    run.end()
    assert differences(kept(was), facts(tmp_path / "new")) == []


def test_what_comes_first_is_finished_after_every_part_of_it(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = engine.begin_restore(engine.snapshot([was]), [tmp_path / "new"], first=["small"])
    (part,) = (part for part in plan.parts if part.first)
    restored, checked = _one_at_a_time(
        monkeypatch, TreeWriter, "write_files", lambda: run.restore_part(part), run.finish_first
    )
    assert restored.stored_bytes == part.stored_bytes
    assert checked.differences == []


@contextmanager
def _first_hangs_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first: Ask
) -> Iterator[tuple[Future[Any], threading.Event]]:
    """``first``, asked and now within ``owner.name`` until the event; who comes later passes."""
    inner = getattr(owner, name)
    begun, go_on = threading.Event(), threading.Event()

    def hangs_once(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            go_on.wait(PATIENCE_S)
        return inner(*args)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as threads:
        patched.setattr(owner, name, hangs_once)
        answer = threads.submit(first)
        try:
            assert begun.wait(PATIENCE_S)
            yield answer, go_on
        finally:
            go_on.set()


def test_a_restore_is_finished_behind_a_part_that_was_asked_for_twice(
    engine: Engine, was: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is cut off, and still writes when the second has written it all."""
    run, plan = engine.begin_restore(engine.snapshot([was]), [tmp_path / "new"])
    part, *others = plan.parts
    hangs = _first_hangs_in(monkeypatch, TreeWriter, "write_at", lambda: run.restore_part(part))
    with hangs as (cut_off, go_on), ThreadPoolExecutor(2) as threads:
        for asked in (part, *others):
            run.restore_part(asked)
        finished = threads.submit(run.finish)
        with pytest.raises(TimeoutError):
            finished.result(0.5)
        late = threads.submit(run.restore_part, part)
        go_on.set()
        cut_off.result(PATIENCE_S)
        finished.result(PATIENCE_S)
        assert late.result(PATIENCE_S).stored_bytes == 0
    assert run.check(full=True).differences == []
    assert differences(kept(was), facts(tmp_path / "new")) == []


def test_a_sync_changes_nothing_before_its_last_part_is_written(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, after = _changed(engine, was, "big", bytes(range(256)) * (5 << 12))
    run = engine.begin_sync(second)
    part, *others = run.stage().parts
    hangs = _first_hangs_in(monkeypatch, Staging, "write_at", lambda: run.sync_part(part))
    with hangs as (cut_off, go_on), ThreadPoolExecutor(1) as threads:
        for asked in (part, *others):
            run.sync_part(asked)
        finished = threads.submit(run.finish)
        with pytest.raises(TimeoutError):
            finished.result(0.5)
        go_on.set()
        cut_off.result(PATIENCE_S)
        finished.result(PATIENCE_S)
    assert run.check(full=True).differences == []
    run.end()
    assert differences(after, facts(was)) == []


def test_a_workspace_is_walked_by_one_at_a_time(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk changes what the run knows of every file."""
    run = engine.begin([was])
    scan_and_store(run)
    seen, again = _one_at_a_time(
        monkeypatch, snapshot_module, "walk", lambda: run.store(1), lambda: run.store(1)
    )
    assert seen.unaccepted_count == again.unaccepted_count == 0
    snapshot, _ = commit(run)
    run.end(committed=True)
    assert snapshot in engine.snapshots()


def test_one_manifest_is_made_at_a_time(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.begin([was])
    scan_and_store(run)
    run.store(1)
    made = _one_at_a_time(
        monkeypatch, snapshot_module, "encode_manifest", lambda: commit(run), lambda: commit(run)
    )
    assert [committed.files for _, committed in made] == [3, 3]
