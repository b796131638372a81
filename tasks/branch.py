"""A branch of a run's graph: the steps of one machine among several, in their order and under its
name. Who runs the steps links each to those that it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import UUID


class Branch:
    """``name``: what its steps are called after, empty for those of the flow itself. ``last``: the
    ids of the steps that its first step follows."""

    def __init__(self, name: Callable[[], str], last: Sequence[UUID] = ()) -> None:
        self._name = name
        self._last = [*last]
        self._beside: list[UUID] = []

    @property
    def name(self) -> str:
        return self._name()

    def follows(self, *, beside: bool) -> list[UUID]:
        """The steps that a step follows which begins now. ``beside``: others go on with it, and
        they follow the same."""
        return self._last if beside else self._beside or self._last

    def ended(self, step: UUID, *, beside: bool) -> None:
        """This step has ended; the next one follows it, or all that went on with it."""
        if beside:
            self._beside.append(step)
        else:
            self._last, self._beside = [step], []


_branch: Final[ContextVar[Branch | None]] = ContextVar("branch", default=None)


def current_branch() -> Branch | None:
    """The branch whose steps this context runs."""
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
