"""The parts of one phase: submitted all at once, with one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tasks.progress import Progress
from tasks.runner import StepFuture

Part = TypeVar("Part")
R = TypeVar("R")


def do_parts(
    key: str,
    description: str,
    total_bytes: int,
    parts: Sequence[Part],
    submit: Callable[[Part, Progress], StepFuture[R]],
    *,
    submitted: Callable[[], None] = lambda: None,
    after: tuple[int, Callable[[], None]] | None = None,
) -> list[R]:
    """``submit`` each part, wait for all, and return what they return, in the parts' order.
    ``submitted``: what to do when all are submitted; steps run in the order of their submission.
    ``after``: what to do as soon as its number of parts is done, while the others go on."""
    progress = Progress(key, description, total_bytes)
    done: list[R] = []
    try:
        pending = [submit(part, progress) for part in parts]
        submitted()
        for one in pending:
            if after is not None and len(done) == after[0]:
                after[1]()
            done.append(one.result())
        if after is not None and len(done) == after[0]:
            after[1]()
    except BaseException:
        progress.give_up()
        raise
    progress.done()
    return done
