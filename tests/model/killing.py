"""kill -9 between any two requests to the store, in a child process, without timing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.fixtures.clocked import ClockedStore
from tests.fixtures.kill_points import killed_in_a_child
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import ObjectKey


def killed_at_request(store: ClockedStore, step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked child that dies by SIGKILL at its ``step``-th moment before or after
    a request. False when ``work`` ended before that; AssertionError when it failed."""

    def counted() -> None:
        store.forget_connections()  # they are the parent's
        with _moments(step):
            work()

    return killed_in_a_child(counted)


@contextmanager
def _moments(step: int) -> Iterator[None]:
    passed = 0

    def moment() -> None:
        nonlocal passed
        passed += 1
        if passed == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(name: str) -> Callable[..., Any]:
        original = getattr(ClockedStore, name)

        def method(self: ClockedStore, *args: Any, **options: Any) -> Any:
            moment()
            answer = original(self, *args, **options)
            moment()
            return answer

        return method

    delete, put, get_ranges = ClockedStore.delete, Transfer.put, Transfer.get_ranges

    def delete_one_by_one(self: ClockedStore, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            moment()
            delete(self, [key])
        moment()

    def transfer_put(self: Transfer, *args: Any) -> None:
        moment()
        put(self, *args)
        moment()

    def transfer_get(
        self: Transfer, grant: Any, ranges: Sequence[Any], **options: Any
    ) -> Generator[memoryview, None, None]:
        moment()
        yield from get_ranges(self, grant, ranges, **options)

    with (
        patch.object(ClockedStore, "put", around("put")),
        patch.object(ClockedStore, "get", around("get")),
        patch.object(ClockedStore, "get_range", around("get_range")),
        patch.object(ClockedStore, "list", around("list")),
        patch.object(ClockedStore, "head", around("head")),
        patch.object(ClockedStore, "delete", delete_one_by_one),
        patch.object(Transfer, "put", transfer_put),
        patch.object(Transfer, "get_ranges", transfer_get),
    ):
        yield
