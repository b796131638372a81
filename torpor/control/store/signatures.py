"""Signatures of the control side's records: with the bucket's key alone nobody writes one.

A record tells torpor which command to run, which machine to end and which host to trust, and its
object lies in a bucket that others may write. So the control side signs each record over the
object's name and the record's bytes. A record of another workspace, another kind or another bucket
has another name or another key, so it is refused too.

What a signature cannot show: that an object was deleted, or that an older record, with its
signature, was put back over a newer one (docs/safety.md, "What somebody with the bucket's key can
do").
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec
from blake3 import blake3

from torpor.shared.errors import InvalidInput
from torpor.shared.values import ObjectKey, learned

ROOT_BYTES: Final = 32
ENVELOPE_BYTES: Final = 128
"""Bytes that signing adds to a record at most."""
_CONTEXT: Final = "torpor v1 signatures of records"


class Unsigned(ValueError):
    """The object is a record as torpor wrote them before it signed them, or no record at all."""


class Forged(ValueError):
    """The signature does not fit the object's name and bytes."""


class _Envelope(msgspec.Struct, frozen=True):
    signature: str  # 64 hexadecimal digits
    record: msgspec.Raw


class Signer:
    """Signs and checks the records of one bucket and prefix, with keyed BLAKE3 (a MAC of 32 bytes,
    https://github.com/BLAKE3-team/BLAKE3-specs, section 2.3). Thread-safe.

    ``root``: 32 secret bytes that the control sides of the store share. ``place``: bucket and
    prefix.
    """

    def __init__(self, root: bytes, place: str) -> None:
        if len(root) != ROOT_BYTES:
            raise InvalidInput(
                f"the key that signs records has {ROOT_BYTES} bytes, this one has {len(root)}"
            )
        self._key = blake3(root + place.encode(), derive_key_context=_CONTEXT).digest()

    def sign(self, name: ObjectKey, record: bytes) -> bytes:
        """The object of a record (one JSON value): the record and its signature, as JSON."""
        return msgspec.json.encode(_Envelope(self._signature(name, record), msgspec.Raw(record)))

    def check(self, name: ObjectKey, blob: bytes) -> bytes:
        """The record in an object of this name. Raises Unsigned and Forged."""
        found = _opened(blob)
        record = bytes(found.record)
        signature = self._signature(name, record).encode()
        if not hmac.compare_digest(found.signature.encode(), signature):
            raise Forged("its signature is of another record, name, bucket or key")
        return record

    def _signature(self, name: ObjectKey, record: bytes) -> str:
        named = name.encode()
        return blake3(len(named).to_bytes(8, "little") + named + record, key=self._key).hexdigest()


def place_of(bucket: str, prefix: str) -> str:
    """How signatures and key objects name a store."""
    base = prefix.strip("/")
    return f"{bucket}/{base}/" if base else f"{bucket}/"


def record_in(blob: bytes) -> bytes:
    """The record in a signed object, whoever signed it. Raises Unsigned."""
    return bytes(_opened(blob).record)


def _opened(blob: bytes) -> _Envelope:
    try:
        return msgspec.json.decode(blob, type=learned(_Envelope))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unsigned("it has no signature") from None
