"""A job's command that is frozen at a spot notice: it goes on here, or it is dead here."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.metadata import EVENTS, Metadata
from tests.fixtures.short_agent import copy_agent
from tests.fixtures.supervised import JOB, Machine
from tests.fixtures.waiting import until
from torpor.machine.agent.operations import operations
from torpor.machine.supervisor.freezing import why_too_late
from torpor.shared.errors import AgentLost, StoreUnavailable, WorkspaceBusy
from torpor.shared.values import PROGRAMS
from torpor.shared.wire.autosave import Book
from torpor.shared.wire.job import JobState

_CHAIN = """
import hashlib, os, time
link = os.urandom(8).hex()  # in memory alone
with open("chain", "a") as chain:
    while not os.path.exists("stop"):
        print(link, file=chain, flush=True)
        link = hashlib.sha256(link.encode()).hexdigest()[:16]
        time.sleep(0.02)
"""
_WAITS = """#!/bin/sh
case "$*" in *" dump "*)
    touch {work}/dumps
    while [ ! -e {work}/go ]; do sleep 0.02; done;;
esac
exec {real} "$@"
"""


class Freezing:
    """A job on a machine whose market gives notice."""

    def __init__(self, machine: Machine, metadata: Metadata, criu: Path) -> None:
        self.machine, self._metadata, self.criu = machine, metadata, criu
        machine.agent.store_key = secrets.token_bytes(32)
        self.images = machine.work / PROGRAMS / JOB

    def start(
        self, attempt: int = 1, frozen: str | None = None, criu: str | None = None
    ) -> JobState:
        return self.machine.start(
            *(sys.executable, "-c", _CHAIN),
            attempt=attempt,
            notices=[self._metadata.source("azure")],
            images=str(self.images),
            criu=str(self.criu) if criu is None else criu,
            freezes=True,
            frozen=frozen,
        )

    def slow_criu(self) -> None:
        """Its dump waits until the file ``go`` is there."""
        slow, loader = self.machine.home / "slow", "ld-linux-x86-64.so.2"
        shutil.copytree(self.criu, slow)
        (slow / loader).unlink()
        (slow / loader).write_text(_WAITS.format(work=self.machine.work, real=self.criu / loader))
        self.criu = slow

    def gets_notice(self, left_s: float = 120.0) -> None:
        event = {"EventId": secrets.token_hex(4), "EventType": "Preempt"}
        until_unix = formatdate(time.time() + left_s, usegmt=True)
        self._metadata.say(EVENTS, {"Events": [{**event, "NotBefore": until_unix}]})

    def decided(self) -> JobState:
        def look() -> JobState | None:
            state = self.machine.state()
            return state if state.frozen or state.not_frozen or state.state == "ended" else None

        return until(look, "it is frozen, or not")

    def is_frozen(self) -> JobState:
        """What is said once it has worked and got notice."""
        self.start()
        self.grows()
        self.machine.stands_by()
        self.gets_notice()
        return self.decided()

    def grows(self) -> None:
        seen = len(self.lines())
        until(lambda: len(self.lines()) > seen + 3, "the command works")

    def lines(self) -> list[str]:
        return self.machine.file("chain").split()

    def breaks(self) -> int:
        lines = self.lines()
        made = [hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines[:-1]]
        return sum(was != now for was, now in zip(made, lines[1:], strict=True))


@pytest.fixture
def freezing(machine: Machine, metadata: Metadata, criu: Path) -> Freezing:
    return Freezing(machine, metadata, criu)


def _no_criu(freezing: Freezing) -> None:
    freezing.criu = freezing.machine.home / "none"


def _nothing(freezing: Freezing) -> None:
    pass


def _no_key(book: Book) -> Book:
    return msgspec.structs.replace(book, key=None)


@pytest.mark.rule(16)
@pytest.mark.parametrize(
    ("before", "changed", "left_s", "why"),
    [
        (_no_criu, lambda book: book, 120.0, "CRIU cannot be started"),
        (_nothing, _no_key, 120.0, "nothing seals it"),
        (_nothing, lambda book: book, 3.0, "s to freeze and to store, and"),
    ],
    ids=["no CRIU", "not sealed", "too late"],
)
def test_where_it_cannot_be_frozen_it_goes_on_and_the_save_before_counts(
    freezing: Freezing,
    before: Callable[[Freezing], None],
    changed: Callable[[Book], Book],
    left_s: float,
    why: str,
) -> None:
    before(freezing)
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    freezing.machine.gets(changed(book))
    freezing.gets_notice(left_s)
    _goes_on(freezing, book, why)


def test_where_its_images_cannot_be_stored_in_time_it_goes_on_and_the_save_before_counts(
    freezing: Freezing, memory_store: MemoryStore
) -> None:
    freezing.slow_criu()
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    freezing.gets_notice(60.0)  # a busy host needs some of it to begin
    until((freezing.machine.work / "dumps").exists, "it is being frozen")
    memory_store.fails = StoreUnavailable("it is away")
    (freezing.machine.work / "go").touch()
    _goes_on(freezing, book, "were not stored before the time was over")


def _goes_on(freezing: Freezing, book: Book, why: str) -> None:
    """With what it wrote before the notice in a save."""
    state = freezing.decided()
    assert why in state.not_frozen
    assert (state.state, state.save_error, state.frozen) == ("running", "", None)
    assert state.saved is not None and state.saved.snapshot == book.saves[0].snapshot
    freezing.grows()
    assert freezing.breaks() == 0
    assert not freezing.images.exists()


def test_where_nothing_can_be_frozen_a_notice_says_so_at_once(freezing: Freezing) -> None:
    """Whoever waits for that keeps back saves of its own."""
    freezing.start(criu="")
    freezing.grows()
    freezing.machine.stands_by()
    freezing.gets_notice()
    state = freezing.decided()
    assert state.notice is not None
    assert "has not proven" in state.not_frozen


def test_another_notice_is_decided_anew(freezing: Freezing) -> None:
    freezing.slow_criu()
    freezing.start()
    freezing.grows()
    freezing.machine.stands_by()
    freezing.gets_notice(3.0)
    assert "s to freeze" in freezing.decided().not_frozen
    freezing.gets_notice()
    until((freezing.machine.work / "dumps").exists, "it is being frozen")
    assert freezing.machine.state().not_frozen == ""
    (freezing.machine.work / "go").touch()
    assert freezing.decided().frozen


@pytest.mark.rule(16)
def test_no_other_save_removes_what_is_frozen_until_it_goes_on_or_is_stopped(
    freezing: Freezing,
) -> None:
    frozen = freezing.is_frozen().frozen
    with pytest.raises(WorkspaceBusy, match="is frozen on this machine"):
        freezing.machine.agent.snapshot([freezing.machine.work])
    assert freezing.start(attempt=2, frozen=frozen).went_on
    freezing.grows()
    assert freezing.breaks() == 0
    freezing.machine.stands_by()
    freezing.gets_notice()
    until(lambda: freezing.machine.state().frozen, "it is frozen again")
    freezing.machine.stop()
    until(lambda: not freezing.machine.kept().supervisor.lives, "its supervisor has left")
    freezing.machine.agent.snapshot([freezing.machine.work])
    assert not freezing.images.exists()


def test_a_save_for_a_machine_that_shuts_down_waits_for_what_is_being_frozen(
    freezing: Freezing,
) -> None:
    """It has the grants of the save that could not freeze, and all work up to now."""
    freezing.slow_criu()
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    freezing.gets_notice()
    until((freezing.machine.work / "dumps").exists, "it is being frozen")
    for save in freezing.machine.own_saves():
        save.terminate()
    freezing.machine.shuts_down()
    (freezing.machine.work / "go").touch()

    def last() -> JobState | None:
        state = freezing.machine.state()
        own = state.saved and state.saved.snapshot
        return state if own == book.saves[1].snapshot else None

    state = until(last, "it is saved once more")
    assert state.notice is not None and state.notice.kind == "signal"
    assert (state.state, state.frozen, state.save_error) == ("running", None, "")


@pytest.mark.rule(16)
@pytest.mark.parametrize("what", ["shuts down", "is stopped", "loses the save"])
def test_a_machine_that_shuts_down_and_a_job_that_is_stopped_freeze_nothing(
    freezing: Freezing, what: str
) -> None:
    """Else the command would go on with its own end. Where the save is killed, nothing else keeps
    the command stopped."""
    freezing.slow_criu()
    freezing.start()
    freezing.grows()
    freezing.machine.stands_by()
    freezing.gets_notice(60.0)
    until((freezing.machine.work / "dumps").exists, "it is being frozen")
    if what != "is stopped":
        for save in freezing.machine.own_saves():
            save.terminate() if what == "shuts down" else save.kill()
    else:
        assert freezing.machine.stop(grace_s=0.0).state == "ended"
    (freezing.machine.work / "go").touch()
    state = freezing.decided()
    assert state.frozen is None
    until(lambda: not freezing.images.exists(), "nothing of it is left")
    if what != "is stopped":
        why = {"shuts down": "the machine shuts down", "loses the save": "did not say what it did"}
        assert why[what] in state.not_frozen
        freezing.grows()
        assert freezing.breaks() == 0


def test_a_command_without_a_supervisor_is_saved_and_goes_on(freezing: Freezing) -> None:
    """Nobody would say that it was frozen, nor keep what was."""
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    kept = freezing.machine.supervisor_dies()
    freezing.gets_notice()
    state = freezing.decided()
    assert state.not_frozen == "its supervisor is gone"
    assert state.saved is not None and state.saved.snapshot == book.saves[0].snapshot
    freezing.grows()
    assert kept.command.lives


def test_a_signal_that_an_attempt_got_does_not_keep_the_next_one_from_being_frozen(
    freezing: Freezing,
) -> None:
    freezing.start()
    freezing.grows()
    freezing.machine.stands_by()
    freezing.machine.shuts_down()
    until(lambda: freezing.machine.state().saved, "it is saved")
    saver = freezing.machine.saver()
    book = freezing.machine.stands_by(every_s=600.0)
    freezing.machine.gets(msgspec.structs.replace(book, job=""), instead_of=JOB)  # it stays
    freezing.machine.stop()
    freezing.start(attempt=2)
    freezing.grows()
    freezing.machine.stands_by()
    assert freezing.machine.saver() == saver
    freezing.gets_notice()
    assert freezing.decided().frozen


def test_where_the_autosave_process_is_killed_its_save_freezes_the_command_all_the_same(
    freezing: Freezing,
) -> None:
    """That save holds the lock of the log, too: nobody takes the command's end for a failure."""
    freezing.slow_criu()
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    freezing.gets_notice()
    until((freezing.machine.work / "dumps").exists, "it is being frozen")
    saver = freezing.machine.saver()
    assert saver is not None
    saver.kill()
    (freezing.machine.work / "go").touch()
    state = freezing.machine.ended()
    assert state.frozen == book.saves[1].snapshot
    assert state.frozen in freezing.machine.agent.snapshots()
    assert "ended" not in freezing.machine.log.read_text()
    assert freezing.start(attempt=2, frozen=state.frozen).went_on
    freezing.grows()
    assert freezing.breaks() == 0


@pytest.mark.rule(16)
def test_where_its_save_is_refused_it_is_dead_and_goes_on_from_this_disk(
    freezing: Freezing,
) -> None:
    """Nobody knows whether the store has taken the manifest. No other frozen command goes on."""
    freezing.start()
    freezing.grows()
    book = freezing.machine.stands_by()
    first, second, *more = book.saves
    dead = msgspec.structs.replace(second.grant, url=f"{second.grant.url}0")
    saves = [first, msgspec.structs.replace(second, grant=dead), *more]
    freezing.machine.gets(msgspec.structs.replace(book, saves=saves))
    freezing.gets_notice()
    until(lambda: freezing.machine.state().not_frozen, "it says why it is not stored")
    state = freezing.machine.ended()
    assert (state.state, state.frozen) == ("ended", second.snapshot)
    assert state.saved is not None and state.saved.snapshot == first.snapshot
    assert state.not_frozen
    length = len(freezing.lines())
    assert "ended" not in freezing.machine.log.read_text()
    state = freezing.start(attempt=2, frozen=second.snapshot)
    assert (state.went_on, state.afresh) == (True, "")
    freezing.grows()
    assert len(freezing.lines()) > length
    assert freezing.breaks() == 0


@pytest.mark.rule(16)
def test_only_what_was_frozen_for_the_snapshot_that_was_woken_goes_on(freezing: Freezing) -> None:
    frozen = freezing.is_frozen().frozen
    assert frozen is not None

    def is_stored() -> bool:
        save = freezing.machine.state().saved
        return save is not None and save.snapshot == frozen

    until(is_stored, "its save is told")
    state = freezing.start(attempt=2, frozen="20261120T000000Z-00000000")
    assert (state.went_on, state.afresh) == (False, "what was frozen is of another snapshot")
    freezing.grows()
    assert freezing.breaks() == 1
    assert not freezing.images.exists()


@pytest.mark.rule(16)
def test_a_supervisor_that_is_killed_before_its_record_leaves_no_copy(
    freezing: Freezing, tmp_path: Path
) -> None:
    frozen = freezing.is_frozen().frozen
    length = len(freezing.lines())
    was = "        self._folder.write(self._kept)\n        self._written = True"
    killed = f"        os.kill(os.getpid(), signal.SIGKILL)\n{was}"
    source = copy_agent(tmp_path / "killed", ("torpor/machine/supervisor/process.py", was, killed))
    (source / "__main__.py").write_text(
        "import sys\nfrom torpor.machine.agent.__main__ import main\nsys.exit(main(sys.argv))\n"
    )
    own = freezing.machine.agent.table
    argv = [sys.executable, str(source), "supervise", "--home", str(freezing.machine.home)]
    freezing.machine.agent.table = operations(
        freezing.machine.agent.runs, argv, *freezing.machine.agent.argv[1:]
    )
    with pytest.raises(AgentLost):
        freezing.start(attempt=2, frozen=frozen)
    freezing.machine.agent.table = own
    grown = len(freezing.lines())
    state = freezing.start(attempt=2, frozen=frozen)
    assert not state.went_on  # the files may be newer by now
    freezing.grows()
    assert freezing.breaks() == 1
    assert grown >= length


@pytest.mark.parametrize(
    ("held_bytes", "bytes_s", "left_s", "fits"),
    [
        (10_000_000, 0.0, 4.0, True),
        (10_000_000, 0.0, 3.0, False),
        (1_000_000_000, 50e6, 47.0, False),
        (1_000_000_000, 50e6, 48.0, True),
        (1_000_000_000, 1e9, 20.0, True),
        (1, 0.0, -1.0, False),
    ],
)
def test_whether_the_time_suffices(
    held_bytes: int, bytes_s: float, left_s: float, fits: bool
) -> None:
    assert (why_too_late(held_bytes, bytes_s, left_s) == "") == fits
