"""A branch of a run's graph: the steps of one machine among several, in their order and under the
machine's name. The runner links each step to the steps that it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import UUID


class Branch:
    """A branch of a run's graph. ``name``: the prefix of its steps' names, empty for steps of the
    flow itself. ``last``: the ids of the steps that the branch's first step follows."""

    def __init__(self, name: Callable[[], str], last: Sequence[UUID] = ()) -> None:
        self._name = name
        self._last = [*last]
        self._beside: list[UUID] = []

    @property
    def name(self) -> str:
        return self._name()

    def follows(self, *, beside: bool) -> list[UUID]:
        """The ids of the steps that a step follows which begins now. ``beside``: other steps run at
        the same time, and follow the same ones."""
        return self._last if beside else self._beside or self._last

    def ended(self, step: UUID, *, beside: bool) -> None:
        """Note that this step has ended: the next step follows it, together with all steps that ran
        beside it."""
        if beside:
            self._beside.append(step)
        else:
            self._last, self._beside = [step], []


_branch: Final[ContextVar[Branch | None]] = ContextVar("branch", default=None)


def current_branch() -> Branch | None:
    """The branch to which steps of this context belong."""
    return _branch.get()


@contextmanager
def branch(name: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Run the steps of this context as a branch, which begins where the branch around it is now."""
    around = _branch.get()
    last = [] if around is None else around.follows(beside=False)
    token = _branch.set(Branch(name, last))
    try:
        yield
    finally:
        _branch.reset(token)
