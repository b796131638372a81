"""A terminal of 80 columns: lines end between words, and a wait says what it is for."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from deployments import terminal
from deployments.terminal import CLEARED, Waiting, folded, say
from tests.fixtures.waiting import PATIENCE_S

WARNING = (
    "torpor: warning: machine m-5783df3734c3-99b4ccea runs on, and it costs money: `torpor job "
    "cancel w1 c311330dcf3a` ends it, `torpor job log w1 c311330dcf3a -f` shows what it prints"
)


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip(CLEARED):
            self.wrote.set()
        return count


@pytest.fixture(autouse=True)
def of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


def test_a_long_line_ends_between_words_and_no_command_is_torn() -> None:
    lines = folded(WARNING, Stream()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(lines) == WARNING
    for command in ("`torpor job cancel w1 c311330dcf3a`", "`torpor job log w1 c311330dcf3a -f`"):
        assert any(command in line for line in lines)


def test_a_pipe_gets_the_line_whole() -> None:
    assert folded(WARNING, Stream(terminal=False)) == WARNING


def test_what_follows_a_label_stays_to_the_right_of_it() -> None:
    line = f"  note      {'all of it is there ' * 6}".rstrip()
    first, *others = folded(line, Stream()).splitlines()
    assert first.startswith("  note      all of it")
    assert others
    assert all(other.startswith(" " * 12 + "a") or other[:12] == " " * 12 for other in others)
    assert all(len(one) <= 80 for one in (first, *others))


def test_short_lines_indents_and_an_address_that_is_too_long_stay_as_they_are() -> None:
    text = f"  two  blanks\n\nhttp://127.0.0.1/{'a' * 90}\n"
    assert folded(text, Stream()) == text


def test_wide_characters_count_for_two_columns() -> None:
    lines = folded("机器 " * 30, Stream()).splitlines()
    assert [line.count("机器") for line in lines] == [16, 14]


def test_a_wait_is_shown_with_its_seconds_and_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "SHOWN_S", 0.0)
    stream = Stream()
    with Waiting("loading Prefect", stream) as waiting:
        assert stream.wrote.wait(PATIENCE_S)
        assert waiting.line(12.3) == "loading Prefect, 12 s"
    assert stream.getvalue().startswith(f"{CLEARED}loading Prefect")
    assert stream.getvalue().endswith(CLEARED)


def test_a_wait_in_a_pipe_or_one_that_is_over_at_once_writes_nothing() -> None:
    pipe, screen = Stream(terminal=False), Stream()
    for stream in (pipe, screen):
        with Waiting("loading Prefect", stream):
            pass
    assert pipe.getvalue() == screen.getvalue() == ""


def test_a_warning_replaces_the_line_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SHOWN_S", 0.0)
    monkeypatch.setattr(terminal, "TICK_S", PATIENCE_S)
    stream = Stream()
    with Waiting("loading Prefect", stream):
        assert stream.wrote.wait(PATIENCE_S)
        say("torpor: warning: w", stream)
    assert f"loading Prefect{CLEARED}torpor: warning: w\n" in stream.getvalue()


def test_words_go_to_standard_output_unless_a_stream_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("done")
    say("torpor: no", sys.stderr)
    assert capsys.readouterr() == ("done\n", "torpor: no\n")
