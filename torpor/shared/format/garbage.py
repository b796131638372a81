"""Python's collector of cycles, where there are none to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no cycles meanwhile: the entries of a tree form none, and each look goes through all
    of them again, which is a fifth of the CPU of an unchanged snapshot. Of this process, in all
    threads; what another thread began earlier may end it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
