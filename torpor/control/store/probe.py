"""What a store can do, found by trying on scratch objects. Nothing is assumed from its name."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from torpor.control.store.s3_errors import status_of
from torpor.shared.errors import StoreCorrupt
from torpor.shared.transfer.etag import encryption_of, plain_md5
from torpor.shared.values import KIB, Capabilities

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

RACERS = 8
BODY_BYTES = 48 * KIB
RANGE = (10_007, 30_011)  # first and last byte: odd, inside, longer than one network buffer

_log = logging.getLogger(__name__)


def probe(client: S3Client, bucket: str, base: str) -> Capabilities:
    """Try out ``bucket`` below ``base``; raises boto3's errors where plain use is refused.

    Leaves nothing behind, unless the key may not delete: that is logged.
    """
    name, body = f"{base}probe/{secrets.token_hex(8)}", secrets.token_bytes(BODY_BYTES)
    # Outside the clean-up: where this fails nothing was written, and a wrong host would have to
    # time out once more for each name.
    answer = client.put_object(
        Bucket=bucket, Key=f"{name}-plain", Body=body, ContentMD5=_content_md5(body)
    )
    with _cleaned_up(client, bucket, name):
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        stated = plain_md5(answer.get("ETag"), encryption_of(headers))
        read = client.get_object(Bucket=bucket, Key=f"{name}-plain")["Body"].read()
        if read != body:
            raise StoreCorrupt(
                f"probe of bucket {bucket}: {BODY_BYTES} bytes were written, and "
                f"{len(read)} other bytes came back; do not keep work in this store"
            )
        client.list_objects_v2(Bucket=bucket, Prefix=name, MaxKeys=10)
        range_get = _range_get(client, bucket, f"{name}-plain", body)
        return Capabilities(
            # After the range: a store that ignores the condition now overwrites the object.
            conditional_put=_conditional_put(client, bucket, name),
            rejects_wrong_md5=_rejects_wrong_md5(client, bucket, f"{name}-md5"),
            etag_is_md5=stated == hashlib.md5(body, usedforsecurity=False).hexdigest(),
            range_get=range_get,
        )


def _conditional_put(client: S3Client, bucket: str, name: str) -> bool:
    """A taken name is refused, and of racing writers to a free one exactly one wins."""
    if _put_if_absent(client, bucket, f"{name}-plain", b"second"):
        return False
    with ThreadPoolExecutor(RACERS) as pool:
        bodies = [f"racer {n}".encode() for n in range(RACERS)]
        won = list(
            pool.map(lambda body: _put_if_absent(client, bucket, f"{name}-race", body), bodies)
        )
    if won.count(True) != 1:
        return False
    kept = client.get_object(Bucket=bucket, Key=f"{name}-race")["Body"].read()
    return kept == bodies[won.index(True)]


def _put_if_absent(client: S3Client, bucket: str, key: str, body: bytes) -> bool:
    """Whether the store took it. A store that does not know the header may also answer 501."""
    try:
        client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        if status_of(error) >= 500 and status_of(error) != 501:
            raise
        return False
    return True


def _rejects_wrong_md5(client: S3Client, bucket: str, key: str) -> bool:
    try:
        client.put_object(Bucket=bucket, Key=key, Body=b"these", ContentMD5=_content_md5(b"those"))
    except ClientError as error:
        if status_of(error) >= 500 and status_of(error) != 501:
            raise
        return True
    return False


def _range_get(client: S3Client, bucket: str, key: str, body: bytes) -> bool:
    first, last = RANGE
    answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")
    return (
        answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        and answer.get("ContentRange") == f"bytes {first}-{last}/{len(body)}"
        and answer["Body"].read() == body[first : last + 1]
    )


@contextlib.contextmanager
def _cleaned_up(client: S3Client, bucket: str, name: str) -> Iterator[None]:
    try:
        yield
    finally:
        for suffix in ("-plain", "-race", "-md5"):
            try:
                client.delete_object(Bucket=bucket, Key=name + suffix)
            except (ClientError, BotoCoreError) as error:
                # Not an error of the probe: a key without the right to delete can still store.
                if not (isinstance(error, ClientError) and status_of(error) == 404):
                    _log.warning("the probe object %s stays in %s: %s", name, bucket, error)


def _content_md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
