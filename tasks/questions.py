"""Questions that a flow asks the person at the terminal, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_answers: ContextVar[Callable[[str], bool] | None] = ContextVar("answers", default=None)


@contextmanager
def answered_by(answers: Callable[[str], bool]) -> Iterator[None]:
    """Within this context, send the questions of flows of this thread to ``answers``."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def is_attended() -> bool:
    """Whether a person is at the terminal."""
    return _answers.get() is not None


def ask(question: str) -> bool | None:
    """Ask the person at the terminal: True after a yes, False after a no, None where nobody is
    there."""
    answers = _answers.get()
    return None if answers is None else answers(question)
