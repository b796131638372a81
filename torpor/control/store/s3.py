"""An object store behind the S3 API: AWS, R2, B2, Wasabi, SeaweedFS and others, by settings."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, cast

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from torpor.control.store import probe
from torpor.control.store.authority import private_authority
from torpor.control.store.clock import StoreClock
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3_errors import code_of, explained, status_of
from torpor.control.store.s3_requests import (
    DELETE_BATCH,
    S3Requests,
    date_of,
    headers_of,
    is_missing_object,
    lacking,
)
from torpor.control.store.signatures import Signer, place_of
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    StoreCorrupt,
    StoreError,
    StoreMissing,
)
from torpor.shared.transfer.answer import carried_by
from torpor.shared.transfer.connections import target_of
from torpor.shared.transfer.etag import encryption_of, plain_md5
from torpor.shared.transfer.retries import ATTEMPTS, Retries
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Away, Capabilities, Grant, ObjectKey, StoredObject, object_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LONGEST_GRANT_S = 7 * 24 * 3600  # SigV4 allows no more
# listed objects at most: about 300 bytes each in memory, for 64 TB of packs
MOST_LISTED = 1_000_000
CONNECTIONS = 32
ARCHIVES = frozenset({"GLACIER", "DEEPARCHIVE", "ARCHIVE", "COLDARCHIVE", "DEEPCOLDARCHIVE"})
"""Storage classes of AWS, Tencent and Alibaba that nobody can read at once, in capitals without
underscores: Alibaba says ``ColdArchive`` and ``COLD_ARCHIVE``. GLACIER_IR is read at once."""
TIERED = "INTELLIGENT_TIERING"  # only a HEAD says whether AWS has moved the object to an archive

RootOf = Callable[[ObjectStore], bytes]
"""Reads the 32 secret bytes of a store from it."""

_session_lock = threading.Lock()  # a session makes one client at a time


@dataclass(frozen=True)
class S3Settings:
    """Where a store is and how to sign for it. ``endpoint_url`` None means AWS.

    A request is sent at most ``attempts`` times, ``read_timeout_s`` each, or while the store is
    away for no longer than ``patience_s``, which grants hand on. ``root``: the 32 bytes
    that the store's records are signed with, or what reads them from the store itself when the
    first record is; None where no record is read or written.
    ``verify_tls``: the file of the certificate authorities to trust, False for no check; None: as
    the AWS tools do (AWS_CA_BUNDLE, ca_bundle, REQUESTS_CA_BUNDLE), or the public ones.
    """

    bucket: str
    access_key: str
    secret_key: str = field(repr=False)
    endpoint_url: str | None = None
    region: str = "us-east-1"
    prefix: str = ""
    session_token: str | None = field(default=None, repr=False)
    root: bytes | RootOf | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    attempts: int = ATTEMPTS
    patience_s: float = 0.0
    virtual_host: bool = False  # BUCKET.HOST at an endpoint, too; AWS always has that
    verify_tls: Literal[False] | str | None = None


def _send_body_at_once(params: dict[str, Any], **_: Any) -> None:
    """botocore asks first whether a PUT may send its body. That costs a round trip, up to a second
    behind a proxy, and it has read an earlier request's answer for this one's (boto/botocore#3755).
    What we PUT is small, or a manifest."""
    params["headers"].pop("Expect", None)


def bucket_name(text: str) -> str:
    """Check the name of a bucket; raises InvalidInput."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", text):
        raise InvalidInput(f"{text!r} is not the name of a bucket")
    return text


class S3Store:
    """An ``ObjectStore`` over one bucket and prefix. Safe to use from several threads.

    Every request is sent as ``retries`` say. A call is one request, but for these:
    ``list`` is one for each 1,000 objects; ``delete`` one for each 1,000 keys, and one more for
    each key that the store does not delete in a batch; ``head`` of a missing object looks once for
    the bucket; ``put`` with ``if_absent`` asks once more, with a head where the store has no
    conditional writes, or with a get where the answer to an earlier attempt was lost; ``put`` with
    ``if_version`` asks likewise, and where the store has no conditional replace once before its
    write and once after it.
    """

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        prefix: str = "",
        *,
        retries: Retries | None = None,
        root: bytes | RootOf | None = None,
        authority: str = "",
    ) -> None:
        """``client`` must carry ``client_config``: it sends each request once, and without the
        checksums that break stores beside AWS. From now on it sends bodies without asking."""
        bucket_name(bucket)
        base = prefix.strip("/")
        self._base = f"{object_key(base)}/" if base else ""
        client.meta.events.register_last(
            "before-call.s3", _send_body_at_once, unique_id="torpor-body-at-once"
        )
        self._clock = StoreClock()
        client.meta.events.register_last("before-call.s3", self._note_asked)
        client.meta.events.register_last("after-call.s3", self._hear_date)
        self._client = client
        self._retries = retries or Retries()
        self._bucket = bucket
        self._authority = authority
        self._root, self._place = root, place_of(bucket, base)
        self._signer: Signer | None = None
        self._requests = S3Requests(client, bucket, self._base, self.address, self._retries)
        self._lock = threading.Lock()
        self._capabilities: Capabilities | None = None
        self._bucket_seen = False

    @classmethod
    def connect(
        cls, settings: S3Settings, on_away: Callable[[Away], None] | None = None
    ) -> S3Store:
        """A store from settings. Sends nothing; ``probe`` checks the settings. ``on_away`` hears of
        each wait that only patience explains. InvalidInput where the certificate authorities that
        are to be trusted cannot be read."""
        if settings.endpoint_url is not None:
            target_of(settings.endpoint_url, f"the endpoint {settings.endpoint_url!r}")
        if not settings.access_key or not settings.secret_key:
            raise InvalidInput(f"bucket {settings.bucket}: the access key or secret key is empty")
        with explained("connect", settings.endpoint_url or "AWS"), _session_lock:
            verify = _trusted() if settings.verify_tls is None else settings.verify_tls
            client = _session().client(
                "s3",
                endpoint_url=settings.endpoint_url,
                region_name=settings.region,
                aws_access_key_id=settings.access_key,
                aws_secret_access_key=settings.secret_key,
                aws_session_token=settings.session_token,
                verify=verify,
                config=client_config(settings),
            )
        return cls(
            client,
            settings.bucket,
            settings.prefix,
            retries=Retries(settings.attempts, patience_s=settings.patience_s, on_away=on_away),
            root=settings.root,
            authority=private_authority(verify)
            if isinstance(verify, str) and client.meta.endpoint_url.startswith("https:")
            else "",
        )

    def __repr__(self) -> str:
        return f"S3Store({self.address})"

    @property
    def address(self) -> str:
        return f"{self._client.meta.endpoint_url}/{self._bucket}/{self._base}".rstrip("/")

    @property
    def authority(self) -> str:
        return self._authority

    @property
    def signer(self) -> Signer:
        if self._root is None:
            raise InvalidInput(f"nobody gave {self.address} a key that signs its records")
        if self._signer is None:
            root = self._root(self) if callable(self._root) else self._root
            self._signer = Signer(root, self._place)
        return self._signer

    def close(self) -> None:
        """Close idle connections; the next call opens new ones. Not in ``ObjectStore``."""
        self._client.close()

    def holds_any(self, prefix: str) -> bool:
        """Whether there is an object below the prefix, by one request. Not in ``ObjectStore``."""
        return any(True for _ in self._requests.listed(prefix))

    def make_bucket(self) -> None:
        """Create the bucket if it is missing. For the embedded store and tests alone."""

        def make() -> None:
            try:
                self._client.create_bucket(Bucket=self._bucket)
            except ClientError as error:
                if code_of(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise

        self._requests.send("make the bucket", make)

    def probe(self) -> Capabilities:
        found = probe.probe(self._requests)
        self._capabilities, self._bucket_seen = found, True
        return found

    def clock_ahead_s(self) -> float:
        for _ in range(2):
            if self._clock.undecided:
                self._requests.require_bucket()
        return self._clock.ahead_s

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        object_key(key)
        request: dict[str, Any] = {}
        looks = if_version is not None and not self._known().conditional_replace
        if looks:
            now = self._look(key)
            if now is None or now.get("ETag") != if_version:
                raise self._changed(key)
        elif if_version is not None:
            request["IfMatch"] = if_version
        elif if_absent and self._known().conditional_put:
            request["IfNoneMatch"] = "*"
        elif if_absent and self.head(key) is not None:
            # A courtesy only: two writers may both pass. The name must be unique by itself.
            raise self._taken(key)
        answer = self._put(key, body, **request)
        if looks and not self._holds(key, body):
            raise self._changed(key)
        headers = headers_of(answer)
        stored = plain_md5(answer.get("ETag"), encryption_of(headers))
        if stored is not None and stored != _md5(body):
            raise StoreCorrupt(
                f"put {key} at {self.address}: the store holds MD5 {stored}, {_md5(body)} was sent "
                f"({len(body)} bytes)"
            )
        self._bucket_seen = True
        date_unix = date_of(headers, time.time())
        return StoredObject(key, len(body), stored, date_unix, etag=answer.get("ETag") or "")

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        return self._read(key, max_bytes)[0]

    def read(self, key: ObjectKey, *, max_bytes: int) -> tuple[bytes, str]:
        body, version = self._read(key, max_bytes)
        if not version:
            raise lacking(f"get {key} at {self.address}", "ETag")
        return body, version

    def _read(self, key: ObjectKey, max_bytes: int) -> tuple[bytes, str]:
        object_key(key)
        body, version = self._requests.send(f"get {key}", lambda: self._get_once(key, max_bytes))
        if len(body) > max_bytes:
            raise StoreCorrupt(
                f"get {key} at {self.address}: the object has more than the {max_bytes} bytes "
                "expected"
            )
        self._bucket_seen = True
        return body, version

    def get_range(self, key: ObjectKey, wanted: Range) -> bytes:
        object_key(key)
        return self._requests.send(f"get {key}", lambda: self._get_range_once(key, wanted))

    def head(self, key: ObjectKey) -> StoredObject | None:
        answer = self._look(key)
        if answer is None:
            return None
        md5 = plain_md5(answer.get("ETag"), encryption_of(headers_of(answer)))
        restored = 'ongoing-request="false"' in answer.get("Restore", "")
        readable = answer.get("StorageClass") == TIERED and not answer.get("ArchiveStatus")
        return StoredObject(
            key,
            answer["ContentLength"],
            md5,
            answer["LastModified"].timestamp(),
            "" if restored or readable else _archive(answer),
            answer.get("ETag") or "",
        )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object below the prefix, in key order.

        Sorted here: SeaweedFS, for one, lists folder by folder, ``a/1`` before ``a-b/1``. Objects
        whose names torpor would not write (a console's folder marks, say) are left out. A listing
        does not say how an object was encrypted: ``md5`` comes from the ETag, unless the probe saw
        that the ETags of this store are not MD5s.
        """
        if prefix:
            object_key(prefix.removesuffix("/"))
        md5s = self._capabilities is None or self._capabilities.etag_is_md5
        listed: dict[ObjectKey, StoredObject] = {}
        for found in self._requests.listed(prefix):
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
            etag = found.get("ETag") or ""
            md5 = plain_md5(etag, None) if md5s else None
            changed_unix = found["LastModified"].timestamp()
            listed[key] = StoredObject(key, found["Size"], md5, changed_unix, _archive(found), etag)
            if len(listed) > MOST_LISTED:
                raise StoreError(
                    f"list {prefix!r} at {self.address}: more than {MOST_LISTED} objects; give "
                    "the workspaces in this bucket prefixes of their own"
                )
        self._bucket_seen = True
        for key in sorted(listed):
            yield listed[key]

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        left = map(object_key, keys)
        while batch := [*islice(left, DELETE_BATCH)]:
            self._requests.delete(batch)

    def grant(self, verb: str, key: ObjectKey, *, expires_s: int) -> Grant:
        if verb not in ("PUT", "GET"):
            raise InvalidInput(f"a grant is for PUT or GET, not for {verb!r}")
        if not 1 <= expires_s <= LONGEST_GRANT_S:
            raise InvalidInput(f"a grant lasts 1 to {LONGEST_GRANT_S} s, not {expires_s} s")
        params = {"Bucket": self._bucket, "Key": self._full(key)}
        honoured = self._capabilities is not None and self._capabilities.conditional_put
        once = verb == "PUT" and honoured
        if once:
            params["IfNoneMatch"] = "*"
        expires_unix = int(time.time()) + expires_s
        with explained(f"sign a grant for {key}", self.address):
            url = self._client.generate_presigned_url(
                "put_object" if verb == "PUT" else "get_object",
                Params=params,
                ExpiresIn=expires_s,
            )
        if "X-Amz-Signature=" not in url:
            raise InvalidInput(
                f"the client for {self.address} does not sign with SigV4: make it with "
                "torpor.control.store.s3.client_config"
            )
        return Grant(
            key,
            cast(Literal["PUT", "GET"], verb),
            url,
            expires_unix,
            once,
            self._retries.patience_s,
        )

    def _look(self, key: ObjectKey) -> Any:
        """HeadObject's answer; None where the object does not exist."""
        full = self._full(key)

        def look() -> Any:
            try:
                return self._client.head_object(Bucket=self._bucket, Key=full)
            except ClientError as error:
                if not is_missing_object(error):
                    raise
                return None

        answer = self._requests.send(f"head {key}", look)
        for needed, header in (
            ("ContentLength", "Content-Length"),
            ("LastModified", "Last-Modified"),
        ):
            if answer is not None and needed not in answer:
                raise lacking(f"head {key} at {self.address}", header)
        if answer is None and not self._bucket_seen:
            self._requests.require_bucket()
        self._bucket_seen = True
        return answer

    def _put(self, key: ObjectKey, body: bytes, **request: Any) -> Any:
        """PutObject's answer. If the condition fails, the content decides: an earlier attempt of
        this call, or a copy that a proxy or a client made of its request, may have written it."""
        replaces = "IfMatch" in request

        def put() -> Any:
            try:
                return self._requests.put(key, body, **request)
            except ClientError as error:
                if status_of(error) != 412 and not (replaces and is_missing_object(error)):
                    raise
                return error.response

        answer = self._requests.send(f"put {key}", put)
        if answer["ResponseMetadata"]["HTTPStatusCode"] in (404, 412) and (
            not self._holds(key, body)
        ):
            raise self._changed(key) if replaces else self._taken(key)
        return answer

    def _holds(self, key: ObjectKey, body: bytes) -> bool:
        try:
            return self.get(key, max_bytes=len(body)) == body
        except (StoreMissing, StoreCorrupt):
            return False

    def _get_once(self, key: ObjectKey, max_bytes: int) -> tuple[bytes, str]:
        """The object and its ETag. Of an object that is too long, slightly more than ``max_bytes``
        are returned."""
        body, answer = self._requests.read(key, max_bytes)
        stated = plain_md5(answer.get("ETag"), encryption_of(headers_of(answer)))
        known = self._capabilities is not None and self._capabilities.etag_is_md5
        if len(body) <= max_bytes and known and stated and stated != _md5(body):
            raise StoreCorrupt(
                f"get {key} at {self.address}: the bytes that came do not have the MD5 {stated}"
            )
        return body, answer.get("ETag", "")

    def _get_range_once(self, key: ObjectKey, wanted: Range) -> bytes:
        """A store that ignores the range sends the object from its beginning: skip the rest."""
        body, answer = self._requests.read(
            key, wanted.end, Range=f"bytes={wanted.offset}-{wanted.end - 1}"
        )
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        carried = carried_by(status, answer.get("ContentRange"), answer.get("ContentLength"))
        if not carried.start <= wanted.offset < wanted.end <= carried.stop:
            raise StoreCorrupt(
                f"get {key} at {self.address}: asked for bytes {wanted.offset} to {wanted.end}, "
                f"the store sends {carried.start} to {carried.stop}: the object is shorter"
            )
        return body[wanted.offset - carried.start :][: wanted.length]

    def _known(self) -> Capabilities:
        with self._lock:
            return self._capabilities or self.probe()

    def _taken(self, key: ObjectKey) -> ObjectExists:
        return ObjectExists(f"put {key} at {self.address}: an object of that name is there already")

    def _changed(self, key: ObjectKey) -> ObjectChanged:
        return ObjectChanged(
            f"put {key} at {self.address}: it was written or deleted since it was read; read it "
            "again"
        )

    def _note_asked(self, context: dict[str, Any], **_: Any) -> None:
        context["torpor_asked_unix"] = time.time()

    def _hear_date(self, context: dict[str, Any], parsed: Any, **_: Any) -> None:
        """Note the date of an answer that the store itself made: a gateway may send errors, and a
        cache sends an ``Age``."""
        status, headers = parsed["ResponseMetadata"]["HTTPStatusCode"], headers_of(parsed)
        if 200 <= status < 300 and "age" not in headers:
            date = headers.get("date", "")
            self._clock.hear(date, context["torpor_asked_unix"], time.time())

    def _full(self, key: ObjectKey) -> str:
        return self._base + object_key(key)


@functools.cache
def _session() -> boto3.session.Session:
    """One session for all clients: each session loads botocore's AWS data again, 0.2 s of CPU."""
    return boto3.session.Session()


def _trusted() -> str | bool:
    """The file of certificate authorities that botocore takes where nobody has named one; True for
    certifi's."""
    named = botocore.session.get_session().get_config_variable("ca_bundle")
    return named or os.environ.get("REQUESTS_CA_BUNDLE") or True


def client_config(settings: S3Settings | None = None) -> Config:
    """How a boto3 S3 client must be configured: it sends a request once, and in a way that stores
    beside AWS understand."""
    chosen = settings or S3Settings("unnamed", "", "", endpoint_url="http://unnamed")
    by_host = chosen.virtual_host or not chosen.endpoint_url
    return Config(
        signature_version="s3v4",
        # boto3 >= 1.36 otherwise adds and expects checksums that other stores refuse or garble.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=chosen.connect_timeout_s,
        read_timeout=chosen.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 1},  # S3Requests.send repeats
        max_pool_connections=CONNECTIONS,
        s3={"addressing_style": "virtual" if by_host else "path"},
    )


def _archive(answer: Any) -> str:
    """The storage class of an object whose bytes may not be readable; empty for any other."""
    named = str(answer.get("StorageClass") or "")
    return named if named == TIERED or named.upper().replace("_", "") in ARCHIVES else ""


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
