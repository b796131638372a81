"""What can go wrong at a market, switched on by a test for the next requests or machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    # the request is not carried out
    "hang",  # no answer until the client gives up or the market closes
    "too many",  # 429 in plain text
    "unavailable",  # 503
    "error body",  # 200 with the market's error body
    "wrong shape",  # 200 with JSON that the market never sends
    "not json",  # 200 with a page of HTML
    "no capacity",
    "quota",
    "denied",
    "no money",
    # the request is carried out
    "lost",  # the connection closes instead of an answer
    "error after",  # an error of a gateway (``Fault.status``), though it was done
    "error that created",  # the market's own way of refusing a create and renting all the same
    "lives",  # a destroy is answered with success, and the machine goes on
    "not found",  # the machine is missing in this answer, and goes on
]

Action = Literal["offers", "create", "find", "list", "destroy", "account", "any"]


@dataclass
class Fault:
    """``kind`` happens to ``count`` requests that do ``action``, once ``skip`` have passed."""

    kind: Kind
    action: Action = "any"
    count: int = 1
    skip: int = 0
    retry_after_s: int | None = None  # "too many" only
    status: int = 500  # "error after" only


class Faults:
    """Those that are armed. The first that fits a request happens to it."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []
        self._lock = threading.Lock()

    def arm(self, fault: Fault) -> None:
        with self._lock:
            self._armed.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._armed.clear()

    def take(self, action: Action, fits: Callable[[Kind], bool]) -> Fault | None:
        with self._lock:
            for fault in self._armed:
                if fault.count <= 0 or fault.action not in (action, "any") or not fits(fault.kind):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.count -= 1
                return fault
        return None
