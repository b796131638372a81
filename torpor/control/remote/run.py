"""What snapshots and restores have in common on the control side: requests of a run, and grants."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import msgspec

from torpor.control.remote.session import Session
from torpor.control.store.seam import ObjectStore
from torpor.shared.errors import AgentLost, TorporError
from torpor.shared.values import MIB, ObjectKey

_SLOWEST_BYTES_S: Final = 1 * MIB
_SHORTEST_GRANT_S: Final = 3600
_LONGEST_GRANT_S: Final = 24 * 3600


class RemoteRun(ABC):
    """One run on one machine, by its id. Thread-safe."""

    def __init__(self, session: Session, store: ObjectStore, key: bytes | None, run: str) -> None:
        self.run = run
        self._session = session
        self._store = store
        self._key = None if key is None else key.hex()
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._given_up: TorporError | None = None

    def give_up(self, reason: TorporError) -> None:
        """Every request that waits and every later one ends with ``reason``, but for the one that
        gives the workspace back. May be said again, for a request that was just being sent."""
        with self._lock:
            self._given_up = self._given_up or reason
            waiting = list(self._open)
        for request in waiting:
            self._session.cancel(request)

    @abstractmethod
    def _begin_again(self) -> None:
        """Take the workspace once more, at an agent that was started anew."""

    def _call(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        """Ask the agent, under a fresh request id, unless the run was given up."""
        self._refuse_given_up()
        try:
            return self._send(op, on_event, **args)
        except TorporError:
            self._refuse_given_up()
            raise

    def _send(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        request = f"{self.run}:{next(self._requests)}"
        with self._lock:
            self._open.add(request)
        try:
            return self._session.call(
                op, {"run": self.run, **args}, request=request, on_event=on_event
            )
        finally:
            with self._lock:
                self._open.discard(request)

    def _refuse_given_up(self) -> None:
        if self._given_up is not None:
            raise type(self._given_up)(str(self._given_up))

    def _held(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        """A call within a run that the agent may have lost: then begin again and ask once more."""
        try:
            return self._call(op, on_event, **args)
        except AgentLost:
            self._begin_again()
            return self._call(op, on_event, **args)

    def _grant(self, verb: str, key: ObjectKey, plain_bytes: int) -> dict[str, Any]:
        """Leave for the agent, for as long as ``plain_bytes`` take at 1 MiB/s: 1 to 24 hours."""
        expires_s = min(_LONGEST_GRANT_S, max(_SHORTEST_GRANT_S, plain_bytes // _SLOWEST_BYTES_S))
        wire: dict[str, Any] = msgspec.to_builtins(
            self._store.grant(verb, key, expires_s=expires_s)
        )
        return wire
