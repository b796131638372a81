"""Requests to one bucket: repeated where that may help, with our own errors."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from torpor.control.store.pace import moves, within
from torpor.control.store.s3_errors import code_of, explained, status_of
from torpor.shared.errors import (
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreUnavailable,
    StoreUnreachable,
)
from torpor.shared.transfer.retries import Retries
from torpor.shared.values import KIB

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

DELETE_BATCH: Final = 1000  # the most that DeleteObjects takes
MOST_PAGES: Final = 10_000
"""Pages of one listing at most. Stores send up to 1,000 names in a page; a store that sends a
hundred may still list as many objects as torpor takes in (s3.MOST_LISTED)."""
_READ_BYTES: Final = 256 * KIB
_NO_BATCH_STATUS: Final = {400, 403, 405, 411, 501}
"""Statuses by which a store, or a policy in front of it, refuses DeleteObjects. Objects are then
deleted one by one."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class S3Requests:
    """One bucket as boto3 reaches it. Names are below ``base``; ``address`` is for errors.

    ``send`` is the control side's only retry layer: a request goes out at most
    ``retries.attempts`` times, or as long as its patience says, because ``client_config`` has
    botocore send it once. (botocore follows a store's redirect to the bucket's region by itself,
    with a HeadBucket, once a client.) Each time may take as long as its bytes need (pace.py).
    """

    client: S3Client
    bucket: str
    base: str
    address: str
    retries: Retries
    reached: threading.Event = field(default_factory=threading.Event)
    """Set once the store has answered. If it cannot be reached later, it counts as away."""

    def send(self, what: str, request: Callable[[], _Answer]) -> _Answer:
        """The answer to ``request``, or its last error as ours; ``what`` is the verb and key."""

        def once() -> _Answer:
            try:
                with explained(what, self.address):
                    answer = within(f"{what} at {self.address}", self._timeout_s, request)
            except StoreUnreachable as error:
                if self.reached.is_set():
                    raise StoreUnavailable(str(error)) from None
                raise
            self.reached.set()
            return answer

        return self.retries.run(once)

    @property
    def _timeout_s(self) -> float:
        config: Any = self.client.meta.config
        return float(config.connect_timeout + config.read_timeout)

    def put(self, key: str, body: bytes, **request: Any) -> Any:
        """PutObject with Content-MD5, once."""
        moves(len(body))
        md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        return self.client.put_object(
            Bucket=self.bucket, Key=self.base + key, Body=body, ContentMD5=md5, **request
        )

    def read(self, key: str, most_bytes: int, **request: Any) -> tuple[bytes, Any]:
        """GetObject, once: the body, cut off a little after ``most_bytes``, and the answer."""
        answer = self.client.get_object(Bucket=self.bucket, Key=self.base + key, **request)
        body = bytearray()
        with answer["Body"] as stream:
            try:
                while len(body) <= most_bytes and (piece := stream.read(_READ_BYTES)):
                    body += piece
                    moves(len(piece))
            except (BotoCoreError, OSError) as error:
                raise StoreUnavailable(
                    f"get {key} at {self.address}: the connection broke after {len(body)} bytes "
                    f"({type(error).__name__})"
                ) from None
        length = answer.get("ContentLength")
        if length is None and "transfer-encoding" not in headers_of(answer):
            raise lacking(f"get {key} at {self.address}", "Content-Length")
        if len(body) <= most_bytes and length not in (None, len(body)):
            raise StoreUnavailable(
                f"get {key} at {self.address}: only {len(body)} of {length} bytes came"
            )
        return bytes(body), answer

    def listed(self, prefix: str) -> Iterator[Any]:
        """The listing's raw entries, page by page, with their full names."""
        token: dict[str, Any] = {}
        seen = set()
        for _ in range(MOST_PAGES):
            page = self.send(f"list {prefix!r}", lambda: self._page(prefix, token))  # noqa: B023
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            at = page.get("NextContinuationToken")
            if not at or at in seen:
                raise StoreCorrupt(
                    f"list {prefix!r} at {self.address}: the store repeats a page of its listing, "
                    "so the listing cannot be complete: try again, or use another store"
                )
            seen.add(at)
            token = {"ContinuationToken": at}
        raise StoreError(
            f"list {prefix!r} at {self.address}: the listing has no end after {MOST_PAGES} pages: "
            "use another store"
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete at most DELETE_BATCH objects, in one request if the store allows that."""
        for key in self._delete_batch(keys) if len(keys) > 1 else keys:
            self.send(f"delete {key}", lambda: self._delete_one(key))  # noqa: B023

    def require_bucket(self) -> None:
        """Raise StoreMissing if the bucket is missing: then a missing object proves nothing."""

        def is_there() -> bool:
            try:
                self.client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if status_of(error) == 404:
                    return False
                if status_of(error) != 403:  # a narrow policy may refuse this request
                    raise
            return True

        if not self.send("look for the bucket", is_there):
            raise StoreMissing(f"{self.address}: there is no bucket {self.bucket}; check its name")

    def _page(self, prefix: str, token: Mapping[str, Any]) -> Any:
        return self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.base + prefix, **token)

    def _delete_one(self, key: str) -> None:
        try:
            self.client.delete_object(Bucket=self.bucket, Key=self.base + key)
        except ClientError as error:
            if not is_missing_object(error):
                raise

    def _delete_batch(self, keys: Sequence[str]) -> list[str]:
        """Delete in one request; returns those that must be deleted one by one."""

        def once() -> list[str]:
            try:
                answer = self.client.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": self.base + key} for key in keys], "Quiet": True},
                )
            except ClientError as error:
                if status_of(error) in _NO_BATCH_STATUS:
                    return list(keys)
                raise
            refused = {error.get("Key") for error in answer.get("Errors", [])}
            return [key for key in keys if self.base + key in refused]

        return self.send(f"delete {len(keys)} objects", once)


def is_missing_object(error: ClientError) -> bool:
    return status_of(error) == 404 and code_of(error) != "NoSuchBucket"


def lacking(what: str, header: str) -> StoreError:
    """The error of an answer of which it is unknown whether it is whole, or which version it is."""
    return StoreError(
        f"{what}: the answer has no {header}: a proxy or gateway before the store may have removed "
        "it; go round it, or use another store"
    )


def headers_of(answer: Any) -> dict[str, str]:
    """The headers of boto3's answer or of a ClientError; names in lower case."""
    return dict(answer["ResponseMetadata"]["HTTPHeaders"])


def date_of(headers: Mapping[str, str], otherwise: float) -> float:
    """The time of the store's clock in its answer."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return otherwise
