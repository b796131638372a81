"""Find out what a store can do, by trying it on scratch objects. Its name decides nothing."""

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
    """Write, read, list and delete scratch objects: at most 16 requests, each sent again as any.

    Raises if the store refuses plain use. Removes what it wrote; logs a warning if the key may not
    delete.
    """
    name, body = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(BODY_BYTES)
    # Outside the clean-up: if this fails, nothing was written, and a wrong host would time out once
    # more for each name.
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
            conditional_put=_conditional_put(requests, name),
            etag_is_md5=stated == hashlib.md5(body, usedforsecurity=False).hexdigest(),
        )


def _conditional_put(requests: S3Requests, name: str) -> bool:
    """A taken name is refused, and of racing writers to a free one exactly one wins."""
    if _put_if_absent(requests, f"{name}-plain", b"second"):
        return False
    with ThreadPoolExecutor(RACERS) as pool:
        bodies = [f"racer {n}".encode() for n in range(RACERS)]
        won = list(pool.map(lambda body: _put_if_absent(requests, f"{name}-race", body), bodies))
    if won.count(True) != 1:
        return False
    return _read(requests, f"{name}-race") == bodies[won.index(True)]


def _put_if_absent(requests: S3Requests, key: str, body: bytes) -> bool:
    """Whether the store wrote it. A store that does not know the header may answer 501."""

    def put() -> bool:
        try:
            requests.put(key, body, IfNoneMatch="*")
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
            # Not an error of the probe: a key without the right to delete can still store.
            _log.warning("probe objects %s stay in %s: %s", keys, requests.bucket, error)
