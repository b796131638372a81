"""The parts of one phase: submitted all at once, with one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tasks.progress import Progress
from tasks.runner import Pending

Part = TypeVar("Part")
R = TypeVar("R")


def do_parts(
    key: str,
    description: str,
    total_bytes: int,
    parts: Sequence[Part],
    submit: Callable[[Part, Progress], Pending[R]],
) -> list[R]:
    """``submit`` each part, wait for all, and return what they return, in the parts' order."""
    progress = Progress(key, description, total_bytes)
    pending = [submit(part, progress) for part in parts]
    done = [one.result() for one in pending]
    progress.done()
    return done
