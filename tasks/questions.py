"""Questions that a flow asks the person at the terminal, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_answers: ContextVar[Callable[[str], bool] | None] = ContextVar("answers", default=None)


@contextmanager
def answered_by(answers: Callable[[str], bool]) -> Iterator[None]:
    """Ask ``answers`` each question of the flows that this thread runs."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def is_attended() -> bool:
    """Whether a person is at the terminal."""
    return _answers.get() is not None


def ask(question: str) -> bool | None:
    """Whether the person at the terminal says yes; None where nobody is there."""
    answers = _answers.get()
    return None if answers is None else answers(question)
