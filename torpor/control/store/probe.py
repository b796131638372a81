"""Finds out what a store can do, by trying it on scratch objects. The store's name decides
nothing."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from botocore.exceptions import ClientError

from torpor.control.store.s3_errors import status_of
from torpor.control.store.s3_requests import S3Requests, headers_of
from torpor.shared.errors import StoreCorrupt, StoreError
from torpor.shared.transfer.etag import encryption_of, plain_md5
from torpor.shared.values import KIB, Capabilities

RACERS: Final = 8
BODY_BYTES: Final = 48 * KIB

_log = logging.getLogger(__name__)


def probe(requests: S3Requests) -> Capabilities:
    """Write, read, list and delete scratch objects: at most 26 requests, each with the usual
    retries.

    Raises if the store refuses plain use. Removes what it wrote; logs a warning if the key may not
    delete.
    """
    name, body = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(BODY_BYTES)
    # Outside of the clean-up: if this fails, nothing was written, and a wrong host would time out
    # once more for each name.
    answer = requests.send("probe", lambda: requests.put(f"{name}-plain", body))
    with _cleaned_up(requests, [f"{name}-plain", f"{name}-race"]):
        stated = plain_md5(answer.get("ETag"), encryption_of(headers_of(answer)))
        read = _read(requests, f"{name}-plain")
        if read != body:
            raise StoreCorrupt(
                f"probe of bucket {requests.bucket}: torpor wrote {BODY_BYTES} bytes and read "
                f"{len(read)} different ones back; do not keep work in this store"
            )
        list(requests.listed(name))
        return Capabilities(
            conditional_put=(once := _conditional_put(requests, name)),
            conditional_replace=once and _conditional_replace(requests, f"{name}-race"),
            etag_is_md5=stated == hashlib.md5(body, usedforsecurity=False).hexdigest(),
        )


def _conditional_put(requests: S3Requests, name: str) -> bool:
    """Whether a taken name is refused, and exactly one of racing writers to a free name wins."""
    if _put_if(requests, f"{name}-plain", b"second", IfNoneMatch="*"):
        return False
    return _one_wins(requests, f"{name}-race", "racer", IfNoneMatch="*")


def _conditional_replace(requests: S3Requests, key: str) -> bool:
    """Whether exactly one of racing writers that replace one version wins, and the others learn
    that their version is old."""
    version = requests.send("probe", lambda: requests.read(key, BODY_BYTES)[1].get("ETag"))
    return bool(version) and _one_wins(requests, key, "replacer", IfMatch=version)


def _one_wins(requests: S3Requests, key: str, name: str, **condition: str) -> bool:
    bodies = [f"{name} {n}".encode() for n in range(RACERS)]
    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(lambda body: _put_if(requests, key, body, **condition), bodies))
    return won.count(True) == 1 and _read(requests, key) == bodies[won.index(True)]


def _put_if(requests: S3Requests, key: str, body: bytes, **condition: str) -> bool:
    """Whether the store wrote the object. A store that does not know the header may answer 501."""

    def put() -> bool:
        try:
            requests.put(key, body, **condition)
        except ClientError as error:
            if status_of(error) >= 500 and status_of(error) != 501:
                raise
            return False
        return True

    return requests.send("probe", put)


def _read(requests: S3Requests, key: str) -> bytes:
    return requests.send("probe", lambda: requests.read(key, BODY_BYTES)[0])


@contextlib.contextmanager
def _cleaned_up(requests: S3Requests, keys: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            requests.delete(keys)
        except StoreError as error:
            # No error of the probe: a key without the right to delete can still store.
            _log.warning("probe objects %s stay in %s: %s", keys, requests.bucket, error)
