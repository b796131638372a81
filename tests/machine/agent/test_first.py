"""What a workspace wants first can be used while the rest is restored."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import torpor.machine.tree.compare as compare_module
from flows.procedures.phases import Phases
from flows.procedures.restore import Restoration
from tasks.plain_runner import PlainRunner
from tests.fixtures.engine import Engine
from tests.fixtures.manifests import LIES, PLAIN, Lie
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, put_manifest, reads_nothing
from tests.fixtures.trees import Tree, differences, facts, kept, let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.remote.restore import RemoteRestore
from torpor.machine.agent import in_use
from torpor.machine.agent.runs import WORKERS, RunRegistry
from torpor.shared.errors import InvalidInput, ManifestInvalid, SnapshotDamaged, WorkspaceInvalid
from torpor.shared.format.manifest import Entry, encode_manifest
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.restore import Finished, RestorePart, RestorePlan

KEY = bytes(range(32))
FIRST = ["env/bin", "model", "env"]
NAMES = {
    b"env", b"env/bin", b"env/bin/serve", b"env/empty", b"env/holes", b"env/open", b"env/open/conf",
    b"model", b"model/weights", b"rest/also weights", b"blobs/pointed at", b"model/link",
}  # fmt: skip
PASSAGES = {b"", b"blobs", b"rest"}


@pytest.fixture
def was(tmp_path: Path) -> Path:
    """A workspace of which a server needs a part; links lead in and out of that."""
    was, dice = tmp_path / "was", random.Random(5)
    for name in ("env/bin", "env/open", "model", "blobs", "rest/deep"):
        (was / name).mkdir(parents=True)
    (was / "env/bin/serve").write_bytes(dice.randbytes(3000))
    (was / "env/bin/serve").chmod(0o750)
    (was / "env/open/conf").write_bytes(b"port = 80")
    (was / "env/open/conf").chmod(0o440)
    (was / "env/empty").write_bytes(b"")
    (was / "env/empty").chmod(0o604)
    with (was / "env/holes").open("wb") as file:
        file.truncate(9 * MIB)
        os.pwrite(file.fileno(), b"middle", 4 * MIB)
    (was / "model/weights").write_bytes(dice.randbytes(9 * MIB + 5))
    os.link(was / "model/weights", was / "rest/also weights")
    (was / "blobs/pointed at").write_bytes(dice.randbytes(2 * MIB))
    (was / "blobs/other").write_bytes(dice.randbytes(2 * MIB))
    (was / "model/link").symlink_to("../blobs/pointed at")
    (was / "rest/to the model").symlink_to("../model")
    for number in range(6):
        (was / f"rest/{number}").write_bytes(dice.randbytes(5 * MIB))
    for number in range(30):
        (was / f"rest/deep/{number}").write_bytes(dice.randbytes(2000))
    (was / "env/open").chmod(0o555)
    (was / "rest").chmod(0o2551)
    (was / "blobs").chmod(0o711)
    let_settle()
    return was


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def away(
    machines: Machines, memory_store: MemoryStore, tmp_path: Path, request: pytest.FixtureRequest
) -> Engine:
    """A machine on which nothing is restored, sealed and plain."""
    return _parted(machines(memory_store, tmp_path / "away", request.param))


@pytest.fixture
def woken(machines: Machines, memory_store: MemoryStore, tmp_path: Path) -> Engine:
    return _parted(machines(memory_store, tmp_path / "woken"))


def _parted(engine: Engine) -> Engine:
    engine.part_bytes = 2 * MIB
    return engine


def _stored(machines: Machines, of: Engine, was: Path) -> SnapshotId:
    """The snapshot of ``was``, taken by another machine."""
    engine = _parted(machines(of.store, of.home.parent / "first", of.store_key))
    return engine.snapshot([was])


def _fetch(run: RemoteRestore, parts: list[RestorePart]) -> int:
    return sum(run.restore_part(part).stored_bytes for part in parts)


def _first(plan: RestorePlan) -> list[RestorePart]:
    return [part for part in plan.parts if part.first]


def _rest(plan: RestorePlan) -> list[RestorePart]:
    return [part for part in plan.parts if not part.first]


def _usable(truth: Tree, back: Path) -> None:
    """What comes first is as it was, and the directories on the way to it let everybody pass who
    was let pass; the rest of these stays private until the end."""
    now = facts(back)
    first = {path: truth[path] for path in NAMES}
    assert differences(first, {path: now[path] for path in NAMES & now.keys()}) == []
    for path in PASSAGES:
        assert now[path].mode == truth[path].mode & ~stat.S_ISGID | stat.S_IRWXU
        assert now[path].owner == truth[path].owner
    assert now[b"rest/deep"].mode == 0o700


def _ended(run: RemoteRestore) -> Finished:
    finished = run.finish()
    assert run.check(full=True).differences == []
    run.end()
    return finished


# -- order and bytes


def test_what_comes_first_can_be_used_before_the_rest_is_fetched(
    machines: Machines, away: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot = _stored(machines, away, was)
    truth, back = kept(was), tmp_path / "back"
    run, plan = away.begin_restore(snapshot, [back], first=FIRST)
    assert [part.first for part in plan.parts] == sorted(
        (p.first for p in plan.parts), reverse=True
    )
    assert len(_first(plan)) > 1
    assert (plan.first, plan.unmatched) == (len(NAMES), [])
    fetched = _fetch(run, _first(plan))
    assert run.finish_first().differences == []
    _usable(truth, back)
    assert not (back / "rest/0").exists()
    with pytest.raises(InvalidInput, match="still lacks"):
        run.finish()
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        away.restart()
        away.begin([back])  # never a snapshot
    run, plan = away.begin_restore(snapshot, [back], first=FIRST, resume=True)
    assert _first(plan) == []
    fetched += _fetch(run, _rest(plan))
    _ended(run)
    assert differences(truth, facts(back)) == []
    assert fetched == _stored_bytes(away, snapshot, tmp_path / "usual")
    assert reads_nothing(away, tmp_path / "usual")


def _stored_bytes(engine: Engine, snapshot: SnapshotId, target: Path) -> int:
    """What a restore without an order fetches."""
    run, plan = engine.begin_restore(snapshot, [target])
    assert all(not part.first for part in plan.parts)
    fetched = _fetch(run, plan.parts)
    _ended(run)
    return fetched


def test_the_list_gives_the_order(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot = _stored(machines, woken, was)
    orders = []
    for number, first in enumerate((["rest/1", "rest/4"], ["rest/4", "rest/1"])):
        back = tmp_path / str(number)
        run, plan = woken.begin_restore(snapshot, [back], first=first)
        seen = []
        for part in _first(plan):
            run.restore_part(part)
            staged = b"".join(path.read_bytes() for path in back.glob(".torpor-*/*"))
            there = [name for name in first if (was / name).read_bytes() in staged]
            seen += [name for name in there if name not in seen]
        orders.append(seen)
        run.end()
    assert orders == [["rest/1", "rest/4"], ["rest/4", "rest/1"]]


def test_parts_that_come_first_must_be_there_before_they_are_finished(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    run, plan = woken.begin_restore(_stored(machines, woken, was), [tmp_path / "back"], first=FIRST)
    _fetch(run, _first(plan)[1:])
    with pytest.raises(InvalidInput, match=r"still lacks .* restore the parts that come first"):
        run.finish_first()


def test_parts_that_come_first_get_the_next_worker(tmp_path: Path) -> None:
    runs, got = RunRegistry(tmp_path), list[str]()
    waits = {name: threading.Event() for name in ("other", "first")}

    def work(name: str) -> None:
        with runs.worker(waits[name].set, first=name == "first"):
            got.append(name)

    with ThreadPoolExecutor(2) as threads, ExitStack() as busy:
        for _ in range(WORKERS):
            busy.enter_context(runs.worker(lambda: None))
        for name, waiting in waits.items():
            threads.submit(work, name)
            assert waiting.wait(PATIENCE_S)
    assert got == ["first", "other"]


# -- kills


@pytest.mark.parametrize(
    "killed_after",
    ["begin", "a first part", "the first parts", "the first", "a part", "parts", "finish", "check"],
)
def test_a_kill_costs_nothing_that_was_restored(
    machines: Machines, away: Engine, was: Path, tmp_path: Path, killed_after: str
) -> None:
    snapshot = _stored(machines, away, was)
    truth, back = kept(was), tmp_path / "back"
    run, whole = away.begin_restore(snapshot, [back], first=FIRST)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("begin", lambda: None),
        ("a first part", lambda: _fetch(run, _first(whole)[:1])),
        ("the first parts", lambda: _fetch(run, _first(whole)[1:])),
        ("the first", lambda: run.finish_first()),
        ("a part", lambda: _fetch(run, _rest(whole)[:1])),
        ("parts", lambda: _fetch(run, _rest(whole)[1:])),
        ("finish", run.finish),
        ("check", lambda: run.check(full=True)),
    ]
    names = [name for name, _ in steps]
    done = names.index(killed_after)
    for _, do in steps[: done + 1]:
        do()
    usable = names.index("the first") <= done
    untouched = _changes(back) if usable else {}
    away.restart()
    again, plan = away.begin_restore(snapshot, [back], first=FIRST, resume=True)
    assert plan.complete is (killed_after == "check")
    fetched = 0 if done < 1 else sum(part.bytes for part in _first(whole)[:1])
    fetched = sum(part.bytes for part in _first(whole)) if done >= 2 else fetched
    fetched += sum(part.bytes for part in _rest(whole)[: 1 if done == 4 else None]) * (done >= 4)
    assert sum(part.bytes for part in [*whole.parts]) - fetched == sum(p.bytes for p in plan.parts)
    if not plan.complete:
        assert plan.first == len(NAMES)
        _fetch(again, _first(plan))
        assert again.finish_first().differences == []
        if done < names.index("finish"):
            _usable(truth, back)
        _fetch(again, _rest(plan))
    _ended(again)
    assert differences(truth, facts(back)) == []
    if usable:
        assert _changes(back) == untouched  # nothing that was in use was written or linked again


def _changes(back: Path) -> dict[bytes, tuple[int, int]]:
    """Inode and time of the last change of each name that comes first."""
    found = {path: os.lstat(os.path.join(os.fsencode(back), path)) for path in NAMES}
    return {path: (st.st_ino, st.st_ctime_ns) for path, st in found.items()}


def test_the_control_side_that_never_finishes_what_comes_first_loses_nothing(
    machines: Machines, away: Engine, was: Path, tmp_path: Path
) -> None:
    run, plan = away.begin_restore(_stored(machines, away, was), [tmp_path / "back"], first=FIRST)
    _fetch(run, [*reversed(plan.parts)])
    _ended(run)
    assert differences(kept(was), facts(tmp_path / "back")) == []


def test_another_order_continues_too(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    """The user edits the block between two wakes."""
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    run, plan = woken.begin_restore(snapshot, [back], first=["model"])
    _fetch(run, _first(plan))
    run.finish_first()
    (back / "model/log").write_bytes(b"the server's")
    woken.restart()
    run, plan = woken.begin_restore(snapshot, [back], first=["rest/deep", "model"], resume=True)
    _fetch(run, _first(plan))
    assert run.finish_first().differences == []
    assert (back / "rest/deep/3").read_bytes() == (was / "rest/deep/3").read_bytes()
    _fetch(run, _rest(plan))
    _ended(run)
    (back / "model/log").unlink()
    os.utime(back / "model", ns=(0, (was / "model").stat().st_mtime_ns))
    assert differences(kept(was), facts(back)) == []


# -- programs that use it


@pytest.mark.parametrize("killed", [False, True], ids=["going on", "killed"])
def test_a_program_may_change_what_came_first(
    machines: Machines, away: Engine, was: Path, tmp_path: Path, killed: bool
) -> None:
    snapshot, back = _stored(machines, away, was), tmp_path / "back"
    run, plan = away.begin_restore(snapshot, [back], first=FIRST)
    _fetch(run, _first(plan))
    run.finish_first()
    (back / "env/bin/serve").write_bytes(b"rebuilt")
    (back / "env/bin/serve.pyc").write_bytes(b"new")
    (back / "model/link").unlink()
    if killed:
        away.restart()
        run, plan = away.begin_restore(snapshot, [back], run.run, resume=True, first=FIRST)
    _fetch(run, _rest(plan))
    run.finish()
    (back / "pid").write_bytes(b"1")  # in a directory that has its time already
    checked = run.check(full=True)
    assert checked.differences == []
    assert sorted(checked.changed) == ["env/bin/serve", "model/link"]
    run.end()
    assert (back / "env/bin/serve").read_bytes() == b"rebuilt"
    was_rebuilt = away.snapshot([back])
    again = tmp_path / "again"
    away.restore(was_rebuilt, [again])
    assert differences(kept(back), facts(again)) == []
    assert (again / "pid").exists()
    assert not (again / "model/link").is_symlink()


def test_what_was_not_first_must_be_as_it_was(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    run, plan = woken.begin_restore(snapshot, [back], first=FIRST)
    _fetch(run, _first(plan))
    run.finish_first()
    _fetch(run, _rest(plan))
    run.finish()
    (back / "rest/3").write_bytes(b"no")
    wrong = {line.split(":")[0] for line in run.check(full=True).differences}
    assert wrong == {str(back / "rest/3")}
    run.end()
    assert woken.restore(snapshot, [back], first=FIRST).files == 43
    assert differences(kept(was), facts(back)) == []


def test_after_a_start_of_the_machine_everything_is_compared(
    machines: Machines,
    woken: Engine,
    was: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was not on the disk yet when the machine went down is not taken for a program's work."""
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    run, plan = woken.begin_restore(snapshot, [back], first=FIRST)
    _fetch(run, _first(plan))
    run.finish_first()
    os.truncate(back / "model/weights", 5)
    woken.restart()
    monkeypatch.setattr(in_use, "boot_id", lambda: "another")
    run, plan = woken.begin_restore(snapshot, [back], resume=True, first=FIRST)
    assert _first(plan) == []
    assert "model/weights" in run.finish_first().differences[0]
    run.end()
    woken.restore(snapshot, [back], first=FIRST)
    assert differences(kept(was), facts(back)) == []


def test_a_damaged_record_only_costs_another_look(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    run, plan = woken.begin_restore(snapshot, [back], first=FIRST)
    _fetch(run, _first(plan))
    run.finish_first()
    woken.restart()
    (record,) = woken.home.rglob("in-use")
    record.write_bytes(record.read_bytes()[:-3])
    woken.restore(snapshot, [back], resume=True, first=FIRST)
    assert differences(kept(was), facts(back)) == []
    assert [*woken.home.rglob("in-use")] == []


def test_files_that_were_removed_are_not_in_use(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    run, plan = woken.begin_restore(snapshot, [back], first=FIRST)
    _fetch(run, _first(plan))
    run.finish_first()
    woken.restart()
    subprocess.run(["rm", "-rf", back], check=True)
    woken.restore(snapshot, [back], first=FIRST)
    assert differences(kept(was), facts(back)) == []


# -- as the flows order it


def _restored(
    engine: Engine,
    snapshot: SnapshotId,
    back: Path,
    first: list[str],
    when_first: Callable[[], None],
    steps: list[str],
    *,
    resume: bool = False,
) -> tuple[Finished, Restoration]:
    with PlainRunner(retries=0, at_once=1, before=steps.append):
        work = Restoration(
            engine.remote_restore(snapshot, [back], first=first), "near", Phases(), resume=resume
        )
        with work.begun() as plan:
            return work.restore(plan, when_first=when_first), work


def test_the_rest_is_asked_for_before_the_first_is_there(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    steps: list[str] = []
    truth = kept(was)

    def when_first() -> None:
        steps.append("used")
        _usable(truth, back)

    finished, work = _restored(woken, snapshot, back, [*FIRST, "no such"], when_first, steps)
    assert finished.warnings == ["first: nothing in the snapshot matches 'no such'"]
    assert steps[-2:] == ["finish restore", "check restore"]
    assert steps.index("finish what comes first") < steps.index("used") < len(steps) - 2
    assert work.first is not None
    assert work.first.names == len(NAMES)
    assert 11 * MIB < work.first.bytes < 12 * MIB
    assert f"{len(NAMES)} names usable after" in work.first.words()
    assert differences(truth, facts(back)) == []


@pytest.mark.parametrize("first", [[], ["no such"]])
def test_without_an_order_it_is_used_in_the_end(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path, first: list[str]
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    steps: list[str] = []
    _, work = _restored(woken, snapshot, back, first, lambda: steps.append("used"), steps)
    assert steps[-3:] == ["finish restore", "check restore", "used"]
    assert work.first is None
    woken.restart()
    steps.clear()
    _restored(woken, snapshot, back, FIRST, lambda: steps.append("used"), steps, resume=True)
    assert steps == ["begin restore", "used"]  # complete: nothing to do


def test_what_fails_when_it_is_used_ends_the_restore(
    machines: Machines, woken: Engine, was: Path, tmp_path: Path
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"

    def fails() -> None:
        raise InvalidInput("the server does not start")

    with pytest.raises(InvalidInput, match="does not start"):
        _restored(woken, snapshot, back, FIRST, fails, [])
    woken.restart()
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        woken.begin([back])
    finished, _ = _restored(woken, snapshot, back, FIRST, lambda: None, [], resume=True)
    assert finished.warnings == []
    assert differences(kept(was), facts(back)) == []


@pytest.mark.parametrize(
    ("meddle", "found", "used"),
    [
        (lambda fd: os.ftruncate(fd, 7 * MIB), "has 7340032 bytes", False),
        (lambda fd: os.pwrite(fd, b"!", 7 * MIB), "content differs", True),
    ],
    ids=["size", "content"],
)
def test_a_first_that_is_not_right_is_found(
    machines: Machines,
    woken: Engine,
    was: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meddle: Callable[[int], object],
    found: str,
    used: bool,
) -> None:
    """A wrong size before it is used. A wrong content in the end: the program on it runs already,
    and the machine is not handed over."""
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    finish_first, steps = RemoteRestore.finish_first, list[str]()

    def meddled(self: RemoteRestore) -> object:
        (weights,) = (p for p in back.glob(".torpor-*/*") if p.stat().st_size == 9 * MIB + 5)
        fd = os.open(weights, os.O_WRONLY)
        meddle(fd)
        os.close(fd)
        return finish_first(self)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteRestore, "finish_first", meddled)
        with pytest.raises(SnapshotDamaged, match=f"model/weights: {found}"):
            _restored(woken, snapshot, back, FIRST, lambda: steps.append("used"), steps)
    assert ("used" in steps) == used
    _restored(woken, snapshot, back, FIRST, lambda: None, steps, resume=True)
    assert differences(kept(was), facts(back)) == []


def test_what_changes_while_it_is_compared_is_a_program_s_work(
    machines: Machines,
    woken: Engine,
    was: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot, back = _stored(machines, woken, was), tmp_path / "back"
    inner = compare_module.right_extents

    def writes(fd: int, entry: Entry, *rest: Any) -> set[int]:
        if entry.path == b"model/weights":
            os.truncate(back / "model/weights", 3)
        return inner(fd, entry, *rest)

    monkeypatch.setattr(compare_module, "right_extents", writes)
    finished, _ = _restored(woken, snapshot, back, FIRST, lambda: None, [])
    assert finished.warnings == ["'model/weights' was used and changed before the rest was there"]
    assert (back / "model/weights").stat().st_size == 3


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_refused_whatever_comes_first(engine: Engine, tmp_path: Path, lie: Lie) -> None:
    blob, _ = encode_manifest(lie.make(), PLAIN)
    put_manifest(engine, blob)
    targets = [tmp_path / "t" / str(number) for number, _ in enumerate(lie.make().roots)]
    (snapshot,) = engine.snapshots()
    with pytest.raises(ManifestInvalid, match="nothing was written"):
        engine.begin_restore(snapshot, targets, first=["*", "d/*", "../x"])
    assert not (tmp_path / "t").exists()
