"""What a person reads while a run goes on: one line in place on a terminal, lines in a pipe."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable

import pytest

from flows.procedures.parts import do_parts
from tasks.plain_runner import PlainRunner
from tasks.progress import Progress, doing, followed_by, now
from tasks.step import step
from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.wire.request import Event
from torpor_cli.following import Follower

GB = 10**9


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()

    @property
    def shown(self) -> list[str]:
        """What stands on the terminal: what follows the last return of each line."""
        return [line.rpartition("\r\x1b[K")[2] for line in self.getvalue().split("\n")]


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pipe(clock: Clock) -> tuple[Stream, Follower]:
    stream = Stream(terminal=False)
    return stream, Follower(stream, clock)


@pytest.fixture
def terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Follower]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Stream(terminal=True)
    return stream, Follower(stream, clock)


def test_a_pipe_gets_a_line_as_each_thing_begins_and_one_each_ten_seconds(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    follower.begins("a", "connecting to machine m-1")
    _seconds(9, clock, follower.look)
    assert stream.lines == ["connecting to machine m-1"]
    _seconds(16, clock, follower.look)
    assert stream.lines[1:] == [f"connecting to machine m-1, {s} s" for s in (10, 20)]
    follower.ends("a")
    _seconds(30, clock, follower.look)
    assert len(stream.lines) == 3
    assert "\x1b" not in stream.getvalue()


def test_where_bytes_move_the_line_has_the_bytes_their_rate_and_the_time_left(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    follower.moves("restoring w", 0, 2 * GB)
    for moved in range(1, 21):
        clock.s += 1
        follower.moves("restoring w", moved * GB // 10, 2 * GB)
        follower.look()
    assert stream.lines == [
        "restoring w: 2.0 GB",
        "restoring w: 1.0 of 2.0 GB, 100 MB/s, 10 s left",
    ]


def test_a_move_of_nothing_begins_nothing_anew(pipe: tuple[Stream, Follower], clock: Clock) -> None:
    stream, follower = pipe
    for _ in range(3):
        follower.moves("restoring w", 0, 2 * GB)
        clock.s += 2
    follower.moves("restoring w", GB, 2 * GB)
    follower.moves("restoring w", 0, 2 * GB)  # on another machine
    assert stream.lines == ["restoring w: 2.0 GB"] * 2


@step("fetch part {part}")
def fetch(part: int, progress: Progress) -> None:
    raise KeyError(part)


def test_what_moved_and_has_failed_is_not_shown_any_more(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    with PlainRunner(retries=0), followed_by(follower), pytest.raises(KeyError):
        do_parts("key", "restoring w", 4000, [1], fetch.submit)
    _seconds(30, clock, follower.look)
    assert stream.lines == ["restoring w: 4.0 kB"]


def test_the_rate_is_that_of_the_last_ten_seconds(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    follower.moves("restoring w", 0, 400 * GB)
    for _ in range(30):
        clock.s += 1
        follower.moves("restoring w", int(clock.s - 100) * GB, 400 * GB)
    for second in range(1, 21):
        clock.s += 1
        follower.moves("restoring w", 30 * GB + second * GB // 100, 400 * GB)
    follower.look()
    assert stream.lines[-1] == "restoring w: 30.2 of 400.0 GB, 10 MB/s, 10.3 h left"


def test_a_terminal_has_one_line_for_each_thing_which_is_rewritten_and_never_wrapped(
    terminal: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = terminal
    follower.begins("a", "machine m-1 at local is starting")
    _seconds(35, clock, follower.look)
    follower.ends("a")
    follower.moves("restoring a workspace with quite a long name", 0, 2 * GB)
    clock.s += 2
    follower.moves("restoring a workspace with quite a long name", GB, 2 * GB)
    assert stream.shown == [
        "machine m-1 at local is starting, 35 s",
        "restoring a workspace with quite a long name: 1.0 of 2.0 GB"[:59],
    ]
    follower.moves("restoring a workspace with quite a long name", 2 * GB, 2 * GB)
    assert stream.getvalue().endswith("\n")
    assert set(re.findall("\x1b.*?[A-Za-z]", stream.getvalue())) == {"\x1b[K"}  # no colour


def test_a_terminal_that_cannot_rewrite_a_line_gets_plain_lines(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Stream(terminal=True)
    follower = Follower(stream, clock)
    follower.begins("a", "writing the manifest")
    follower.look()
    assert stream.getvalue() == "writing the manifest\n"


def test_a_line_that_stays_stands_above_the_one_that_is_rewritten(
    terminal: tuple[Stream, Follower],
) -> None:
    stream, follower = terminal
    follower.begins("a", "writing the manifest")
    follower.says("torpor: warning: the store is slow")
    follower.look()
    assert stream.shown == ["torpor: warning: the store is slow", "writing the manifest"]


def test_nothing_is_written_over_a_question(terminal: tuple[Stream, Follower]) -> None:
    stream, follower = terminal
    follower.begins("a", "comparing the disk with the snapshot")
    with follower.silent():
        before = stream.getvalue()
        follower.look()
        follower.begins("b", "ending machine m-1")
        assert stream.getvalue() == before
        assert before.endswith("\n")
    follower.look()
    assert "ending machine m-1" in stream.shown[-1]


def test_what_goes_on_beside_something_else_is_in_the_same_line(
    terminal: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = terminal
    follower.begins("a", "running the setup command")
    follower.begins("b", "checking what was restored")
    clock.s += 5
    follower.ends("b")
    clock.s += 7
    follower.look()
    assert stream.shown[-2:] == [
        "checking what was restored, 5 s; running the setup command, 5 s"[:59],
        "running the setup command, 12 s",
    ]


def test_what_is_said_between_two_things_holds_until_the_next_one(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    follower.begins("", "job 1 waits")
    follower.begins("", "job 1 waits")
    follower.begins("a", "renting a machine")
    _seconds(10, clock, follower.look)
    assert stream.lines == ["job 1 waits", "renting a machine", "renting a machine, 10 s"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_goes_on_where_nobody_reads_what_it_does(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Gone(Stream):
        def write(self, text: str) -> int:
            raise OSError(5, "the terminal has hung up")

    follower = Follower(Gone(terminal=terminal), clock)
    with PlainRunner(), followed_by(follower):
        rent("w")
        follower.moves("restoring w", 0, GB)
        _seconds(30, clock, follower.look)
        follower.says("torpor: warning: the store is slow")
        follower.moves("restoring w", GB, GB)


def test_words_of_a_market_change_no_terminal(pipe: tuple[Stream, Follower]) -> None:
    stream, follower = pipe
    follower.begins("a", "machine m\x1b]52;c;aa\x07\n1 is starting")
    assert stream.lines == [r"machine m\x1b]52;c;aa\x07 1 is starting"]


def test_the_output_of_a_command_stands_alone_until_something_else_begins(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Stream(terminal=True)
    monkeypatch.setattr("sys.stdout", screen)
    follower = Follower(screen, clock)
    follower.begins("a", "attempt 1 is running")
    follower.prints("step 1\nstep ")
    _seconds(30, clock, follower.look)
    follower.prints("2")
    follower.begins("b", "writing the manifest")
    assert screen.shown == ["attempt 1 is running", "step 1", "step 2", "writing the manifest"]


def test_a_reader_of_the_output_who_has_read_enough_ends_no_run(
    pipe: tuple[Stream, Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(text: str) -> int:
        raise BrokenPipeError

    _, follower = pipe
    monkeypatch.setattr("sys.stdout.write", gone)
    assert not follower.read_enough
    follower.prints("step 1\n")
    assert follower.read_enough


def test_a_reader_who_does_not_read_holds_up_no_run_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torpor_cli.following.MOST_WAITING", 40)
    stopped, reads = threading.Event(), threading.Event()

    class Stopped(Stream):
        def write(self, text: str) -> int:
            stopped.set()
            assert reads.wait(PATIENCE_S)
            return super().write(text)

    screen, lines = Stopped(terminal=False), Stream(terminal=False)
    monkeypatch.setattr("sys.stdout", screen)
    with Follower(lines) as follower:
        follower.prints("step 1\n")
        assert stopped.wait(PATIENCE_S)
        follower.prints("step 2\n")
        follower.prints("x" * 100)
        follower.begins("a", "saving")
        reads.set()
        follower.flush()
        follower.prints("step 3\n")
        follower.flush()
        follower.prints("y" * 50)  # more than may wait, and nothing does
        follower.flush()
        stopped.clear()
        reads.clear()
        follower.prints("step 4\n")
        assert stopped.wait(PATIENCE_S)
        follower.prints("z" * 60)
        reads.set()
    assert screen.getvalue() == (
        "step 1\nstep 2\n\n... 100 characters that nobody read in time\nstep 3\n"
        + ("y" * 50)
        + "step 4\n\n... 60 characters that nobody read in time\n"
    )
    assert lines.lines == ["saving"]


@step("rent", says="renting for {name}")
def rent(name: str) -> None:
    now(f"machine of {name} is starting")


@step("fail", says="failing")
def fail() -> None:
    raise KeyError("stop here")


def test_steps_say_what_they_do_until_they_are_done(
    pipe: tuple[Stream, Follower], clock: Clock
) -> None:
    stream, follower = pipe
    with PlainRunner(retries=0), followed_by(follower):
        rent("w")
        with pytest.raises(KeyError):
            fail()
        with doing("serving"), followed_by(None):
            rent("nobody")
    _seconds(30, clock, follower.look)
    assert stream.lines == ["renting for w", "machine of w is starting", "failing", "serving"]


def test_the_parts_of_a_phase_are_added_up_for_whoever_follows(
    pipe: tuple[Stream, Follower], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.progress.UPDATE_S", 0.0)
    stream, follower = pipe
    with PlainRunner(), followed_by(follower):
        bar = Progress("key", "storing w, pass 1", 4000)
        for part, moved in ((1, 1000), (2, 500)):
            clock.s += 5
            bar.event(part, Event(moved))
        follower.look()
        bar.done()
        Progress("key", "storing w, pass 2", 0).done()
    assert stream.lines == [
        "storing w, pass 1: 4.0 kB",
        "storing w, pass 1: 1.5 of 4.0 kB, 150 bytes/s, 17 s left",
    ]


def _seconds(count: int, clock: Clock, look: Callable[[], None]) -> None:
    for _ in range(count):
        clock.s += 1
        look()
