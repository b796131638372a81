"""Rounds: repeats of several steps together, where a single step cannot be repeated alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tasks.runner import runner
from torpor.shared.errors import TorporError


def rounds(most: int, *errors: type[TorporError]) -> Iterator[AbstractContextManager[None]]:
    """Contexts for one try each, at most ``most``, until one succeeds: one of these errors begins
    another round, unless it is the last."""
    ended = False

    @contextmanager
    def this_round(left: int) -> Iterator[None]:
        nonlocal ended
        try:
            yield
        except errors as error:
            if not left:
                raise
            runner().log.warning("another round: %s", error)
        else:
            ended = True

    for left in reversed(range(most)):
        yield this_round(left)
        if ended:
            return
