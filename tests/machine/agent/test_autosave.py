"""Scheduled saves: what each of them reads and stores, and what it gives way to."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.own_saves import book_of, rescued, stored
from tests.fixtures.snapshots import packs_of
from tests.fixtures.trees import content, let_settle
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.safety import check_whole, verify_snapshot
from torpor.machine.pipeline import upload
from torpor.machine.sampler.save_lock import end_save, is_saving, saving
from torpor.machine.supervisor.saves import RESERVE, Rescued, RescueSaves, SaveDue, SaveRequest
from torpor.machine.supervisor.schedule import (
    CLOCK_REST,
    MOST_CORES,
    REST,
    SaveSchedule,
    usable_cores,
)
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.job import OwnSave

DUE = SaveDue(0.0)


class Saver:
    """A machine that saves its workspace ``was`` on one book, save after save."""

    def __init__(self, engine: Engine, was: Path) -> None:
        self.engine, self.was = engine, was
        self.basis = engine.snapshot([was])
        self.renew(self.basis)

    def renew(self, basis: SnapshotId) -> None:
        book = book_of(self.engine, self.was, basis, quiesce=["false"])
        self.book, self.given_unix = msgspec.structs.replace(book, job=""), time.time()
        self.made: list[str] = []

    def due(self) -> Rescued:
        """One save, as the supervisor would order it."""
        book = msgspec.structs.replace(self.book, saves=self.book.saves[:1], save_argv=[])
        done = rescued(
            self.engine,
            book,
            given_unix=self.given_unix,
            left_s=None,
            made=self.made,
            scheduled=True,
        )
        if done.saved:
            self.made.append(done.saved.root)
            self.book = msgspec.structs.replace(
                self.book, saves=self.book.saves[1:], packs=self.book.packs[done.packs or 0 :]
            )
        return done

    def saved(self) -> OwnSave:
        done = self.due()
        assert done.error == "" and done.saved is not None
        return done.saved

    def write(self, name: str, seed: int) -> None:
        (self.was / name).write_bytes(content(seed, 3 * MIB))
        let_settle()


@pytest.fixture
def saver(engine: Engine, was: Path) -> Saver:
    return Saver(engine, was)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files whose content is read, each time that it is."""
    found: list[bytes] = []
    read_at = upload.read_at

    def noted(root: bytes, path: bytes, *rest: Any) -> Any:
        found.append(path)
        return read_at(root, path, *rest)

    monkeypatch.setattr(upload, "read_at", noted)
    return found


@pytest.mark.rule(13)
def test_an_unchanged_workspace_writes_no_object(saver: Saver) -> None:
    before = [found.key for found in saver.engine.store.list("")]
    for _ in range(2):
        done = saver.due()
        assert (done.saved, done.error, done.unchanged, done.unsent) == (None, "", True, True)
        assert done.packs == 0
    assert [found.key for found in saver.engine.store.list("")] == before
    saver.write("new", 1)
    saver.saved()
    before = [found.key for found in saver.engine.store.list("")]
    (saver.was / "new").touch()
    os.utime(saver.was / "new", ns=(1, 1))
    assert saver.due().saved is not None  # its time is part of the workspace
    assert len(list(saver.engine.store.list(""))) == len(before) + 1  # and its content is there


@pytest.mark.rule(13)
@pytest.mark.parametrize("renewed", [False, True], ids=["same book", "next book"])
def test_a_later_save_reads_and_stores_only_what_came_since(
    saver: Saver, reads: list[bytes], renewed: bool
) -> None:
    saver.write("first", 1)
    first = saver.saved()
    before, reads[:] = packs_of(saver.engine), []
    saver.write("second", 2)
    if renewed:
        saver.renew(first.snapshot)
    second = saver.saved()
    assert set(reads) == {b"second"}
    assert len(packs_of(saver.engine) - before) == 1
    found = stored(saver.engine, second)
    manifest = verify_snapshot(saver.engine.store, found, saver.engine.seal).manifest
    assert manifest.parent == first.snapshot
    assert {b"first", b"second"} <= {entry.path for entry in manifest.entries}


def test_a_hibernation_goes_on_from_an_own_save_and_still_names_what_vanished(
    saver: Saver, reads: list[bytes]
) -> None:
    for number in range(10):
        (saver.was / "d" / f"kept{number}").write_bytes(bytes([number]) * 5000)
    let_settle()
    saver.engine.snapshot([saver.was])
    saver.write("first", 1)
    for path in (saver.was / "d").iterdir():
        path.unlink()
    (saver.was / "d").rmdir()
    own, reads[:] = saver.saved(), []
    run = saver.engine.begin([saver.was])
    seen = run.store(1)
    run.end(committed=False)
    assert (reads, seen.new_bytes) == ([], 0)
    assert seen.missed.vanished
    assert check_whole(saver.engine.store, stored(saver.engine, own), saver.engine.seal)


@pytest.mark.rule(13)
def test_a_run_that_holds_the_workspace_is_left_alone(saver: Saver) -> None:
    run = saver.engine.begin([saver.was])
    done = saver.due()
    assert (done.saved, done.error, done.gave_way, done.unsent) == (None, "", True, True)
    run.end(committed=False)


def test_grants_that_were_not_used_are_used_later(saver: Saver, tmp_path: Path) -> None:
    heard, answer = tmp_path / "heard", tmp_path / "answer"
    answer.write_bytes(msgspec.json.encode(Rescued(None, unchanged=True, unsent=True, packs=1)))
    saves = RescueSaves(["sh", "-c", f"cat > {heard}; cat {answer}"])
    saves.stand_by(saver.book)
    for number in range(3):
        assert saves.save(DUE).unchanged
        orders = msgspec.json.decode(heard.read_bytes(), type=SaveRequest)
        assert orders.book.saves == saver.book.saves[:1]
        assert orders.book.packs[0] == saver.book.packs[number]
        assert (orders.scheduled, orders.book.save_argv) == (True, [])
        assert len(orders.book.packs) == len(saver.book.packs) - number - RESERVE
    assert saves.left == len(saver.book.saves)


def test_saves_are_as_seldom_as_their_cost_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [1000.0], [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        resource, "getrusage", lambda who: SimpleNamespace(ru_utime=used[0], ru_stime=0.0)
    )
    schedule = SaveSchedule(60.0, cores=4.0)
    assert schedule.wait_s == 60.0
    for took_s, sent_s, cpu_s, wait_s in (
        (0.5, 0.1, 1.0, 60.0),
        (3.0, 2.0, 1.0, 2 * REST),
        (3.0, 9.0, 1.0, 3 * REST),  # it was not sending for longer than it lived
        (3.0, None, 1.0, 3 * REST),
        (3.0, 0.0, 16.0, 4 * REST),
        (30.0, 0.0, 1.0, 30 * CLOCK_REST),
    ):
        clock[0] += schedule.wait_s
        schedule.begin()
        clock[0] += took_s
        used[0] += cpu_s
        schedule.end(sent_s)
        assert schedule.wait_s == pytest.approx(wait_s - took_s)
    schedule.end(99.0)  # of a save after a notice
    assert schedule.wait_s == pytest.approx(30 * CLOCK_REST - 30.0)
    clock[0] += 60.0
    schedule.rest_no_longer()  # what it failed for is mended
    assert schedule.wait_s == 0.0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_may_use_fewer_cores_than_it_sees(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (cores or min(MOST_CORES, len(os.sched_getaffinity(0))))


def test_a_save_under_way_is_seen_and_ended(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "from torpor.machine.sampler.save_lock import saving\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with saving(pathlib.Path(sys.argv[1]), 'demo'):\n"
        "    time.sleep(600)\n"
    )
    assert not is_saving(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
        until(lambda: is_saving(tmp_path), "it saves")
        end_save(tmp_path, "another")
        assert is_saving(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torpor.machine.sampler.save_lock.ENDS_S", 0.1)
            end_save(tmp_path, WORKSPACE)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not is_saving(tmp_path)
    with saving(tmp_path, WORKSPACE):
        assert is_saving(tmp_path)


def test_a_process_with_the_number_of_an_earlier_save_is_not_ended(tmp_path: Path) -> None:
    """The lock is held, and what the file says is still of the save before."""
    code = (
        "import pathlib, sys, time\n"
        "from torpor.machine.sampler.save_lock import saving\n"
        "with saving(pathlib.Path(sys.argv[1]), 'demo'):\n"
        "    sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as earlier:
        until(lambda: is_saving(tmp_path), "it saves")
        pid = str(earlier.pid)
    said = (tmp_path / "saving").read_text()
    with (
        subprocess.Popen(["sleep", "600"]) as users,
        (tmp_path / "saving").open("r+") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(said.replace(pid, str(users.pid), 1))
        file.flush()
        patch.setattr("torpor.machine.sampler.save_lock.ENDS_S", 0.1)
        end_save(tmp_path, WORKSPACE)
        assert users.poll() is None
        users.kill()
