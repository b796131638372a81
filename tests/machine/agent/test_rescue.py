"""A machine that saves itself: what it stores, what it waits for, and what it never repeats."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.contest import HOUR_S
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.own_saves import LEFT_S, book_of, rescued, saved, stored
from tests.fixtures.snapshots import Machines
from tests.fixtures.trees import content, let_settle
from tests.fixtures.waiting import until
from torpor.control.safety import verify_snapshot
from torpor.control.store.snapshots import find_snapshot, open_manifest
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.agent.rescue import Rescue
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.supervisor.saves import Orders, Rescued, RescueSaves
from torpor.shared.errors import GrantExpired, StoreUnavailable, WorkspaceBusy, WorkspaceInvalid
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import MIB, ObjectKey, SnapshotId
from torpor.shared.wire.job import Notice, StandBy

RESCUE = [sys.executable, "-m", "torpor.machine.agent", "rescue", "--home"]
SIGNAL = Notice("signal", "the machine shuts down", 0.0)


@pytest.fixture
def basis(engine: Engine, was: Path) -> SnapshotId:
    return engine.snapshot([was])


def packs(engine: Engine) -> set[ObjectKey]:
    return {found.key for found in engine.store.list(packs_prefix(WORKSPACE))}


def change(root: Path, seed: int = 9, size: int = 3 * MIB) -> bytes:
    new = content(seed, size)
    (root / "d/checkpoint").write_bytes(new)
    let_settle()
    return new


def test_what_is_new_is_stored_and_the_rest_is_referred_to(
    engine: Engine, was: Path, basis: SnapshotId, tmp_path: Path
) -> None:
    before = packs(engine)
    new = change(was)
    book = book_of(engine, was, basis)
    save = saved(engine, book)
    assert save.snapshot == book.saves[0].snapshot
    assert len(packs(engine) - before) == 1
    manifest = verify_snapshot(engine.store, stored(engine, save), engine.seal).manifest
    assert (manifest.parent, manifest.statistics["own_save"]) == (basis, 1)
    engine.restore(save.snapshot, [tmp_path / "back"])
    assert (tmp_path / "back/d/checkpoint").read_bytes() == new
    assert (tmp_path / "back/big").read_bytes() == (was / "big").read_bytes()


def test_a_file_that_grows_is_saved_as_far_as_it_was_read(
    engine: Engine, was: Path, basis: SnapshotId, tmp_path: Path
) -> None:
    line = b"one more line of the log\n"
    over = threading.Event()

    def grow() -> None:
        with (was / "log").open("ab", buffering=0) as log:
            while not over.is_set():
                log.write(line)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        until(lambda: (was / "log").exists() and (was / "log").stat().st_size, "it writes")
        save = saved(engine, book_of(engine, was, basis))
    finally:
        over.set()
        writer.join()
    manifest, _ = open_manifest(engine.store, WORKSPACE, save.snapshot, engine.seal)
    assert 1 < manifest.statistics["passes"] <= 3
    engine.restore(save.snapshot, [tmp_path / "back"])
    grown = (tmp_path / "back/log").read_bytes()
    assert grown[: len(line)] == line
    assert (was / "log").read_bytes().startswith(grown)


def test_the_save_command_runs_before_the_files_are_read(
    engine: Engine, was: Path, basis: SnapshotId, tmp_path: Path
) -> None:
    argv = ["sh", "-c", f"echo state > {was}/state"]
    save = saved(engine, book_of(engine, was, basis, quiesce=argv))
    engine.restore(save.snapshot, [tmp_path / "back"])
    assert (tmp_path / "back/state").read_text() == "state\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sh", "-c", "echo no room; exit 4"], "the save command 'sh' ended with status 4"),
        (["sleep", "600"], "the save command 'sleep' took longer than 1 s"),
    ],
)
def test_a_save_command_that_fails_is_named_and_stops_nothing(
    engine: Engine, was: Path, basis: SnapshotId, argv: list[str], words: str
) -> None:
    change(was)
    said: list[str] = []
    book = book_of(engine, was, basis, quiesce=argv)
    done = rescued(engine, book, left_s=2.0, said=said)
    assert done.error.startswith(words)
    assert said == [done.error]
    assert done.saved is not None
    verify_snapshot(engine.store, stored(engine, done.saved), engine.seal)


def test_packs_that_must_not_be_named_are_stored_again(
    engine: Engine, was: Path, basis: SnapshotId
) -> None:
    before = packs(engine)
    book = book_of(engine, was, basis)
    change(was)
    save = saved(engine, msgspec.structs.replace(book, lost=sorted(before)))
    engine.store.delete(before)
    verify_snapshot(engine.store, stored(engine, save), engine.seal)


def half_done(engine: Engine, was: Path) -> set[ObjectKey]:
    """What a run has stored whose control side was lost before its commit."""
    before = packs(engine)
    run = engine.begin([was])
    for plan in run.scan(1).parts:
        run.store_part(1, plan)
    run.end(committed=False)
    return packs(engine) - before


def test_what_a_lost_run_has_stored_since_is_used(
    engine: Engine, was: Path, basis: SnapshotId
) -> None:
    book, given_unix = book_of(engine, was, basis), time.time()
    change(was)
    half = half_done(engine, was)
    assert half
    before = packs(engine)
    save = saved(engine, book, given_unix=given_unix)
    assert packs(engine) == before
    verify_snapshot(engine.store, stored(engine, save), engine.seal)


def test_what_a_run_stored_before_the_book_is_not_used(
    engine: Engine, was: Path, basis: SnapshotId
) -> None:
    """Prune may have marked or deleted it before the marks were read."""
    change(was)
    half = half_done(engine, was)
    save = saved(engine, book_of(engine, was, basis))
    engine.store.delete(half)
    verify_snapshot(engine.store, stored(engine, save), engine.seal)


def test_a_run_that_holds_the_workspace_is_waited_for(
    engine: Engine, was: Path, basis: SnapshotId
) -> None:
    run = engine.begin([was])
    release = threading.Timer(0.5, lambda: run.end(committed=False))
    release.start()
    save = saved(engine, book_of(engine, was, basis), left_s=None)
    release.join()
    verify_snapshot(engine.store, stored(engine, save), engine.seal)


def test_a_workspace_that_stays_held_is_an_error(
    engine: Engine, was: Path, basis: SnapshotId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By something else than the agent, which would have been ended."""
    monkeypatch.setattr("torpor.machine.agent.rescue.ENDS_S", 0.1)
    held = WorkspaceState(engine.home, WORKSPACE)
    held.lock()
    with pytest.raises(WorkspaceBusy):
        rescued(engine, book_of(engine, was, basis), left_s=0.0)
    held.unlock()


def test_half_a_workspace_is_not_saved(engine: Engine, was: Path, basis: SnapshotId) -> None:
    WorkspaceState(engine.home, WORKSPACE).restore_journal.write_bytes(b"")
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        rescued(engine, book_of(engine, was, basis))
    WorkspaceState(engine.home, WORKSPACE).lock()  # it was given back


def test_a_store_that_is_away_is_tried_again(
    engine: Engine,
    was: Path,
    basis: SnapshotId,
    memory_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torpor.shared.transfer.retries.FIRST_WAIT_S", 0.01)
    change(was)
    book = book_of(engine, was, basis)
    memory_store.fails = StoreUnavailable("away")
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        memory_store.fails = None

    orders = Orders(book, time.time(), LEFT_S)
    done = Rescue(engine.home, orders, say).run()
    assert [words[:10] for words in said] == ["once more:"]
    assert done.saved is not None
    verify_snapshot(engine.store, stored(engine, done.saved), engine.seal)


def test_grants_that_have_ended_are_an_error(
    engine: Engine, was: Path, basis: SnapshotId, memory_store: MemoryStore
) -> None:
    change(was)
    book = book_of(engine, was, basis)
    ended = [memory_store.grant("PUT", one.key, expires_s=1) for one in book.packs]
    until(lambda: time.time() > ended[-1].expires_unix + 1, "the grants have ended")
    with pytest.raises(GrantExpired, match="has not been there for an hour"):
        rescued(engine, msgspec.structs.replace(book, packs=ended))
    assert engine.snapshots() == [basis]


def test_a_workspace_beyond_its_grants_is_an_error(
    engine: Engine, was: Path, basis: SnapshotId
) -> None:
    change(was)
    book = msgspec.structs.replace(book_of(engine, was, basis), packs=[])
    with pytest.raises(GrantExpired, match="more packs than it has grants for"):
        rescued(engine, book)


# -- the process


def process_saves(home: Path) -> RescueSaves:
    return RescueSaves([*RESCUE, str(home)])


@pytest.mark.parametrize("store_key", [None, bytes(range(32))])
def test_the_process_leaves_neither_key_nor_grants_behind(
    machines: Machines,
    memory_store: MemoryStore,
    was: Path,
    tmp_path: Path,
    store_key: bytes | None,
) -> None:
    engine = machines(memory_store, tmp_path / "home", store_key)
    basis = engine.snapshot([was])
    new = change(was)
    book = book_of(engine, was, basis, quiesce=["sh", "-c", "exit 3"])
    saves = process_saves(engine.home)
    saves.stand_by(book)
    done = saves.save(SIGNAL)
    assert "ended with status 3" in done.error
    assert done.saved is not None
    verify_snapshot(engine.store, stored(engine, done.saved), engine.seal)
    engine.restore(done.saved.snapshot, [tmp_path / "back"])
    assert (tmp_path / "back/d/checkpoint").read_bytes() == new
    memory_store.fails = StoreUnavailable("away")
    broken = msgspec.structs.replace(book, saves=book.saves[1:], roots=["/none/such"])
    saves.stand_by(broken)
    failed = saves.save(SIGNAL)
    assert failed.saved is None
    assert "/none/such" in failed.error
    assert f"own save: {done.saved.snapshot}" in (engine.home / LOG_FILE).read_text()
    assert_hidden(engine.home, book)
    assert_hidden_in(f"{done} {failed} {book!r} {Orders(book, 0.0, None)!r}", book)


def secrets_of(book: StandBy) -> list[str]:
    grants = [*(one.grant for one in book.saves), *book.packs, *(one.grant for one in book.known)]
    signatures = [one.url.split("Signature=")[1] for one in grants]
    return signatures + ([book.key] if book.key else [])


def assert_hidden_in(text: str, book: StandBy) -> None:
    assert not [one for one in secrets_of(book) if one in text]


def assert_hidden(folder: Path, book: StandBy) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        held = path.read_bytes()
        for secret in secrets_of(book):
            assert secret.encode() not in held, path
        if book.key:
            assert bytes.fromhex(book.key) not in held, path


def test_each_grant_is_handed_out_once(engine: Engine, was: Path, basis: SnapshotId) -> None:
    book = book_of(engine, was, basis)
    saves = process_saves(engine.home)
    saves.stand_by(book)
    for number, one in enumerate(book.saves):
        change(was, number)
        done = saves.save(SIGNAL)
        assert (done.saved and done.saved.snapshot, done.error) == (one.snapshot, "")
    used = packs(engine) & {grant.key for grant in book.packs}
    assert len(used) == len(book.saves)  # the second one did not overwrite the pack of the first
    for snapshot in engine.snapshots():
        verify_snapshot(engine.store, find_snapshot(engine.store, WORKSPACE, snapshot), engine.seal)
    assert saves.save(SIGNAL) == Rescued(
        None,
        "the machine cannot save by itself: the control side has handed over no grants for it, or "
        "all of them are used",
    )
    saves.stand_by(book_of(engine, was, basis))  # the next book
    assert saves.save(SIGNAL).saved is not None


def echoing(tmp_path: Path, line: str) -> tuple[list[str], Path]:
    """A program that keeps what it reads and prints ``line``."""
    heard = tmp_path / "heard"
    return ["sh", "-c", f"cat > {heard}; printf '%s\\n' '{line}'"], heard


@pytest.mark.parametrize(
    ("notice", "left_s"),
    [
        (Notice("aws-spot", "", 1000.0, 1120.0), 120.0),
        (Notice("aws-spot", "", 1000.0), 30.0),
        (Notice("aws-rebalance", "", 1000.0), None),
        (Notice("azure", "", 1000.0, 1900.0), 900.0),
        (Notice("azure", "", 1000.0, 990.0), 0.0),
        (Notice("aws-spot", "", 1000.0, 1120.0 + HOUR_S), 30.0),  # this machine's clock is wrong
        (Notice("azure", "", 1000.0, 1900.0 - HOUR_S), 30.0),
    ],
)
def test_the_process_learns_how_long_the_machine_lives(
    engine: Engine, was: Path, tmp_path: Path, notice: Notice, left_s: float | None
) -> None:
    start, heard = echoing(tmp_path, "nonsense")
    saves = RescueSaves(start, now=lambda: 1000.0)
    book = book_of(engine, was, None)
    saves.stand_by(book)
    assert "did not say what it did" in saves.save(notice).error
    orders = msgspec.convert(json.loads(heard.read_bytes()), Orders)
    assert (orders.given_unix, orders.left_s) == (1000.0, left_s)
    assert orders.book.saves == book.saves[:1]
    assert orders.book.packs == book.packs[: len(book.packs) // 2]


def test_a_process_that_cannot_start_is_an_error(engine: Engine, was: Path) -> None:
    saves = RescueSaves(["/none/such"])
    saves.stand_by(book_of(engine, was, None))
    assert "could not be started" in saves.save(SIGNAL).error


def test_orders_that_cannot_be_read_are_not_repeated(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RESCUE, str(tmp_path)], input=b'{"book": "secret"}', capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"cannot be read" in done.stdout
    assert b"secret" not in done.stdout + done.stderr + (tmp_path / LOG_FILE).read_bytes()
