"""A run as the control side sees it: its requests and its grants."""

from __future__ import annotations

import itertools
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from torpor.control.remote.agent import Agent
from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import AgentLost, TorporError
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, Grant, ObjectKey, StoredSnapshot
from torpor.shared.wire.request import Event, OfRun

A = TypeVar("A")
OnEvent = Callable[[Event], None] | None

_SLOWEST_BYTES_S: Final = 1 * MIB
_SHORTEST_GRANT_S: Final = 3600
_LONGEST_GRANT_S: Final = 24 * 3600


class RemoteRun(ABC):
    """One run on one machine, under an id of its own that begins with ``run``, the flow run's id: a
    flow run may have several runs on a machine, and a retry of it has the same id. Thread-safe."""

    def __init__(self, agent: Agent, store: ObjectStore, key: bytes | None, run: str) -> None:
        self.run = f"{run}-{secrets.token_hex(4)}"
        self._agent = agent
        self._store = store
        self._key = None if key is None else key.hex()
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._given_up: TorporError | None = None

    @property
    def machine(self) -> str:
        """The agent's name for its machine, for messages."""
        return self._agent.hello.machine

    def give_up(self, reason: TorporError) -> None:
        """End every waiting and later request with ``reason``, except the one that gives the
        workspace back. Calling it again also ends a request that was just being sent."""
        with self._lock:
            self._given_up = self._given_up or reason
            waiting = list(self._open)
        for request_id in waiting:
            self._agent.cancel(request_id)

    @abstractmethod
    def _begin_again(self) -> None:
        """Take the workspace again, at an agent that was restarted."""

    def _call(
        self, request: OfRun[A], on_event: OnEvent = None, *, within_s: float | None = None
    ) -> A:
        """Ask the agent, under a fresh request id, unless the run was given up."""
        self._check_not_given_up()
        try:
            return self._send(request, on_event, within_s)
        except TorporError:
            self._check_not_given_up()
            raise

    def _call_resuming(self, request: OfRun[A], on_event: OnEvent = None) -> A:
        """Call; if the agent has lost the run, begin it again and call once more."""
        try:
            return self._call(request, on_event)
        except AgentLost:
            self._begin_again()
            return self._call(request, on_event)

    def _send(
        self, request: OfRun[A], on_event: OnEvent = None, within_s: float | None = None
    ) -> A:
        request_id = f"{self.run}:{next(self._requests)}"
        with self._lock:
            self._open.add(request_id)
        try:
            return self._agent.call(
                request, request_id=request_id, on_event=on_event, within_s=within_s
            )
        finally:
            with self._lock:
                self._open.discard(request_id)

    def _check_not_given_up(self) -> None:
        if self._given_up is not None:
            raise type(self._given_up)(str(self._given_up))

    def _grant(self, verb: str, key: ObjectKey, plain_bytes: int) -> Grant:
        """A grant that lasts as long as ``plain_bytes`` take at 1 MiB/s: 1 to 24 hours."""
        expires_s = min(_LONGEST_GRANT_S, max(_SHORTEST_GRANT_S, plain_bytes // _SLOWEST_BYTES_S))
        return self._store.grant(verb, key, expires_s=expires_s)

    def _of(self, wanted: StoredSnapshot, paths: Sequence[str]) -> dict[str, Any]:
        """The fields of every request that begins to bring ``wanted`` onto the machine; ``paths``:
        the directories that its manifest may name."""
        key = manifest_key(wanted.workspace, wanted.snapshot)
        return {
            "run": self.run,
            "workspace": wanted.workspace,
            "authority": self._store.authority,
            "snapshot": wanted.snapshot,
            "root": wanted.root,
            "manifest_bytes": wanted.manifest_bytes,
            "grant": self._grant("GET", key, wanted.manifest_bytes),
            "key": self._key,
            "paths": list(paths),
        }
