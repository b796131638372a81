"""A machine that saves itself: what it stores, what it waits for, and what it never repeats."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.fixtures.contested_store import HOUR_S
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.own_saves import LEFT_S, book_of, rescued, saved, stored
from tests.fixtures.snapshots import Machines, packs_of, scan_and_store
from tests.fixtures.trees import content, let_settle
from tests.fixtures.waiting import until
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import find_snapshot, open_manifest
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.agent.rescue import Rescue
from torpor.machine.agent.resume import Resumption
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.supervisor.saves import Rescued, RescueSaves, SaveDue, SaveRequest
from torpor.shared.errors import GrantExpired, StoreUnavailable, WorkspaceBusy, WorkspaceInvalid
from torpor.shared.format.manifest import Manifest
from torpor.shared.format.names import pack_key
from torpor.shared.values import MIB, ObjectKey
from torpor.shared.wire.autosave import Book
from torpor.shared.wire.job import Notice, OwnSave

RESCUE = [sys.executable, "-m", "torpor.machine.agent", "rescue", "--home"]
SIGNAL = Notice("signal", "the machine shuts down", 0.0)


class Saver:
    """A machine that saves its workspace ``was`` by itself, on the basis of a snapshot."""

    def __init__(self, engine: Engine, was: Path) -> None:
        self.engine, self.was = engine, was
        self.state = WorkspaceState(engine.home, WORKSPACE)
        self.basis = engine.snapshot([was])

    def book(self, **spec: Any) -> Book:
        return book_of(self.engine, self.was, self.basis, **spec)

    def saved(self, book: Book | None = None, **more: Any) -> OwnSave:
        return saved(self.engine, book or self.book(), **more)

    def rescued(self, book: Book, **more: Any) -> Rescued:
        return rescued(self.engine, book, **more)

    def whole(self, save: OwnSave | None) -> Manifest:
        assert save is not None
        found = stored(self.engine, save)
        return verify_snapshot(self.engine.store, found, self.engine.seal).manifest

    def restored(self, save: OwnSave) -> Path:
        back = self.was.with_name("back")
        self.engine.restore(save.snapshot, [back])
        return back

    def change(self, seed: int = 9) -> bytes:
        new = content(seed, 3 * MIB)
        (self.was / "d/checkpoint").write_bytes(new)
        let_settle()
        return new

    def half_done(self) -> set[ObjectKey]:
        """What a run has stored whose control side was lost before its commit."""
        self.change()
        before = packs_of(self.engine)
        run = self.engine.begin([self.was])
        scan_and_store(run)
        run.end(committed=False)
        return packs_of(self.engine) - before


@pytest.fixture
def saver(engine: Engine, was: Path) -> Saver:
    return Saver(engine, was)


def test_what_is_new_is_stored_and_the_rest_is_referred_to(saver: Saver) -> None:
    before, new, book = packs_of(saver.engine), saver.change(), saver.book()
    save = saver.saved(book)
    assert save.snapshot == book.saves[0].snapshot
    assert len(packs_of(saver.engine) - before) == 1
    manifest = saver.whole(save)
    assert (manifest.parent, manifest.statistics["own_save"]) == (saver.basis, 1)
    back = saver.restored(save)
    assert (back / "d/checkpoint").read_bytes() == new
    assert (back / "big").read_bytes() == (saver.was / "big").read_bytes()


def test_a_file_that_grows_is_saved_as_far_as_it_was_read(saver: Saver) -> None:
    line, log = b"one more line of the log\n", saver.was / "log"
    over = threading.Event()

    def grow() -> None:
        with log.open("ab", buffering=0) as file:
            while not over.is_set():
                file.write(line)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        until(lambda: log.exists() and log.stat().st_size, "it writes")
        save = saver.saved()
    finally:
        over.set()
        writer.join()
    manifest, _ = open_manifest(saver.engine.store, WORKSPACE, save.snapshot, saver.engine.seal)
    assert 1 < manifest.statistics["passes"] <= 3
    grown = (saver.restored(save) / "log").read_bytes()
    assert grown[: len(line)] == line
    assert log.read_bytes().startswith(grown)


def test_the_save_command_runs_before_the_files_are_read(saver: Saver) -> None:
    argv = ["sh", "-c", f"echo state > {saver.was}/state"]
    save = saver.saved(saver.book(quiesce=argv))
    assert (saver.restored(save) / "state").read_text() == "state\n"


@pytest.mark.parametrize(
    ("argv", "left_s", "words"),
    [
        (["sh", "-c", "echo no room; exit 4"], LEFT_S, "the save command 'sh' ended with status 4"),
        (["sleep", "600"], 2.0, "the save command 'sleep' took longer than [01] s"),
    ],
)
def test_a_save_command_that_fails_is_named_and_stops_nothing(
    saver: Saver, argv: list[str], left_s: float, words: str
) -> None:
    saver.change()
    said: list[str] = []
    done = saver.rescued(saver.book(quiesce=argv), left_s=left_s, said=said)
    assert re.match(words, done.error)
    assert said == [done.error]
    saver.whole(done.saved)


def test_packs_that_must_not_be_named_are_stored_again(saver: Saver) -> None:
    before, book = packs_of(saver.engine), saver.book()
    saver.change()
    save = saver.saved(msgspec.structs.replace(book, unusable=sorted(before)))
    saver.engine.store.delete(before)
    saver.whole(save)


def test_what_a_lost_run_has_stored_since_is_used(saver: Saver) -> None:
    book, given_unix = saver.book(), time.time()
    assert saver.half_done()
    before = packs_of(saver.engine)
    save = saver.saved(book, given_unix=given_unix)
    assert packs_of(saver.engine) == before
    saver.whole(save)


@pytest.mark.rule(13)
def test_what_a_run_stored_before_the_book_is_used_only_if_the_book_names_it(saver: Saver) -> None:
    """Prune may have marked or deleted it before the marks were read."""
    half = saver.half_done()
    book = saver.book()
    assert set(book.young) == half
    save = saver.saved(msgspec.structs.replace(book, young=[]))
    saver.engine.store.delete(half)
    saver.whole(save)


def test_a_save_that_its_grants_do_not_suffice_for_goes_on_with_the_next_book(
    saver: Saver,
) -> None:
    """Or a workspace of more than 64 GiB would never be saved."""
    for number in range(4):
        (saver.was / f"d/{number}").write_bytes(content(20 + number, 40 * MIB))
    let_settle()
    before, book = packs_of(saver.engine), saver.book()
    done = saver.rescued(msgspec.structs.replace(book, packs=book.packs[:1]))
    assert (done.saved, done.packs) == (None, 1)
    assert done.error.endswith("The next save goes on with what this one has stored")
    first = packs_of(saver.engine) - before
    assert len(first) == 1
    manifest = saver.whole(saver.saved())
    assert {pack_key(WORKSPACE, pack.id) for pack in manifest.packs} >= first


def test_a_run_that_holds_the_workspace_is_waited_for(saver: Saver) -> None:
    run = saver.engine.begin([saver.was])
    release = threading.Timer(0.5, lambda: run.end(committed=False))
    release.start()
    save = saver.saved(left_s=None)
    release.join()
    saver.whole(save)


def test_a_workspace_that_stays_held_is_an_error(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By something else than the agent, which would have been ended."""
    monkeypatch.setattr("torpor.machine.agent.rescue.ENDS_S", 0.1)
    saver.state.lock()
    with pytest.raises(WorkspaceBusy):
        saver.rescued(saver.book(), left_s=0.0)
    saver.state.unlock()


@pytest.mark.rule(16)
def test_half_a_workspace_is_not_saved(saver: Saver) -> None:
    saver.state.restore_journal.write_bytes(b"")
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        saver.rescued(saver.book())
    saver.state.lock()  # it was given back


def test_a_store_that_is_away_is_tried_again(
    saver: Saver, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.shared.transfer.retries.FIRST_WAIT_S", 0.01)
    saver.change()
    orders = SaveRequest(saver.book(), time.time(), LEFT_S)
    memory_store.fails = StoreUnavailable("away")
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        memory_store.fails = None

    done = Rescue(saver.engine.home, orders, say).run()
    assert [words[:10] for words in said] == ["once more:"]
    saver.whole(done.saved)


def test_grants_that_have_ended_or_are_too_few_are_an_error(saver: Saver) -> None:
    saver.change()
    book = saver.book()
    ended = [saver.engine.store.grant("PUT", grant.key, expires_s=1) for grant in book.packs]
    until(lambda: time.time() > ended[-1].expires_unix + 1, "the grants have ended")
    for packs, says in (
        (ended, "has not been there for 12 h"),
        ([], "more packs than it has grants for"),
    ):
        with pytest.raises(GrantExpired, match=says):
            saver.rescued(msgspec.structs.replace(book, packs=packs))
    assert saver.engine.snapshots() == [saver.basis]


# -- who pauses the user's program owes that it goes on


def test_what_the_save_command_paused_goes_on_after_the_save(saver: Saver) -> None:
    """The market may withdraw its notice."""
    pauses = Pauses(saver)
    saver.saved(pauses.book())
    assert pauses.said == ["paused", "resumed"]
    saver.change()
    with pytest.raises(GrantExpired):
        saver.rescued(msgspec.structs.replace(pauses.book(), packs=[]))
    assert pauses.said == ["paused", "resumed"] * 2
    saver.state.restore_journal.write_bytes(b"")
    with pytest.raises(WorkspaceInvalid, match="only half restored"):
        saver.rescued(pauses.book())
    assert pauses.said == ["paused", "resumed"] * 3
    assert not pauses.record.exists()


def test_a_save_of_a_job_with_a_save_command_of_its_own_resumes_nothing(saver: Saver) -> None:
    pauses = Pauses(saver)
    saver.saved(pauses.book(resume=[]))
    assert pauses.said == ["paused"]
    assert saver.book(resume=["true"]).resume_argv == []  # nothing is paused


@pytest.mark.usefixtures("needs_server")
def test_the_next_save_resumes_what_a_killed_one_paused(saver: Saver) -> None:
    pauses = Pauses(saver)
    pauses.save_is_killed()
    assert pauses.said == ["paused"]
    scheduled = saver.rescued(saver.book(), left_s=None, scheduled=True)
    assert (scheduled.error, pauses.said) == ("", ["paused"])  # its own process would be slow
    saver.saved(saver.book())
    assert pauses.said == ["paused", "resumed"]


def test_while_the_resume_command_of_an_earlier_run_is_at_work_nothing_is_paused(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.machine.agent.resume.WAIT_S", 0.0)
    pauses = Pauses(saver)
    at_work = Resumption(saver.state.folder)
    at_work.add_pending(["true"], 10.0)
    saver.change()
    done = saver.rescued(pauses.book())
    assert done.error.startswith("the save command did not run: the resume command of an earlier")
    assert pauses.said == []
    saver.whole(done.saved)
    at_work.settle()


class Pauses:
    """What the user's commands did to the user's program."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._said = saver.was.with_name("said")
        self.record = saver.state.folder / "resume"

    def book(self, more: str = "", **spec: Any) -> Book:
        quiesce = f"echo paused >> {self._said}{more}"
        resume = f"echo resumed >> {self._said}"
        commands = {"quiesce": ["sh", "-c", quiesce], "resume": ["sh", "-c", resume]}
        return self._saver.book(**{**commands, **spec})

    @property
    def said(self) -> list[str]:
        return self._said.read_text().split() if self._said.exists() else []

    def waiting(self) -> list[psutil.Process]:
        """The processes that wait to resume it."""
        folder = json.dumps(str(self.record.parent))
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(folder in argument for argument in process.info["cmdline"] or ())
        ]

    def save_is_killed(self) -> None:
        """The saving process gets SIGKILL when the save command has run."""
        saves = process_saves(self._saver.engine.home)
        saves.stand_by(self.book("; kill -KILL $PPID"))
        assert "ended with status -9" in saves.save(SIGNAL).error


# -- the process


@pytest.mark.usefixtures("needs_server")
def test_a_save_whose_process_gets_sigterm_resumes_what_it_paused(saver: Saver) -> None:
    pauses = Pauses(saver)
    saves = process_saves(saver.engine.home)
    saves.stand_by(pauses.book("; kill -TERM $PPID"))
    saver.change()
    saver.whole(saves.save(SIGNAL).saved)
    assert pauses.said == ["paused", "resumed"]


@pytest.mark.usefixtures("needs_server")
def test_a_scheduled_save_starts_the_process_that_resumes_what_a_killed_one_paused(
    saver: Saver,
) -> None:
    """The process that waited beside the killed save was killed, too."""
    pauses = Pauses(saver)
    pauses.save_is_killed()
    (killed,) = pauses.waiting()
    killed.kill()
    killed.wait()
    saves = process_saves(saver.engine.home)
    saves.stand_by(saver.book())
    assert saves.save(SaveDue(0.0)).error == ""
    (waiting,) = pauses.waiting()
    waiting.kill()  # it would wait for a minute


@pytest.mark.usefixtures("needs_server")
def test_what_the_users_commands_start_heeds_sigterm(saver: Saver, tmp_path: Path) -> None:
    """The saving process itself does not."""
    saves = process_saves(saver.engine.home)
    status = tmp_path / "status"
    saves.stand_by(saver.book(quiesce=["sh", "-c", f"grep SigIgn /proc/self/status > {status}"]))
    assert saves.save(SIGNAL).error == ""
    ignored = int(status.read_text().split()[1], 16)
    assert ignored & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGHUP - 1)) == 0


def process_saves(home: Path) -> RescueSaves:
    return RescueSaves([*RESCUE, str(home)])


@pytest.mark.rule(9)
@pytest.mark.usefixtures("needs_server")
@pytest.mark.parametrize("store_key", [None, bytes(range(32))])
def test_the_process_leaves_neither_key_nor_grants_behind(
    machines: Machines,
    memory_store: MemoryStore,
    was: Path,
    tmp_path: Path,
    store_key: bytes | None,
) -> None:
    saver = Saver(machines(memory_store, tmp_path / "home", store_key), was)
    new, home = saver.change(), saver.engine.home
    book = saver.book(quiesce=["sh", "-c", "exit 3"])
    saves = process_saves(home)
    saves.stand_by(book)
    done = saves.save(SIGNAL)
    assert "ended with status 3" in done.error
    assert done.saved is not None
    saver.whole(done.saved)
    assert (saver.restored(done.saved) / "d/checkpoint").read_bytes() == new
    memory_store.fails = StoreUnavailable("away")
    broken = msgspec.structs.replace(book, saves=book.saves[1:], roots=["/none/such"])
    saves.stand_by(broken)
    failed = saves.save(SIGNAL)
    assert failed.saved is None
    assert "/none/such" in failed.error
    assert f"own save: {done.saved.snapshot}" in (home / LOG_FILE).read_text()
    texts = {"what it says": f"{done} {failed} {book!r} {SaveRequest(book, 0.0, None)!r}".encode()}
    texts |= {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    grants = [*book.packs, *(has.grant for has in (*book.saves, *book.known))]
    hidden = [grant.url.split("Signature=")[1].encode() for grant in grants]
    if book.key:
        hidden += [book.key.encode(), bytes.fromhex(book.key)]
    assert [name for name, text in texts.items() if any(secret in text for secret in hidden)] == []


@pytest.mark.rule(13)
@pytest.mark.usefixtures("needs_server")
def test_each_grant_is_handed_out_once(saver: Saver) -> None:
    engine, book = saver.engine, saver.book()
    saves = process_saves(engine.home)
    saves.stand_by(book)
    for number, granted in enumerate(book.saves):
        saver.change(number)
        done = saves.save(SIGNAL)
        assert (done.saved and done.saved.snapshot, done.error) == (granted.snapshot, "")
    used = packs_of(engine) & {grant.key for grant in book.packs}
    assert len(used) == len(book.saves)  # the second one did not overwrite the pack of the first
    for snapshot in engine.snapshots():
        verify_snapshot(engine.store, find_snapshot(engine.store, WORKSPACE, snapshot), engine.seal)
    assert saves.save(SIGNAL) == Rescued(
        None,
        "the machine cannot save by itself: the control side has given no grants for it, or they "
        "have ended, or all of them are used",
    )
    saves.stand_by(saver.book())  # the next book
    assert saves.save(SIGNAL).saved is not None


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
    heard = tmp_path / "heard"
    saves = RescueSaves(["sh", "-c", f"cat > {heard}; echo nonsense"], now=lambda: 1000.0)
    book = book_of(engine, was, None)
    saves.stand_by(book)
    assert "did not say what it did" in saves.save(notice).error
    orders = msgspec.convert(json.loads(heard.read_bytes()), SaveRequest)
    assert (orders.given_unix, orders.left_s) == (1000.0, left_s)
    assert orders.book.saves == book.saves[:1]
    assert orders.book.packs == book.packs[: len(book.packs) // 2]


def test_a_process_that_cannot_start_is_an_error(engine: Engine, was: Path) -> None:
    saves = RescueSaves(["/none/such"])
    saves.stand_by(book_of(engine, was, None))
    assert "could not be started" in saves.save(SIGNAL).error


def test_a_notice_begins_no_save_with_grants_that_have_ended(engine: Engine, was: Path) -> None:
    """However soon it comes after their end; the next book is used all the same."""
    saves = RescueSaves(["sh", "-c", "cat > /dev/null; echo nonsense"])
    book = book_of(engine, was, None)
    saves.stand_by(msgspec.structs.replace(book, lasts_s=0.0))
    assert "no grants" in saves.save(SIGNAL).error
    saves.stand_by(book)
    assert "did not say what it did" in saves.save(SIGNAL).error


@pytest.mark.usefixtures("needs_server")
def test_orders_that_cannot_be_read_are_not_repeated(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RESCUE, str(tmp_path)], input=b'{"book": "secret"}', capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"cannot be read" in done.stdout
    assert b"secret" not in done.stdout + done.stderr + (tmp_path / LOG_FILE).read_bytes()
