"""Questions at the terminal."""

from __future__ import annotations

import pytest

from torpor_cli import question


def test_the_answer_to_a_question_that_is_folded_stands_apart_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(question, "folded", lambda text, stream: "\n".join(text.split()))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    assert question.agrees("Rent it?")
    assert asked == ["Rent\nit?\n[y/N] "]
