"""Host keys of users' own machines, pinned by address at the first login, beside the snapshots.

A rented machine's key is pinned in its rental: markets give the same address to the next machine.
"""

from __future__ import annotations

import hashlib
import time
from typing import Final

import msgspec

from torpor.control.store.seam import ObjectStore
from torpor.shared.errors import HostKeyChanged, ObjectExists, StoreError, StoreMissing
from torpor.shared.values import Endpoint, ObjectKey, WorkspaceName

_MOST_BYTES: Final = 64 * 1024


class PinnedHost(msgspec.Struct, frozen=True):
    """The host key that a machine showed when torpor first met it."""

    host: str
    port: int
    host_key: str
    pinned_unix: float


class KnownHosts:
    """The pins of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        self._workspace = workspace

    def pinned(self, endpoint: Endpoint) -> Endpoint:
        """``endpoint`` with the host key that was pinned before, where it brings none itself."""
        if endpoint.host_key is not None:
            return endpoint
        host = self._read(endpoint)
        return msgspec.structs.replace(endpoint, host_key=host.host_key) if host else endpoint

    def pin(self, endpoint: Endpoint, host_key: str) -> None:
        """Record a host key at first use; HostKeyChanged if another one was recorded."""
        held = self._read(endpoint)
        if held is None:
            pin = PinnedHost(endpoint.host, endpoint.port, host_key, time.time())
            try:
                self._store.put(self._key(endpoint), msgspec.json.encode(pin), if_absent=True)
            except ObjectExists:  # another run pinned one meanwhile
                held = self._read(endpoint)
        if held is not None and held.host_key != host_key:
            raise HostKeyChanged(
                f"{endpoint.host}:{endpoint.port} shows another host key than the one recorded in "
                f"{self._store.address}: if you set it up again, delete {self._key(endpoint)} "
                "there; otherwise an attacker may be in between"
            )

    def _read(self, endpoint: Endpoint) -> PinnedHost | None:
        key = self._key(endpoint)
        try:
            body = self._store.get(key, max_bytes=_MOST_BYTES)
            return msgspec.json.decode(body, type=PinnedHost)
        except StoreMissing:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{key} in {self._store.address} is not what torpor wrote ({error}): compare the "
                "machine's host key yourself, then delete the object"
            ) from None

    def _key(self, endpoint: Endpoint) -> ObjectKey:
        place = hashlib.sha256(f"{endpoint.host}:{endpoint.port}".encode()).hexdigest()[:32]
        return ObjectKey(f"workspaces/{self._workspace}/hosts/{place}")
