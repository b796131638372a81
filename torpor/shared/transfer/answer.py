"""What a store's HTTP answer means, as an error of our tree."""

from __future__ import annotations

import http.client
import re
import sys
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from torpor.shared.errors import (
    GrantExpired,
    ObjectExists,
    StoreArchived,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFull,
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
_BUSY = {
    "RequestTimeout",
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "Throttling",
    "OperationAborted",
    "ConditionalRequestConflict",
}
# MinIO's answer when a bucket's quota is reached (400), and Ceph's for a user or bucket (403).
_FULL = {"XMinioAdminBucketQuotaExceeded", "QuotaExceeded"}
_ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_EXPIRED = {"ExpiredToken", "ExpiredRequest", "RequestExpired", "RequestTimeTooSkewed"}
# rclone sends the last code for every signature older than 15 minutes, whatever its own limit.
_EXPIRED_WORDS = re.compile(r"expired|difference between the request time", re.IGNORECASE)


def refusal(grant: Grant, host: str, answer: http.client.HTTPResponse, body: bytes) -> StoreError:
    """The error for an answer other than the expected one."""
    text = body.decode("utf-8", "replace")
    code = found[1] if (found := _CODE.search(text)) else ""
    said = found[1].strip() if (found := _MESSAGE.search(text)) else ""
    refused = RefusedAnswer(answer.status, code, said, answer.getheader("Retry-After", ""))
    what = f"{grant.verb} {grant.key} at {host}"
    if answer.status in (400, 401, 403) and _is_expired(grant, answer, code, said):
        return GrantExpired(
            f"{what}: the grant's time is over ({refused.reason}); ask for a new one, "
            "and check the control side's clock where that is refused too"
        )
    return refused.error(what)


class RefusedAnswer(NamedTuple):
    """What a store answered instead of what it was asked for."""

    status: int
    code: str
    said: str
    retry_after: str

    @property
    def reason(self) -> str:
        words = f"HTTP {self.status} {self.code}".rstrip()
        return f"{words}: {self.said}" if self.said and self.said != self.code else words

    def error(self, what: str) -> StoreError:
        """As an error of our tree; ``what`` is the verb, key and place."""
        status, code, reason = self.status, self.code, self.reason
        if code in _DAMAGED:
            return StoreCorrupt(f"{what}: the body was damaged on the way ({reason})")
        if status == 507 or (status in (400, 403) and code in _FULL):
            return StoreFull(
                f"{what}: the store is full ({reason}); free space there, or raise its quota"
            )
        if status == 501:
            return StoreError(f"{what}: the store does not know this request ({reason})")
        if status >= 500 or status in (408, 425, 429) or code in _BUSY:
            busy = StoreUnavailable(
                f"{what}: the store cannot take the request now ({reason}); try again later, and "
                "check the endpoint where it never worked"
            )
            busy.retry_after_s = _seconds(self.retry_after)
            return busy
        if status == 409:
            return StoreUnavailable(f"{what}: another request is writing the same name ({reason})")
        if code == "InvalidObjectState":
            return StoreArchived(f"{what}: {archived_words(1)} ({reason})")
        if status in (401, 403) or code == "AccessDenied":
            return StoreDenied(
                f"{what}: refused ({reason}); check the key id and secret, that their policy "
                "allows reading, writing, listing and deleting under this bucket and prefix, and "
                "the control side's clock"
            )
        if status == 404:
            return StoreMissing(f"{what}: no such object or bucket ({reason})")
        if status == 412:
            return ObjectExists(f"{what}: an object of that name is there already ({reason})")
        if status == 416:
            return StoreCorrupt(f"{what}: the object is shorter than it should be ({reason})")
        if code in _ELSEWHERE or 300 <= status < 400:
            return StoreError(
                f"{what}: the bucket lives in another region or at another endpoint ({reason}); "
                "set both in the store's block"
            )
        return StoreError(f"{what}: refused ({reason})")


def archived_words(objects: int) -> str:
    """Message: an archive holds this many of the objects, and what to do."""
    return (
        f"{objects} object{'s are' if objects > 1 else ' is'} in an archive class of the store and "
        "cannot be read: ask for a restore of each (aws s3api restore-object --bucket BUCKET --key "
        "KEY --restore-request 'Days=7,GlacierJobParameters={Tier=Standard}'; of the class "
        "INTELLIGENT_TIERING with '{}' as the request), wait the hours that it takes, and run this "
        "again; and end the rule that archives this prefix"
    )


def carried_by(status: int, content_range: str | None, length: int | None) -> range:
    """The bytes of the object that a 200 or 206 carries; none where the headers do not say it.

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
        # The store's own clock: the machine's may be an hour off.
        return parsedate_to_datetime(answer.getheader("Date", "")).timestamp() > grant.expires_unix
    except ValueError:
        return False


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d{1,6}", text.strip()) else 0.0
