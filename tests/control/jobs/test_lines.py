"""What of a job's log goes into a run's log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torpor.control.jobs.lines import MOST_CHARS, MOST_LINES, MOST_SHOWN, Lines


def test_lines_are_whole_across_pieces() -> None:
    lines = Lines("log")
    assert [*lines.feed("one\ntw")] == ["one"]
    assert [*lines.feed("o\n")] == ["two"]
    assert [*lines.feed("three", end=True)] == ["three"]


def test_a_progress_bar_shows_its_last_state() -> None:
    assert [*Lines("log").feed("10 %\r50 %\r90 %\n")] == ["90 %"]


def test_the_newest_lines_of_a_burst_are_shown_and_the_file_is_named() -> None:
    shown = [*Lines("~/w/job.log").feed("".join(f"{n}\n" for n in range(1000)))]
    assert len(shown) == MOST_LINES + 1
    assert shown[0] == f"... {1000 - MOST_LINES} lines are left out here; all are in ~/w/job.log"
    assert shown[-1] == "999"


def test_a_run_shows_a_bounded_number_of_lines() -> None:
    lines = Lines("log")
    shown = [line for _ in range(MOST_SHOWN) for line in lines.feed("x\ny\n")]
    assert len(shown) == MOST_SHOWN + 1
    assert "no more lines of this run" in shown[-1]
    assert [*lines.feed("z\n")] == []


@given(st.lists(st.text(alphabet="ab\n\r", max_size=2 * MOST_CHARS), max_size=5))
def test_no_line_is_longer_than_the_bound(pieces: list[str]) -> None:
    lines = Lines("log")
    for piece in pieces:
        for line in lines.feed(piece):
            assert len(line) <= MOST_CHARS + 4 or "left out" in line
