"""Host keys of users' own machines, pinned by address at the first login, beside the snapshots.

A rented machine's key is pinned in its rental: markets give the same address to the next machine.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import Records
from torpor.shared.errors import HostKeyChanged, ObjectExists
from torpor.shared.values import Endpoint, ObjectKey, WorkspaceName

_MOST_BYTES: Final = 64 * 1024


class PinnedHost(msgspec.Struct, frozen=True):
    """The host key that a machine showed when torpor first met it."""

    host: str
    port: int
    host_key: str
    pinned_unix: float
    jump: Endpoint | None = None


class KnownHosts:
    """The pins of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        advice = "compare the machine's host key yourself"
        self._records = Records(store, PinnedHost, _MOST_BYTES, advice)
        self._workspace = workspace

    def pinned(self, endpoint: Endpoint) -> Endpoint:
        """``endpoint`` with the host key that was pinned before, unless it has one of its own, and
        with the jump host of that login."""
        if endpoint.host_key is not None:
            return endpoint
        held = self._records.read(self._key(endpoint))
        if held is None:
            return endpoint
        return replace(endpoint, host_key=held[0].host_key, jump=held[0].jump)

    def pin(self, endpoint: Endpoint, host_key: str) -> None:
        """Record a host key at first use; HostKeyChanged if another one was recorded."""
        key = self._key(endpoint)
        if self._records.read(key) is None:
            with suppress(ObjectExists):  # another run has pinned one meanwhile
                pinned = PinnedHost(
                    endpoint.host, endpoint.port, host_key, time.time(), endpoint.jump
                )
                self._records.create(key, pinned)
        held = self._records.read(key)
        if held is not None and held[0].host_key != host_key:
            raise HostKeyChanged(
                f"{endpoint.host}:{endpoint.port} shows another host key than the one recorded in "
                f"{self._store.address}: if you set it up again, delete {key} "
                "there; otherwise an attacker may be in between"
            )

    def _key(self, endpoint: Endpoint) -> ObjectKey:
        place = hashlib.sha256(f"{endpoint.host}:{endpoint.port}".encode()).hexdigest()[:32]
        return ObjectKey(f"workspaces/{self._workspace}/hosts/{place}")
