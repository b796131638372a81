"""What of a job's log goes into a run's log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.control.jobs.log_lines import MOST_CHARS, MOST_LINES, MOST_SHOWN, LogLines, Text
from torpor.control.variables import Secrets


def test_lines_are_whole_across_pieces() -> None:
    lines = LogLines("log")
    assert [*lines.feed("one\ntw")] == ["one"]
    assert [*lines.feed("o\n")] == ["two"]
    assert [*lines.feed("three", end=True)] == ["three"]


def test_a_progress_bar_shows_its_last_state() -> None:
    assert [*LogLines("log").feed("10 %\r50 %\r90 %\n")] == ["90 %"]


@pytest.mark.rule("H13")
def test_what_a_terminal_would_obey_is_shown() -> None:
    """OSC 52 writes into the clipboard; a right-to-left override hides what a line says."""
    said = "\x1b]52;c;ZWNobyBvd25lZA==\x07 \x9b31m caf\u00e9\t\u202etxt\n"
    shown = r"\x1b]52;c;ZWNobyBvd25lZA==\x07 \x9b31m café" + "\t" + r"\u202etxt"
    assert [*LogLines("log").feed(said)] == [shown]


def test_the_newest_lines_of_a_burst_are_shown_and_the_file_is_named() -> None:
    shown = [*LogLines("~/w/job.log").feed("".join(f"{n}\n" for n in range(1000)))]
    assert len(shown) == MOST_LINES + 1
    assert shown[0] == f"... {1000 - MOST_LINES} lines are left out here; all are in ~/w/job.log"
    assert shown[-1] == "999"


def test_a_run_shows_a_bounded_number_of_lines() -> None:
    lines = LogLines("log")
    shown = [line for _ in range(MOST_SHOWN) for line in lines.feed("x\ny\n")]
    assert len(shown) == MOST_SHOWN + 1
    assert "no more lines of this run" in shown[-1]
    assert [*lines.feed("z\n")] == []


@given(st.integers(1, 40), st.booleans())
def test_no_piece_of_a_secret_is_shown(size: int, in_one_line: bool) -> None:
    secret = "hf_AbCdEf"
    text = f"{'x' * 2 * MOST_CHARS}{secret}{'y' * MOST_CHARS}" if in_one_line else f"a\n{secret}\n"
    lines = LogLines("log", Secrets({"HF_TOKEN": secret}))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown = "".join(line for piece in pieces for line in lines.feed(piece))
    shown += "".join(lines.feed("", end=True))
    assert "*" in shown
    assert not set("hfAbCdEf") & set(shown.replace("a", ""))


def test_the_line_in_which_a_gap_ends_is_left_out() -> None:
    """It may begin with the second half of a secret."""
    lines = LogLines("log")
    assert len([*lines.skip(100)]) == 1
    assert [*lines.feed("half a line\na line\n")] == ["a line"]


@given(st.lists(st.text(alphabet="ab\n\r", max_size=2 * MOST_CHARS), max_size=5))
def test_no_line_is_longer_than_the_bound(pieces: list[str]) -> None:
    lines = LogLines("log")
    for piece in pieces:
        for line in lines.feed(piece):
            assert len(line) <= MOST_CHARS + 4 or "left out" in line


def test_all_of_a_log_is_shown_with_each_state_of_a_progress_bar() -> None:
    text = Text("log")
    pieces = ["10 %\r5", "0 %\r90 %", "\nno end of ", "a line"]
    assert [text.feed(piece) for piece in pieces] == ["10 %\r", "50 %\r", "90 %\n", ""]
    assert text.feed("", end=True) == "no end of a line"


@given(st.integers(1, 40), st.booleans())
def test_no_piece_of_a_secret_is_in_what_is_shown_of_all(size: int, in_one_line: bool) -> None:
    secret = "hf_AbCdEf"
    said = f"{'x' * 2 * MOST_CHARS}{secret}{'y' * MOST_CHARS}" if in_one_line else f"a\n{secret}\n"
    text = Text("log", Secrets({"HF_TOKEN": secret}))
    shown = "".join(text.feed(said[at : at + size]) for at in range(0, len(said), size))
    shown += text.feed("", end=True)
    assert shown == said.replace(secret, "***")


def test_a_gap_in_all_of_a_log_is_said_and_begins_again_with_a_line() -> None:
    text = Text("~/w/job.log")
    text.feed("half ")
    assert text.skip(1000) == "half \n... 1,000 bytes are left out here; all are in ~/w/job.log\n"
    assert text.feed("of a secret\nnext\n") == "next\n"
