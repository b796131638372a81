"""What a store's HTTP answer to a grant means, as an error of our tree."""

from __future__ import annotations

import http.client
import re
import sys
from email.utils import parsedate_to_datetime

from torpor.shared.errors import (
    GrantExpired,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from torpor.shared.values import KIB, Grant

ERROR_BODY_BYTES = 16 * KIB  # S3 error bodies are below 1 KiB; a proxy's HTML page may be more

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,300})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")

# Answers to a body that was damaged or cut on its way to the store; sending it again may help.
_DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}
_BUSY = {"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict"}
_EXPIRED = {"ExpiredToken", "ExpiredRequest", "RequestExpired", "RequestTimeTooSkewed"}
# rclone says the last one of every signature older than 15 minutes, whatever its own limit.
_EXPIRED_WORDS = re.compile(r"expired|difference between the request time", re.IGNORECASE)


def refusal(grant: Grant, host: str, answer: http.client.HTTPResponse, body: bytes) -> StoreError:
    """The error that an answer other than the one hoped for stands for."""
    text = body.decode("utf-8", "replace")
    code = found[1] if (found := _CODE.search(text)) else ""
    said = found[1].strip() if (found := _MESSAGE.search(text)) else ""
    status = answer.status
    what = f"{grant.verb} {grant.key} at {host}"
    reason = f"HTTP {status}" + (f" {code}" if code else "") + (f": {said}" if said else "")
    if status in (400, 401, 403) and _is_expired(grant, answer, code, said):
        return GrantExpired(
            f"{what}: the grant's time is over ({reason}); ask for a new one, "
            "and check the control side's clock where that is refused too"
        )
    if status >= 500 or status in (408, 425, 429) or code in _BUSY:
        busy = StoreUnavailable(f"{what}: the store cannot take the request now ({reason})")
        busy.retry_after_s = _retry_after_s(answer)
        return busy
    if code in _DAMAGED:
        return StoreCorrupt(f"{what}: the body was damaged on the way ({reason})")
    if status in (401, 403) or code == "AccessDenied":
        return StoreDenied(
            f"{what}: refused ({reason}); check that the store's key may do this on the bucket, "
            "and the control side's clock"
        )
    if status == 404:
        return StoreMissing(f"{what}: no such object or bucket ({reason})")
    if status == 416:
        return StoreCorrupt(f"{what}: the object is shorter than its manifest says ({reason})")
    if 300 <= status < 400:
        return StoreError(
            f"{what}: the store sends this request elsewhere ({reason}); set the bucket's own "
            "region and endpoint in the store's block"
        )
    return StoreError(f"{what}: refused ({reason})")


def carried_by(status: int, content_range: str | None, length: int | None) -> range:
    """The bytes of the object that a 200 or 206 carries; none where it does not say so.

    ``length`` is the body's, where it is known. Some servers (rclone's) do as asked and answer 200
    with a Content-Range; others ignore the Range header and send the whole object, without one.
    """
    length = sys.maxsize if length is None else length
    if content_range is None:
        return range(length if status == 200 else 0)
    found = _CONTENT_RANGE.fullmatch(content_range.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, -1)
    return range(first, min(last + 1, first + length))


def _is_expired(grant: Grant, answer: http.client.HTTPResponse, code: str, said: str) -> bool:
    if code in _EXPIRED or _EXPIRED_WORDS.search(said):
        return True
    try:
        # The store's own clock, not the machine's: that one may be an hour off.
        return parsedate_to_datetime(answer.getheader("Date", "")).timestamp() > grant.expires_unix
    except ValueError:
        return False


def _retry_after_s(answer: http.client.HTTPResponse) -> float:
    text = answer.getheader("Retry-After", "").strip()
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0
