"""What torpor asks of an object store, as the control side sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torpor.control.store.signatures import Signer
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Capabilities, Grant, ObjectKey, StoredObject


class ObjectStore(Protocol):
    """A bucket and prefix. Keys are below the prefix and are checked on the way in and out.

    Every method may raise StoreDenied, StoreMissing (the bucket, or the object where one is
    named) or StoreUnavailable (after the adapter's own bounded retries). All are idempotent.
    Only the control side holds one; machines get grants.
    """

    @property
    def address(self) -> str:
        """For messages: endpoint, bucket and prefix, never a credential."""

    @property
    def authority(self) -> str:
        """The certificates (PEM) of the authorities that whoever uses a grant must trust beside the
        public ones; empty for none."""

    @property
    def signer(self) -> Signer:
        """The signer that signs and checks the records of this store. InvalidInput where it has no
        key. The first use may read the key from the store, and raises then as ``get`` does;
        KeyUnknown and KeyDamaged where the key that it has opens none."""

    def probe(self) -> Capabilities:
        """Write, read and delete scratch objects to see what the store can do.

        Raises the error a user can act on when the endpoint, bucket or key is wrong.
        """

    def clock_ahead_s(self) -> float:
        """Seconds by which the clock that dates the store's objects is ahead of this host's, as far
        as answers have shown; 0.0 for a few seconds. Sends a request if one more answer would
        decide."""

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        """Write a small object whole, with Content-MD5. With ``if_absent``, raises ObjectExists
        if the store supports that; otherwise the name must be unique by itself.

        With ``if_version``, replaces the version that ``read`` returned and no other; raises
        ObjectChanged if another write or a delete came first. Without conditional_replace, the
        adapter compares right before its write and reads back right after it: then a write may
        be overwritten by one that was sent at the same time, or that arrives late.
        A write of which only the answer was lost has succeeded."""

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        """Read a whole object; StoreCorrupt, with bounded memory, if it exceeds ``max_bytes``."""

    def read(self, key: ObjectKey, *, max_bytes: int) -> tuple[bytes, str]:
        """Read as ``get`` does; returns also the version of what was read. Equal bytes may have
        equal versions."""

    def get_range(self, key: ObjectKey, wanted: Range) -> bytes:
        """Read exactly these bytes of an object; StoreCorrupt if it is shorter."""

    def head(self, key: ObjectKey) -> StoredObject | None:
        """The object as it is now, without its bytes; None if it is absent."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key begins with ``prefix``, in key order."""

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        """Delete; a key that is already gone is fine."""

    def grant(self, verb: str, key: ObjectKey, *, expires_s: int) -> Grant:
        """Presign one verb (PUT or GET) on one object for ``expires_s`` (1 s to 7 days). Where
        ``probe`` has seen that the store honours it, a PUT is ``once``: it replaces nothing."""
