"""An object store behind the S3 API: AWS, R2, B2, Wasabi, SeaweedFS and others, by settings."""

from __future__ import annotations

import base64
import builtins
import hashlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from torpor.control.store import probe
from torpor.control.store.s3_errors import code_of, explained, status_of
from torpor.shared.errors import (
    InvalidInput,
    ObjectExists,
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from torpor.shared.transfer.connections import target_of
from torpor.shared.transfer.etag import encryption_of, plain_md5
from torpor.shared.values import KIB, Capabilities, Grant, ObjectKey, StoredObject, object_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LONGEST_GRANT_S = 7 * 24 * 3600  # SigV4 allows no more
DELETE_BATCH = 1000  # DeleteObjects takes no more
MOST_LISTED = 1_000_000  # at about 300 bytes each in memory; 64 TB of packs
CONNECTIONS = 32
TRIES = 5  # of what botocore does not repeat: a body cut short, a 409 between writers
FIRST_WAIT_S = 0.1
READ_BYTES = 256 * KIB

# Single deletes follow where a store, or a policy in front of it, refuses DeleteObjects.
_NO_BATCH_STATUS = {400, 403, 405, 411, 501}

_dice = random.SystemRandom()


@dataclass(frozen=True)
class S3Settings:
    """Where a store is and how to sign for it. ``endpoint_url`` None means AWS."""

    bucket: str
    access_key: str
    secret_key: str = field(repr=False)
    endpoint_url: str | None = None
    region: str = "us-east-1"
    prefix: str = ""
    session_token: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    attempts: int = 5
    verify_tls: bool | str = True  # or the file of a certificate authority of one's own


class S3Store:
    """The seam's ObjectStore over one bucket and prefix. Safe to use from several threads."""

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        prefix: str = "",
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``client`` should carry ``client_config``: other checksums break stores beside AWS."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", bucket):
            raise InvalidInput(f"{bucket!r} is not the name of a bucket")
        base = prefix.strip("/")
        self._base = f"{object_key(base)}/" if base else ""
        self._client = client
        self._bucket = bucket
        self._sleep = sleep
        self._lock = threading.Lock()
        self._capabilities: Capabilities | None = None
        self._bucket_seen = False

    @classmethod
    def connect(cls, settings: S3Settings) -> S3Store:
        """A store from settings. Nothing is sent yet; ``probe`` tells whether they are right."""
        if settings.endpoint_url is not None:
            target_of(settings.endpoint_url, f"the endpoint {settings.endpoint_url!r}")
        if not settings.access_key or not settings.secret_key:
            raise InvalidInput(f"bucket {settings.bucket}: the access key or secret key is empty")
        with explained("connect", settings.endpoint_url or "AWS"):
            client = boto3.session.Session().client(
                "s3",
                endpoint_url=settings.endpoint_url,
                region_name=settings.region,
                aws_access_key_id=settings.access_key,
                aws_secret_access_key=settings.secret_key,
                aws_session_token=settings.session_token,
                verify=settings.verify_tls,
                config=client_config(settings),
            )
        return cls(client, settings.bucket, settings.prefix)

    def __repr__(self) -> str:
        return f"S3Store({self.address})"

    @property
    def address(self) -> str:
        return f"{self._client.meta.endpoint_url}/{self._bucket}/{self._base}".rstrip("/")

    def make_bucket(self) -> None:
        """Create the bucket where it is missing. For a store of one's own; not in the seam."""
        with self._explained("make the bucket"):
            try:
                self._client.create_bucket(Bucket=self._bucket)
            except ClientError as error:
                if code_of(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise

    def probe(self) -> Capabilities:
        with self._explained("probe"):
            found = probe.probe(self._client, self._bucket, self._base)
        self._capabilities, self._bucket_seen = found, True
        return found

    def put(self, key: ObjectKey, body: bytes, *, if_absent: bool = False) -> StoredObject:
        if if_absent and not self._known().conditional_put and self.head(key) is not None:
            # A courtesy only: two writers may both pass. The name must be unique by itself.
            raise self._taken(key)
        conditional = if_absent and self._known().conditional_put
        md5 = hashlib.md5(body, usedforsecurity=False)
        request: dict[str, Any] = {
            "Bucket": self._bucket,
            "Key": self._full(key),
            "Body": body,
            "ContentMD5": base64.b64encode(md5.digest()).decode(),
        }
        if conditional:
            request["IfNoneMatch"] = "*"
        answer = self._put(key, body, request)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        stored = plain_md5(answer.get("ETag"), encryption_of(headers))
        if stored is not None and stored != md5.hexdigest():
            raise StoreCorrupt(
                f"put {key} at {self.address}: the store holds MD5 {stored}, {md5.hexdigest()} "
                f"was sent ({len(body)} bytes)"
            )
        self._bucket_seen = True
        return StoredObject(key, len(body), stored, _date_of(headers))

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                body = self._get_once(key, max_bytes)
            except (StoreUnavailable, StoreCorrupt):
                if not left:
                    raise
                self._back_off(TRIES - left)
            else:
                break
        if len(body) > max_bytes:
            raise StoreCorrupt(
                f"get {key} at {self.address}: more than the {max_bytes} bytes that it may have"
            )
        return body

    def head(self, key: ObjectKey) -> StoredObject | None:
        full = self._full(key)
        with self._explained(f"head {key}"):
            try:
                answer = self._client.head_object(Bucket=self._bucket, Key=full)
            except ClientError as error:
                if status_of(error) != 404 or code_of(error) == "NoSuchBucket":
                    raise
                self._check_bucket()
                return None
        self._bucket_seen = True
        md5 = plain_md5(answer["ETag"], encryption_of(answer["ResponseMetadata"]["HTTPHeaders"]))
        return StoredObject(key, answer["ContentLength"], md5, answer["LastModified"].timestamp())

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object below the prefix, in key order.

        Sorted here: SeaweedFS, for one, lists folder by folder, ``a/1`` before ``a-b/1``. Objects
        whose names torpor would not write (a console's folder marks, say) are not ours and are
        left out. The listing does not tell how an object was encrypted: ``md5`` comes from the
        ETag, unless the probe saw that this store's are not MD5s.
        """
        if prefix:
            object_key(prefix.removesuffix("/"))
        md5s = self._capabilities is None or self._capabilities.etag_is_md5
        listed: dict[ObjectKey, StoredObject] = {}
        for found in self._listed(self._base + prefix):
            full = found["Key"]
            if not full.startswith(self._base + prefix):
                raise StoreCorrupt(
                    f"list {prefix!r} at {self.address}: the store names {full!r}, which is not "
                    "below the prefix"
                )
            try:
                key = object_key(full[len(self._base) :])
            except InvalidInput:
                continue
            md5 = plain_md5(found.get("ETag"), None) if md5s else None
            listed[key] = StoredObject(key, found["Size"], md5, found["LastModified"].timestamp())
            if len(listed) > MOST_LISTED:
                raise StoreError(
                    f"list {prefix!r} at {self.address}: more than {MOST_LISTED} objects; give "
                    "the workspaces in this bucket prefixes of their own"
                )
        for key in sorted(listed):
            yield listed[key]

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        left = iter(keys)
        while batch := [self._full(key) for key in islice(left, DELETE_BATCH)]:
            for full in self._delete_batch(batch) if len(batch) > 1 else batch:
                with self._explained(f"delete {full[len(self._base) :]}"):
                    try:
                        self._client.delete_object(Bucket=self._bucket, Key=full)
                    except ClientError as error:
                        if status_of(error) != 404 or code_of(error) == "NoSuchBucket":
                            raise

    def grant(self, verb: str, key: ObjectKey, *, expires_s: int) -> Grant:
        if verb not in ("PUT", "GET"):
            raise InvalidInput(f"a grant is for PUT or GET, not for {verb!r}")
        if not 1 <= expires_s <= LONGEST_GRANT_S:
            raise InvalidInput(f"a grant lasts 1 to {LONGEST_GRANT_S} s, not {expires_s} s")
        full = self._full(key)
        expires_unix = int(time.time()) + expires_s
        with self._explained(f"sign a grant for {key}"):
            url = self._client.generate_presigned_url(
                "put_object" if verb == "PUT" else "get_object",
                Params={"Bucket": self._bucket, "Key": full},
                ExpiresIn=expires_s,
            )
        if "X-Amz-Signature=" not in url:
            raise InvalidInput(
                f"the client for {self.address} does not sign with SigV4: make it with "
                "torpor.control.store.s3.client_config"
            )
        return Grant(key, cast(Literal["PUT", "GET"], verb), url, expires_unix)

    def _put(self, key: ObjectKey, body: bytes, request: dict[str, Any]) -> dict[str, Any]:
        """PutObject; a 409 between racing conditional writers is tried again."""
        for left in reversed(range(TRIES)):
            repeated = left < TRIES - 1
            with self._explained(f"put {key}"):
                try:
                    return cast(dict[str, Any], self._client.put_object(**request))
                except ClientError as error:
                    status = status_of(error)
                    metadata = error.response["ResponseMetadata"]
                    repeated = repeated or metadata.get("RetryAttempts", 0) > 0
                    if status == 412 and repeated and self._holds(key, body):
                        # The answer to our own first attempt was lost; the object is ours.
                        return cast(dict[str, Any], error.response)
                    if status == 412:
                        raise self._taken(key) from None
                    if status != 409 or not left:
                        raise
            self._back_off(TRIES - left)
        raise AssertionError("unreachable: the last try returns or raises")

    def _holds(self, key: ObjectKey, body: bytes) -> bool:
        try:
            return self.get(key, max_bytes=len(body)) == body
        except (StoreMissing, StoreCorrupt):
            return False

    def _get_once(self, key: ObjectKey, max_bytes: int) -> bytes:
        """The object, or where it is too long, somewhat more than ``max_bytes`` of it."""
        what = f"get {key} at {self.address}"
        with self._explained(f"get {key}"):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._full(key))
            with answer["Body"] as stream:
                body = bytearray()
                try:
                    while len(body) <= max_bytes and (piece := stream.read(READ_BYTES)):
                        body += piece
                except (BotoCoreError, OSError) as error:
                    raise StoreUnavailable(
                        f"{what}: the body broke off after {len(body)} bytes "
                        f"({type(error).__name__})"
                    ) from None
        if len(body) > max_bytes:
            return bytes(body)
        if len(body) != answer["ContentLength"]:
            raise StoreUnavailable(f"{what}: {len(body)} of {answer['ContentLength']} bytes came")
        stated = plain_md5(answer["ETag"], encryption_of(answer["ResponseMetadata"]["HTTPHeaders"]))
        known = self._capabilities is not None and self._capabilities.etag_is_md5
        if known and stated and stated != hashlib.md5(body, usedforsecurity=False).hexdigest():
            raise StoreCorrupt(f"{what}: the bytes that came do not have the MD5 {stated}")
        self._bucket_seen = True
        return bytes(body)

    def _listed(self, full_prefix: str) -> Iterator[Any]:
        """The listing's raw entries, page by page; every page is one retried request."""
        token: dict[str, Any] = {}
        seen = set()
        while True:
            with self._explained(f"list {full_prefix[len(self._base) :]!r}"):
                page = self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=full_prefix, **token
                )
            self._bucket_seen = True
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            at = page.get("NextContinuationToken")
            if not at or at in seen:
                raise StoreCorrupt(
                    f"list {full_prefix!r} at {self.address}: the store says that there is more, "
                    "and leads in a circle"
                )
            seen.add(at)
            token = {"ContinuationToken": at}

    def _delete_batch(self, batch: builtins.list[str]) -> builtins.list[str]:
        """Delete in one request; returns those that must be deleted one by one."""
        with self._explained(f"delete {len(batch)} objects"):
            try:
                answer = self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": full} for full in batch], "Quiet": True},
                )
            except ClientError as error:
                if status_of(error) in _NO_BATCH_STATUS:
                    return batch
                raise
        refused = {error.get("Key") for error in answer.get("Errors", [])}
        return [full for full in batch if full in refused]

    def _check_bucket(self) -> None:
        """Raise unless the bucket is there: a missing object in no bucket is not an absence."""
        if self._bucket_seen:
            return
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            if status_of(error) == 404:
                raise StoreMissing(
                    f"{self.address}: there is no bucket {self._bucket}; check its name"
                ) from None
            if status_of(error) != 403:  # a narrow policy may refuse the question
                raise
        self._bucket_seen = True

    def _known(self) -> Capabilities:
        with self._lock:
            return self._capabilities or self.probe()

    def _taken(self, key: ObjectKey) -> ObjectExists:
        return ObjectExists(f"put {key} at {self.address}: an object of that name is there already")

    def _back_off(self, failed: int) -> None:
        longest_s = FIRST_WAIT_S * 2**failed
        self._sleep(_dice.uniform(longest_s / 2, longest_s))

    def _full(self, key: ObjectKey) -> str:
        return self._base + object_key(key)

    def _explained(self, what: str) -> Any:
        return explained(what, self.address)


def client_config(settings: S3Settings | None = None) -> Config:
    """How a boto3 S3 client must be configured for stores beside AWS to understand it."""
    chosen = settings or S3Settings("unnamed", "", "", endpoint_url="http://unnamed")
    return Config(
        signature_version="s3v4",
        # boto3 >= 1.36 otherwise adds and expects checksums that other stores refuse or garble.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=chosen.connect_timeout_s,
        read_timeout=chosen.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": chosen.attempts},
        max_pool_connections=CONNECTIONS,
        s3={"addressing_style": "path" if chosen.endpoint_url else "virtual"},
    )


def _date_of(headers: dict[str, str]) -> float:
    """The store's clock as its answer states it, or ours where it does not."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return time.time()
