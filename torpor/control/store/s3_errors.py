"""Turns boto3's errors into torpor's, with a next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from botocore import exceptions as boto
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from torpor.shared.errors import (
    InvalidInput,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnavailable,
    StoreUnreachable,
)
from torpor.shared.transfer.answer import RefusedAnswer
from torpor.shared.transfer.connections import NAME_AUTHORITY


@contextlib.contextmanager
def explained(what: str, address: str) -> Iterator[None]:
    """Turn boto3's errors in this block into ours. ``what``: the verb and key, for messages."""
    try:
        yield
    except ClientError as error:
        raise _refused(error, f"{what} at {address}") from None
    except (boto.BotoCoreError, ResponseParserError, ValueError) as error:
        raise _failed(error, f"{what} at {address}") from None


def code_of(error: ClientError) -> str:
    """The store's error code, or the status of a HEAD, which has no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _refused(error: ClientError, what: str) -> StoreError:
    said = str(error.response.get("Error", {}).get("Message", "")).strip()[:300]
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    refused = RefusedAnswer(status_of(error), code_of(error), said, headers.get("retry-after", ""))
    code, reason = refused.code, refused.reason
    if code == "InvalidAccessKeyId":
        return StoreDenied(f"{what}: the store does not know this access key id ({reason})")
    if code == "SignatureDoesNotMatch":
        return StoreDenied(
            f"{what}: the secret key does not belong to the access key id, or the region is "
            f"another ({reason})"
        )
    if code in ("RequestTimeTooSkewed", "RequestExpired"):
        return StoreDenied(
            f"{what}: the clock of the control side differs from the store's ({reason}); set it, "
            "for instance with NTP"
        )
    if code in ("ExpiredToken", "InvalidToken", "TokenRefreshRequired"):
        return StoreDenied(f"{what}: the session token is not valid (any more) ({reason})")
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return StoreMissing(f"{what}: there is no such bucket ({reason}); check its name")
    return refused.error(what)


def _failed(error: Exception, what: str) -> StoreError | InvalidInput:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, (boto.ParamValidationError, boto.InvalidRegionError)) or (
        isinstance(error, ValueError) and not isinstance(error, boto.BotoCoreError)
    ):
        return InvalidInput(f"{what}: {text}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return StoreDenied(f"{what}: no complete credentials were given ({text})")
    if (
        isinstance(error, boto.SSLError) and "EOF" not in text
    ):  # after an EOF: the store has closed the connection
        return StoreError(
            f"{what}: no TLS connection ({text}); check whether the endpoint is http or https, "
            f"its port and its certificate; {NAME_AUTHORITY}"
        )
    if isinstance(error, (boto.HTTPClientError, boto.ConnectionError)):
        absent = isinstance(error, boto.EndpointConnectionError)
        kind = StoreUnreachable if absent else StoreUnavailable
        return kind(
            f"{what}: no answer ({type(error).__name__}: {text}); check the endpoint's host and "
            "port, and that the store is running and reachable from here"
        )
    if isinstance(error, ResponseParserError):
        return StoreError(
            f"{what}: what answers does not speak S3; check the endpoint's host, port and path"
        )
    return StoreError(f"{what}: {type(error).__name__}: {text}")
