"""The control side as a process of its own, so that it can be killed like one.

``serve``: forks one control side for each line of its input, without Prefect; ``prefect``: one
run of the real flow against the server that PREFECT_API_URL names; ``blocks``: saves the blocks
that those runs load. A run writes its outcome to its ``out`` file and its phases to ``phases``; a
killed run leaves no ``out``. An order may name a step at which the run kills itself with SIGKILL,
so that timing does not decide how far it came.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from tasks.phases import phases_told_to
from tests.fixtures.plain_flows import (
    hibernate_plainly,
    replicate_plainly,
    wake_plainly,
)
from tests.fixtures.short_agent import installing
from tests.fixtures.world import Access
from torpor.shared.errors import TorporError


class Moment(msgspec.Struct, frozen=True):
    """A moment of a run: the ``call``-th call of ``what``, by any thread, begins or is over."""

    what: str  # module:function or module:Class.method, as its caller finds it
    call: int = 1
    over: bool = False

    def __str__(self) -> str:
        return f"{self.what.partition(':')[2]} {self.call} {'over' if self.over else 'begins'}"


class Order(msgspec.Struct, frozen=True):
    """One run of one flow."""

    flow: str  # hibernate, wake or replicate
    options: dict[str, Any]
    access: str
    source: str  # where the agent's packages are
    out: str
    phases: str
    dies_at: Moment | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to; ``error`` is empty where it completed."""

    seconds: float
    error: str = ""
    message: str = ""
    trace: str = ""


def main(argv: list[str]) -> int:
    if argv[1:] == ["serve"]:
        return _serve()
    order = msgspec.json.decode(argv[2], type=Order)
    if argv[1] == "blocks":
        read_access(order).save_blocks("demo")
        return 0
    if argv[1] == "plain":
        return _carry_out(order, _plainly)
    return _carry_out(order, _by_prefect)


def read_access(order: Order) -> Access:
    return msgspec.json.decode(Path(order.access).read_bytes(), type=Access)


def _serve() -> int:
    """Importing all this takes seconds, forking none: one import for all the runs."""
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _carry_out(order, _plainly)
            finally:
                os._exit(code)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
    return 0


def _carry_out(order: Order, work: Callable[[Order], object]) -> int:
    began = time.monotonic()

    def enter(phase: str) -> None:
        with open(order.phases, "a") as phases:
            phases.write(phase + "\n")

    try:
        with (
            installing(Path(order.source)),
            phases_told_to(enter),
            _dying_at(order.dies_at),
        ):
            work(order)
        outcome = Outcome(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - the process's border: all becomes an outcome
        trace = "" if isinstance(error, TorporError) else traceback.format_exc()
        outcome = Outcome(time.monotonic() - began, type(error).__name__, str(error), trace)
    partial = Path(order.out + ".new")
    partial.write_bytes(msgspec.json.encode(outcome))
    partial.replace(order.out)
    return 0


@contextmanager
def _dying_at(moment: Moment | None) -> Iterator[None]:
    if moment is None:
        yield
        return
    module, _, name = moment.what.partition(":")
    *owners, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, last)
    begun, over = itertools.count(1), itertools.count(1)  # each next() is one step of the GIL

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(begun) == moment.call and not moment.over:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if next(over) == moment.call and moment.over:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with patch.object(owner, last, counted):
        yield


def _plainly(order: Order) -> None:
    runs: dict[str, Callable[..., object]] = {
        "hibernate": hibernate_plainly,
        "wake": wake_plainly,
        "replicate": replicate_plainly,
    }
    runs[order.flow](read_access(order).opened(), **order.options)


def _by_prefect(order: Order) -> None:
    from flows import hibernate, wake

    flow: Callable[..., object] = hibernate if order.flow == "hibernate" else wake
    flow("demo", **order.options)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
