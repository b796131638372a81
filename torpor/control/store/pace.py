"""Limits the time of one request to a store. A store that drips its answer, a few bytes now and
then, breaks no timeout of a socket, which counts from the last byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from typing import TypeVar

from torpor.shared.errors import StoreUnavailable
from torpor.shared.transfer.transfer import SLOWEST_BYTES_S

_Answer = TypeVar("_Answer")
_moved: ContextVar[list[int]] = ContextVar("moved")


def within(what: str, timeout_s: float, request: Callable[[], _Answer]) -> _Answer:
    """The answer to ``request``, which may take ``timeout_s``, and as long as the bytes that it
    says it moves take at SLOWEST_BYTES_S. Then StoreUnavailable: its thread is left alone, and
    keeps no process from ending."""
    began_s, counts = time.monotonic(), list[int]()
    answer: Future[_Answer] = Future()
    context = copy_context()
    context.run(_moved.set, counts)
    work = threading.Thread(
        target=context.run, args=(give, answer, request), name="store-request", daemon=True
    )
    try:
        work.start()
    except RuntimeError as error:
        raise StoreUnavailable(
            f"{what}: this host starts no further thread ({error}); end some of its programs"
        ) from None
    while True:
        spent_s, moved = time.monotonic() - began_s, sum(counts)
        left_s = timeout_s + moved / SLOWEST_BYTES_S - spent_s
        if wait([answer], max(0.0, left_s)).done:
            return answer.result()
        if left_s <= 0:
            raise StoreUnavailable(
                f"{what}: the store drips its answer, which has not ended after {spent_s:.0f} s; "
                f"{moved} bytes moved. See why it is so slow"
            )


def moves(count: int) -> None:
    """Note, within a request, that this many bytes were sent or have come."""
    _moved.get([]).append(count)


def give(answer: Future[_Answer], call: Callable[[], _Answer]) -> None:
    """Put the call's answer, or the error that it raises, into ``answer``."""
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - whoever waits for the answer raises it
        answer.set_exception(error)
