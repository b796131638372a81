"""What a workspace wants first can be used while the rest is restored."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import torpor.machine.tree.compare as compare_module
from flows.procedures.restore import restore_parts, restore_run
from tasks.plain_runner import PlainRunner
from tasks.restore import check_restore, finish_restore
from tests.fixtures.engine import Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Waking, reads_nothing
from tests.fixtures.trees import differences, facts, kept, let_settle
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.remote.restore import RemoteRestore
from torpor.control.reports import FirstReport
from torpor.machine.agent import in_use
from torpor.machine.agent.runs import RunRegistry
from torpor.machine.agent.workers import WORKERS
from torpor.shared.errors import (
    InvalidInput,
    RestoreUnfinished,
    SnapshotDamaged,
    WorkspaceInvalid,
)
from torpor.shared.format.manifest import Entry
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import Finished

KEY = bytes(range(32))
PART_BYTES = 2 * MIB
FIRST = ["env/bin", "model", "env"]
NAMES = {
    b"env", b"env/bin", b"env/bin/serve", b"env/empty", b"env/holes", b"env/open", b"env/open/conf",
    b"model", b"model/weights", b"rest/also weights", b"blobs/pointed at", b"model/link",
}  # fmt: skip
PASSAGES = {b"", b"blobs", b"rest"}


@pytest.fixture(scope="module")
def was(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of which a server needs a part; links lead in and out of that. No test changes
    it."""
    was, dice = tmp_path_factory.mktemp("first") / "was", random.Random(5)
    for name in ("env/bin", "env/open", "model", "blobs", "rest/deep"):
        (was / name).mkdir(parents=True)
    (was / "env/bin/serve").write_bytes(dice.randbytes(3000))
    (was / "env/bin/serve").chmod(0o750)
    (was / "env/open/conf").write_bytes(b"port = 80")
    (was / "env/open/conf").chmod(0o440)
    (was / "env/empty").touch(mode=0o604)
    with (was / "env/holes").open("wb") as file:
        file.truncate(9 * MIB)
        os.pwrite(file.fileno(), b"middle", 4 * MIB)
    (was / "model/weights").write_bytes(dice.randbytes(9 * MIB + 5))
    os.link(was / "model/weights", was / "rest/also weights")
    for name in ("pointed at", "other"):
        (was / "blobs" / name).write_bytes(dice.randbytes(2 * MIB))
    (was / "model/link").symlink_to("../blobs/pointed at")
    (was / "rest/to the model").symlink_to("../model")
    for number in range(6):
        (was / f"rest/{number}").write_bytes(dice.randbytes(2 * MIB + 7))
    for number in range(30):
        (was / f"rest/deep/{number}").write_bytes(dice.randbytes(2000))
    (was / "env/open").chmod(0o555)
    (was / "rest").chmod(0o2551)
    (was / "blobs").chmod(0o711)
    let_settle()
    return was


@pytest.fixture(scope="module")
def kept_snapshot(was: Path) -> Iterator[tuple[MemoryStore, SnapshotId]]:
    with closing(MemoryStore()) as store:
        source = Engine(store, was.with_name("source"), KEY, part_bytes=PART_BYTES)
        yield store, source.snapshot([was])
        source.runs.close()


@pytest.fixture
def waking(
    machines: Machines, kept_snapshot: tuple[MemoryStore, SnapshotId], was: Path, tmp_path: Path
) -> Iterator[Waking]:
    store, snapshot = kept_snapshot
    with store.undone():
        engine = machines(store, tmp_path / "woken", KEY)
        engine.part_bytes = PART_BYTES
        yield Waking(engine, snapshot, was, tmp_path / "back")


def _is_usable(waking: Waking) -> None:
    """What comes first is as it was, and the directories on the way to it let everybody pass who
    was let pass; the rest of these stays private until the end."""
    truth, now = waking.truth, facts(waking.back)
    first = {path: truth[path] for path in NAMES}
    assert differences(first, {path: now[path] for path in NAMES & now.keys()}) == []
    for path in PASSAGES:
        assert now[path].mode == truth[path].mode & ~stat.S_ISGID | stat.S_IRWXU
        assert now[path].owner == truth[path].owner
    assert now[b"rest/deep"].mode == 0o700


# -- order and bytes


@pytest.mark.rule(5)
def test_what_comes_first_can_be_used_before_the_rest_is_fetched(waking: Waking) -> None:
    plan = waking.begin(FIRST)
    come_first = [part.first for part in plan.parts]
    assert come_first == sorted(come_first, reverse=True)
    assert come_first.count(True) > 1
    assert (plan.first, plan.unmatched) == (len(NAMES), [])
    fetched = waking.fetch(waking.parts(first=True)[1:])
    with pytest.raises(InvalidInput, match=r"still lacks .* restore the parts that come first"):
        waking.run.finish_first()
    fetched += waking.fetch(waking.parts(first=True)[:1])
    assert waking.run.finish_first().differences == []
    _is_usable(waking)
    assert not (waking.back / "rest/0").exists()
    with pytest.raises(InvalidInput, match="still lacks"):
        waking.run.finish()
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        waking.engine.restart()
        waking.engine.begin([waking.back])  # never a snapshot
    waking.begin(FIRST, resume=True)
    assert waking.parts(first=True) == []
    fetched += waking.fetch()
    waking.complete()
    usual, waking.back = waking.back, waking.back.with_name("usual")
    assert fetched == sum(part.stored_bytes for part in waking.begin().parts)  # without an order
    assert waking.parts(first=True) == []
    waking.run.end()
    waking.engine.restore(waking.snapshot, [waking.back])
    assert reads_nothing(waking.engine, waking.back)
    assert differences(kept(waking.back), facts(usual)) == []


@pytest.mark.parametrize("first", [["rest/1", "rest/4"], ["rest/4", "rest/1"]])
def test_the_list_gives_the_order(waking: Waking, first: list[str]) -> None:
    waking.begin(first)
    seen: list[str] = []
    for part in waking.parts(first=True):
        waking.fetch([part])
        staged = b"".join(path.read_bytes() for path in waking.back.glob(".torpor-*/*"))
        there = [name for name in first if (waking.was / name).read_bytes() in staged]
        seen += [name for name in there if name not in seen]
    assert seen == first
    waking.fetch(waking.parts(first=False))
    waking.complete()  # what came first was never finished by itself


def test_parts_that_come_first_get_the_next_worker(tmp_path: Path) -> None:
    runs, got = RunRegistry(tmp_path), list[str]()
    waits = {name: threading.Event() for name in ("other", "first")}

    def work(name: str) -> None:
        with runs.worker(waits[name].set, first=name == "first"):
            got.append(name)

    with ThreadPoolExecutor(2) as threads, ExitStack() as busy:
        for _ in range(WORKERS - 1):
            busy.enter_context(runs.worker(lambda: None))
        with runs.worker(lambda: None):
            for name, waiting in waits.items():
                threads.submit(work, name)
                assert waiting.wait(PATIENCE_S)
        until(lambda: len(got) == 2, "both had the one that came free")
    assert got == ["first", "other"]


# -- kills

STEPS = ["begin", "a first part", "the first parts", "the first", "a part", "parts", "finish",
         "check"]  # fmt: skip


@pytest.mark.parametrize("killed_after", STEPS)
def test_a_kill_costs_nothing_that_was_restored(waking: Waking, killed_after: str) -> None:
    whole = waking.begin(FIRST)
    first, rest = waking.parts(first=True), waking.parts(first=False)
    fetched: list[int] = []
    work: list[Callable[[], object]] = [
        lambda: None,
        lambda: fetched.append(waking.fetch(first[:1])),
        lambda: fetched.append(waking.fetch(first[1:])),
        lambda: waking.run.finish_first(),
        lambda: fetched.append(waking.fetch(rest[:1])),
        lambda: fetched.append(waking.fetch(rest[1:])),
        lambda: waking.run.finish(),
        lambda: waking.run.check(full=True),
    ]
    done = STEPS.index(killed_after)
    for step in work[: done + 1]:
        step()
    usable = done >= STEPS.index("the first")
    untouched = _changes(waking.back) if usable else {}
    plan = waking.begin_again(FIRST)
    assert plan.complete is (killed_after == "check")
    lacking = sum(part.stored_bytes for part in plan.parts)
    assert sum(fetched) + lacking == sum(part.stored_bytes for part in whole.parts)
    assert plan.complete or plan.first == len(NAMES)
    waking.fetch(waking.parts(first=True))
    assert waking.run.finish_first().differences == []
    if done < STEPS.index("finish"):
        _is_usable(waking)
    waking.fetch(waking.parts(first=False))
    waking.complete()
    if usable:
        assert _changes(waking.back) == untouched  # nothing in use was written or linked again


def _changes(back: Path) -> dict[bytes, tuple[int, int]]:
    """Inode and time of the last change of each name that comes first."""
    found = {path: os.lstat(os.path.join(os.fsencode(back), path)) for path in NAMES}
    return {path: (st.st_ino, st.st_ctime_ns) for path, st in found.items()}


# -- programs that use it


@pytest.mark.parametrize("killed", [False, True], ids=["going on", "killed"])
def test_a_program_may_change_what_came_first(waking: Waking, killed: bool) -> None:
    waking.use(FIRST)
    back = waking.back
    (back / "env/bin/serve").write_bytes(b"rebuilt")
    (back / "env/bin/serve.pyc").write_bytes(b"new")
    (back / "model/link").unlink()
    if killed:
        waking.begin_again(FIRST)
    waking.fetch(waking.parts(first=False))
    waking.run.finish()
    (back / "pid").write_bytes(b"1")  # in a directory that has its time already
    checked = waking.run.check(full=True)
    assert checked.differences == []
    assert sorted(checked.changed) == ["env/bin/serve", "model/link"]
    waking.run.end()
    rebuilt, again = kept(back), back.with_name("again")
    assert (rebuilt[b"env/bin/serve"].size, b"model/link" in rebuilt) == (7, False)
    waking.engine.restore(waking.engine.snapshot([back]), [again])
    assert differences(rebuilt, facts(again)) == []


def test_what_was_not_first_must_be_as_it_was(waking: Waking) -> None:
    waking.use(FIRST)
    waking.fetch(waking.parts(first=False))
    waking.run.finish()
    (waking.back / "rest/3").write_bytes(b"no")
    wrong = {line.split(":")[0] for line in waking.run.check(full=True).differences}
    assert wrong == {str(waking.back / "rest/3")}
    waking.run.end()
    assert waking.engine.restore(waking.snapshot, [waking.back], first=FIRST).files == 43
    waking.is_back()


def test_after_a_start_of_the_machine_everything_is_compared(
    waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not on the disk yet when the machine went down is not taken for a program's work."""
    waking.use(FIRST)
    os.truncate(waking.back / "model/weights", 5)
    monkeypatch.setattr(in_use, "boot_id", lambda: "another")
    waking.begin_again(FIRST)
    assert waking.parts(first=True) == []
    assert "model/weights" in waking.run.finish_first().differences[0]
    waking.run.end()
    waking.engine.restore(waking.snapshot, [waking.back], first=FIRST)
    waking.is_back()


@pytest.mark.rule(16)
def test_a_restore_under_a_command_of_an_older_torpor_is_not_gone_on_with(waking: Waking) -> None:
    """The command has an error for each file that never came, and writes what it takes for
    missing."""
    waking.use(FIRST)
    waking.engine.restart()
    (record,) = waking.engine.home.rglob("in-use")
    gate = record.with_name("gate")
    gate.mkdir()
    (gate / "names").write_bytes(b"as an older version wrote it")
    run = waking.engine.remote_restore(waking.snapshot, [waking.back], first=FIRST)
    with pytest.raises(RestoreUnfinished, match="older torpor"):
        run.begin(resume=True)
    subprocess.run(["rm", "-rf", waking.back], check=True)
    waking.engine.restore(waking.snapshot, [waking.back], resume=True, first=FIRST)
    waking.is_back()
    assert not gate.exists()


@pytest.mark.parametrize("gone", ["the end of the record", "the files"])
def test_a_record_that_cannot_be_right_is_not_believed(waking: Waking, gone: str) -> None:
    """A damaged record costs another look. Files that were removed are not in use."""
    waking.use(FIRST)
    waking.engine.restart()
    (record,) = waking.engine.home.rglob("in-use")
    if gone == "the files":
        subprocess.run(["rm", "-rf", waking.back], check=True)
    else:
        record.write_bytes(record.read_bytes()[:-3])
    waking.engine.restore(waking.snapshot, [waking.back], resume=gone != "the files", first=FIRST)
    waking.is_back()
    assert not record.exists()


# -- as the flows order it


def _restored(
    waking: Waking,
    when_first: Callable[[], None],
    *,
    first: list[str] = FIRST,
    steps: list[str] | None = None,
    resume: bool = False,
) -> tuple[Finished, FirstReport | None]:
    before = None if steps is None else steps.append
    with PlainRunner(retries=0, at_once=1, before=before):
        restore = waking.engine.remote_restore(waking.snapshot, [waking.back], first=first)
        with restore_run(restore, resume=resume):
            if not restore.plan.complete:
                restore_parts(restore, "near", when_first=when_first)
                finish_restore(restore)
                check_restore(restore, True)
        return restore.finished, FirstReport.of(restore.plan, restore.first_s)


def test_the_rest_is_asked_for_before_the_first_is_there(waking: Waking) -> None:
    steps: list[str] = []

    def when_first() -> None:
        steps.append("used")
        _is_usable(waking)

    finished, report = _restored(waking, when_first, first=[*FIRST, "no such"], steps=steps)
    assert finished.warnings == ["first: nothing in the snapshot matches 'no such'"]
    assert steps[-2:] == ["finish restore", "check restore"]
    assert steps.index("finish what comes first") < steps.index("used") < len(steps) - 2
    assert report is not None
    assert report.names == len(NAMES)
    assert 11 * MIB < report.bytes < 12 * MIB
    assert f"{len(NAMES)} names usable after" in report.words()
    waking.is_back()


@pytest.mark.parametrize("first", [[], ["no such"]])
def test_without_an_order_nothing_can_be_used_before_the_end(
    waking: Waking, first: list[str]
) -> None:
    steps: list[str] = []
    _, report = _restored(waking, lambda: steps.append("used"), first=first, steps=steps)
    assert steps[-2:] == ["finish restore", "check restore"]
    assert report is None and "used" not in steps
    waking.engine.restart()
    steps.clear()
    _restored(waking, lambda: steps.append("used"), steps=steps, resume=True)
    assert steps == ["begin restore"]  # complete: nothing to do


def test_what_fails_when_it_is_used_ends_the_restore(waking: Waking) -> None:
    def fails() -> None:
        raise InvalidInput("the server does not start")

    with pytest.raises(InvalidInput, match="does not start"):
        _restored(waking, fails)
    waking.engine.restart()
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        waking.engine.begin([waking.back])
    finished, _ = _restored(waking, lambda: None, resume=True)
    assert finished.warnings == []
    waking.is_back()


@pytest.mark.parametrize(
    ("meddle", "found", "used"),
    [
        (lambda fd: os.ftruncate(fd, 7 * MIB), "has 7340032 bytes", False),
        (lambda fd: os.pwrite(fd, b"!", 7 * MIB), "content differs", True),
    ],
    ids=["size", "content"],
)
def test_a_first_that_is_not_right_is_found(
    waking: Waking,
    monkeypatch: pytest.MonkeyPatch,
    meddle: Callable[[int], object],
    found: str,
    used: bool,
) -> None:
    """A wrong size before it is used. A wrong content in the end: the program on it runs already,
    and the machine is not handed over."""
    finish_first, was_used = RemoteRestore.finish_first, list[bool]()

    def meddled(self: RemoteRestore) -> object:
        files = waking.back.glob(".torpor-*/*")
        (weights,) = (path for path in files if path.stat().st_size == 9 * MIB + 5)
        with weights.open("r+b") as file:
            meddle(file.fileno())
        return finish_first(self)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteRestore, "finish_first", meddled)
        with pytest.raises(SnapshotDamaged, match=f"model/weights: {found}"):
            _restored(waking, lambda: was_used.append(True))
    assert was_used == [True] * used
    _restored(waking, lambda: None, resume=True)
    waking.is_back()


def test_what_changes_while_it_is_compared_is_a_program_s_work(
    waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = compare_module.right_extents

    def writes(fd: int, entry: Entry, *rest: Any) -> set[int]:
        if entry.path == b"model/weights":
            os.truncate(waking.back / "model/weights", 3)
        return inner(fd, entry, *rest)

    monkeypatch.setattr(compare_module, "right_extents", writes)
    finished, _ = _restored(waking, lambda: None)
    assert finished.warnings == ["'model/weights' was used and changed before the rest was there"]
    assert (waking.back / "model/weights").stat().st_size == 3
