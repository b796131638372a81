"""An object store in this process, for trials that need no S3 server and keep nothing.

Its grants are served on loopback by a thread of this process, from the first grant on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qs, urlsplit

from torpor.control.store.clock import SAME_S
from torpor.control.store.s3 import LONGEST_GRANT_S
from torpor.control.store.signatures import ROOT_BYTES, Signer
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    StoreCorrupt,
    StoreError,
    StoreMissing,
)
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Capabilities, Grant, ObjectKey, StoredObject, object_key

_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")


class MemoryStore:
    """An ``ObjectStore`` over a dictionary. Safe to use from several threads. ``now``: a clock
    of its own."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or (lambda: time.time())  # time.time may be replaced later
        self._own_clock = now is not None
        self._lock = threading.RLock()
        self._objects: dict[ObjectKey, tuple[StoredObject, bytes]] = {}
        self._secret = secrets.token_bytes(16)
        self.signer = Signer(secrets.token_bytes(ROOT_BYTES), "")
        self.authority = ""
        self._server: _GrantServer | None = None
        self.takes_conditions = True

    @property
    def address(self) -> str:
        return "memory://"

    def close(self) -> None:
        """Stop serving grants. Idempotent."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def probe(self) -> Capabilities:
        self._check()
        takes = self.takes_conditions
        return Capabilities(conditional_put=takes, conditional_replace=takes, etag_is_md5=True)

    def clock_ahead_s(self) -> float:
        ahead_s = self._now() - time.time() if self._own_clock else 0.0
        return ahead_s if abs(ahead_s) > SAME_S else 0.0

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        self._check(key)
        with self._lock:
            there = self._objects.get(key)
            if if_version is not None and (there is None or there[0].md5 != if_version):
                raise ObjectChanged(f"put {key} at {self.address}: it was written since")
            if if_absent and key in self._objects:
                raise ObjectExists(f"put {key} at {self.address}: an object is there already")
            md5 = md5_of(body).hex()
            stored = StoredObject(key, len(body), md5, self._now(), etag=md5)
            self._objects[key] = (stored, bytes(body))
        return stored

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        body = self._body(key)
        if len(body) > max_bytes:
            raise StoreCorrupt(
                f"get {key} at {self.address}: the object has more than the {max_bytes} bytes "
                "expected"
            )
        return body

    def read(self, key: ObjectKey, *, max_bytes: int) -> tuple[bytes, str]:
        body = self.get(key, max_bytes=max_bytes)
        return body, md5_of(body).hex()

    def get_range(self, key: ObjectKey, wanted: Range) -> bytes:
        body = self._body(key)
        if wanted.end > len(body):
            raise StoreCorrupt(f"get {key} at {self.address}: it has {len(body)} bytes")
        return body[wanted.offset : wanted.end]

    def head(self, key: ObjectKey) -> StoredObject | None:
        self._check(key)
        with self._lock:
            found = self._objects.get(key)
        return found[0] if found else None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self._check()
        with self._lock:
            found = [stored for key, (stored, _) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found, key=lambda stored: stored.key))

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._check(key)
            with self._lock:
                self._objects.pop(key, None)

    def grant(self, verb: str, key: ObjectKey, *, expires_s: int) -> Grant:
        self._check(key)
        if verb not in ("PUT", "GET"):
            raise InvalidInput(f"a grant is for PUT or GET, not for {verb!r}")
        if not 1 <= expires_s <= LONGEST_GRANT_S:
            raise InvalidInput(f"a grant lasts 1 to {LONGEST_GRANT_S} s, not {expires_s} s")
        with self._lock:
            if self._server is None:
                self._server = _GrantServer(self)
            base = self._server.url
        expires_unix = int(time.time()) + expires_s
        once = verb == "PUT" and self.takes_conditions
        signature = self.signature(verb, f"/{key}", expires_unix, "*" if once else None)
        url = f"{base}/{key}?Expires={expires_unix}&Signature={signature}"
        verb = cast(Literal["PUT", "GET"], verb)
        return Grant(key, verb, url, expires_unix, once)

    def signature(self, verb: str, path: str, expires_unix: int, condition: str | None) -> str:
        """The signature that the URL of a grant must carry. It covers ``If-None-Match``."""
        said = f"{verb} {path} {expires_unix} {condition}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()

    def _body(self, key: ObjectKey) -> bytes:
        self._check(key)
        with self._lock:
            if key not in self._objects:
                raise StoreMissing(f"get {key} at {self.address}: no such object")
            return self._objects[key][1]

    def _check(self, key: ObjectKey | None = None) -> None:
        if key is not None:
            object_key(key)


def md5_of(body: bytes) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


class _GrantServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a client that hangs up: agents may be killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _GrantServer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key = self._granted()
        if key is None:
            return
        if self.headers["Content-MD5"] != base64.b64encode(md5_of(body)).decode():
            self._refuse(400, "BadDigest")
            return
        try:
            stored = self.server.store.put(key, body, if_absent="If-None-Match" in self.headers)
        except ObjectExists:
            self._refuse(412, "PreconditionFailed")
            return
        except StoreError:
            self._refuse(503, "ServiceUnavailable")
            return
        self._answer(200, b"", {"ETag": f'"{stored.md5}"'})

    def do_GET(self) -> None:
        key = self._granted()
        if key is None:
            return
        try:
            body = self.server.store.get(key, max_bytes=1 << 40)
        except StoreMissing:
            self._refuse(404, "NoSuchKey")
            return
        except StoreError:
            self._refuse(503, "ServiceUnavailable")
            return
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, body, {})
            return
        first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
        if first > last:
            self._refuse(416, "InvalidRange")
            return
        headers = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
        self._answer(206, memoryview(body)[first : last + 1], headers)

    def _granted(self) -> ObjectKey | None:
        """The key for which the URL is signed; None after the request was refused."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        expires_unix = int(query["Expires"][0])
        condition = self.headers["If-None-Match"]
        signature = self.server.store.signature(self.command, parts.path, expires_unix, condition)
        if not hmac.compare_digest(signature, query["Signature"][0]):
            self._refuse(403, "SignatureDoesNotMatch")
        elif time.time() > expires_unix:
            self._refuse(403, "ExpiredRequest")
        else:
            return ObjectKey(parts.path[1:])
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode(), {})

    def _answer(self, status: int, body: Any, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        headers = {**headers, "Content-Length": str(len(body)), "Date": formatdate(usegmt=True)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
