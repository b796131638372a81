"""Leases and pinned host keys, kept in the store beside the snapshots they belong to.

A lease is written before its machine is created and marked when the machine is handed over, so that
the next run uses or destroys a machine whose creator was killed, and never forgets it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection
from typing import Final, Literal, TypeVar

import msgspec

from torpor.control.store.seam import ObjectStore
from torpor.shared.errors import HandedOver, HostKeyChanged, StoreError, StoreMissing
from torpor.shared.values import Endpoint, Label, ObjectKey, WorkspaceName

_MOST_BYTES: Final = 64 * 1024

_Record = TypeVar("_Record", bound=msgspec.Struct)


class Lease(msgspec.Struct, frozen=True):
    """One machine that was asked for. ``creating``: it holds no work yet."""

    label: Label
    provider: str
    state: Literal["creating", "handed over"]
    created_unix: float


class PinnedHost(msgspec.Struct, frozen=True):
    """The host key that a machine showed when torpor first met it."""

    host: str
    port: int
    host_key: str
    pinned_unix: float


def lease_key(label: Label) -> ObjectKey:
    """Where the lease of this label is kept."""
    return ObjectKey(f"workspaces/{label.workspace}/leases/{label.rental}")


class Ledger:
    """The leases and pins of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        self._workspace = workspace

    def open_lease(self, owner: str, provider: str) -> Lease:
        """Record that a machine is about to be created under a new label."""
        label = Label(owner, self._workspace, secrets.token_hex(8))
        lease = Lease(label, provider, "creating", time.time())
        self._write(lease_key(label), lease)
        return lease

    def see_unclaimed(self, label: Label) -> None:
        """Check that the lease is open and was not handed over. HandedOver if another run handed it
        over or closed it; StoreError if the store does not answer."""
        lease = f"lease {label.rental} of workspace {self._workspace}"
        try:
            now = self.lease_of(label)
        except StoreError as error:
            raise type(error)(
                f"{error}. The machine under {lease} may have been handed over, so torpor left it "
                "alone; reconcile lists it once the store answers"
            ) from error
        if now is None or now.state == "handed over":
            done = "closed" if now is None else "handed over"
            raise HandedOver(
                f"{lease} was {done} by another run; its machine was left alone, and reconcile "
                "lists it"
            )

    def unfinished(self, provider: str, standing: Collection[Label | None] = ()) -> list[Lease]:
        """Leases that were never handed over: their run was killed, or still works.

        Those of the provider, and those of the machines ``standing`` there, should it have had
        another name when they were written.
        """
        return [
            lease
            for lease in self.leases()
            if lease.state == "creating" and (lease.provider == provider or lease.label in standing)
        ]

    def leases(self) -> list[Lease]:
        """Every lease of the workspace, at any provider and in any state."""
        keys = [found.key for found in self._store.list(f"workspaces/{self._workspace}/leases/")]
        read = [self._read(key, Lease) for key in keys]
        return [lease for lease in read if lease is not None]

    def hand_over(self, lease: Lease) -> None:
        """Hand the machine over: from now on only a verified snapshot may end it."""
        self._write(lease_key(lease.label), msgspec.structs.replace(lease, state="handed over"))

    def close_lease(self, label: Label) -> None:
        """The machine is gone."""
        self._store.delete([lease_key(label)])

    def lease_of(self, label: Label) -> Lease | None:
        return self._read(lease_key(label), Lease)

    def pinned(self, endpoint: Endpoint) -> Endpoint:
        """``endpoint`` with the host key that was pinned before, where it brings none itself."""
        if endpoint.host_key is not None:
            return endpoint
        host = self._read(self._host_key(endpoint), PinnedHost)
        return msgspec.structs.replace(endpoint, host_key=host.host_key) if host else endpoint

    def pin(self, endpoint: Endpoint, host_key: str) -> None:
        """Record a host key at first use; HostKeyChanged if another one was recorded."""
        held = self._read(self._host_key(endpoint), PinnedHost)
        if held is not None and held.host_key != host_key:
            raise HostKeyChanged(
                f"{endpoint.host}:{endpoint.port} shows another host key than the one recorded in "
                f"{self._store.address}: if you rented it again, delete "
                f"{self._host_key(endpoint)} there; otherwise an attacker may be in between"
            )
        pin = PinnedHost(endpoint.host, endpoint.port, host_key, time.time())
        self._write(self._host_key(endpoint), pin)

    def _write(self, key: ObjectKey, value: msgspec.Struct) -> None:
        self._store.put(key, msgspec.json.encode(value))

    def _read(self, key: ObjectKey, kind: type[_Record]) -> _Record | None:
        try:
            return msgspec.json.decode(self._store.get(key, max_bytes=_MOST_BYTES), type=kind)
        except StoreMissing:
            return None
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"{key} in {self._store.address} is not what torpor wrote ({error}): check the "
                "machine that it may belong to, then delete the object"
            ) from None

    def _host_key(self, endpoint: Endpoint) -> ObjectKey:
        place = hashlib.sha256(f"{endpoint.host}:{endpoint.port}".encode()).hexdigest()[:32]
        return ObjectKey(f"workspaces/{self._workspace}/hosts/{place}")
