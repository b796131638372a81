"""Questions at the terminal."""

from __future__ import annotations

import pytest

from tasks.questions import answered_by
from torpor.shared.errors import RunCancelled
from torpor_cli import question


def test_the_answer_to_a_question_that_is_folded_stands_apart_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(question, "folded", lambda text, stream: "\n".join(text.split()))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    assert question.agrees("Rent it?")
    assert asked == ["Rent\nit?\n[y/N] "]


def test_lines_of_progress_make_way_for_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with answered_by(lambda text: not asked.append(text)):  # type: ignore[func-returns-value]
        question.confirm("Delete it?", "nothing was deleted")
    assert asked == ["Delete it?"]
    with answered_by(lambda text: False), pytest.raises(RunCancelled, match="nothing was deleted"):
        question.confirm("Delete it?", "nothing was deleted")


def test_an_input_that_ends_agrees_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(text: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert not question.says_yes("Destroy it?")
    with pytest.raises(RunCancelled, match="the input ended"):
        question.agrees("Rent it?")
