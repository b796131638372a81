"""Requests to AWS: one at a time, their retries, and what each failure means for a rental."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import boto3
import msgspec
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProxyConnectionError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from torpor.control.providers.market_client import UNDECIDED
from torpor.shared.errors import (
    CreateUncertain,
    InvalidInput,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    UnexpectedAnswer,
)
from torpor.shared.values import learned

TIMEOUT_S: Final = 30.0
_CONNECT_S: Final = 10.0
_TRIES: Final = 4  # tries of a request that is safe to repeat
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0
_MOST_PAGES: Final = 400
_TOLD_CHARACTERS: Final = 400  # characters of an answer in an error message

_PRICE_LIST_REGION: Final = "us-east-1"  # the price list of all regions is served there

DENIED: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthFailure", "Blocked", "ExpiredToken",
     "ExpiredTokenException", "IncompleteSignature", "InvalidAccessKeyId", "InvalidClientTokenId",
     "MissingAuthenticationToken", "OptInRequired", "PendingVerification", "RequestExpired",
     "SignatureDoesNotMatch", "UnauthorizedOperation", "UnrecognizedClientException",
     "InvalidSignatureException", "SubscriptionRequiredException"}
)  # fmt: skip
_THROTTLED: Final = frozenset(
    {"EC2ThrottledException", "PriorRequestNotComplete", "RequestLimitExceeded",
     "RequestThrottled", "RequestThrottledException", "Throttling", "ThrottlingException",
     "ThrottledException", "TooManyRequestsException"}
)  # fmt: skip
_NOT_SENT: Final = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)
_NO_LOGIN: Final = (
    CredentialRetrievalError, NoCredentialsError, PartialCredentialsError, TokenRetrievalError
)  # fmt: skip

_Shape = TypeVar("_Shape")


class _Page(Protocol):
    next_token: str


_PageT = TypeVar("_PageT", bound=_Page)


class AwsRefusal(msgspec.Struct, frozen=True):
    """An answer of AWS that refuses, and that a retry does not change."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message[:_TOLD_CHARACTERS].strip() or 'no words'}"


class Done(msgspec.Struct):
    """An answer whose content does not matter."""


class _Caller(msgspec.Struct, rename={"account": "Account"}):
    account: str


class _NotAws(Exception):
    """A refusal in plain text, or an HTML page, from something between AWS and this host."""


class Ec2Client:
    """Asks AWS in one region for one account. Thread-safe. No key is in a message or a repr.

    Before its first request it asks AWS to which account the login belongs: with another account's
    login, every machine of ours would seem to be absent.
    """

    def __init__(
        self,
        session: boto3.Session,
        account: str,
        region: str,
        *,
        url: str | None = None,
        timeout_s: float = TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.identity = f"ec2://{account}/{region}"
        self.account, self.region = account, region
        self._session, self._url, self._sleep = session, url, sleep
        # AWS_ENDPOINT_URL often names an object store that is not AWS.
        options: dict[str, Any] = {
            "connect_timeout": min(_CONNECT_S, timeout_s),
            "read_timeout": timeout_s,
            "retries": {"total_max_attempts": 1},
            "ignore_configured_endpoint_urls": True,
        }
        self._config = Config(**options)
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._confirmed = False

    def confirm(self) -> None:
        """ProviderDenied if the login does not belong to the account."""
        if self._confirmed:
            return
        answer = self._tried(False, "sts", "get_caller_identity", _Caller, {})
        caller = self._accepted(answer, "say whose login this is")
        if caller.account != self.account:
            raise ProviderDenied(
                f"the credentials belong to AWS account {caller.account}, the provider block says "
                f"{self.account}: correct one of them; nothing was asked of either account"
            )
        self._confirmed = True

    def read(
        self, shape: type[_Shape], operation: str, *, service: str = "ec2", **asked: Any
    ) -> _Shape:
        """Send a request that is safe to repeat. Any refusal is an error."""
        answer = self.ask(shape, operation, service=service, **asked)
        return self._accepted(answer, operation.replace("_", " "))

    def pages(
        self, shape: type[_PageT], operation: str, *, service: str = "ec2", **asked: Any
    ) -> list[_PageT]:
        """All pages of a listing."""
        found = [self.read(shape, operation, service=service, **asked)]
        while found[-1].next_token:
            if len(found) >= _MOST_PAGES:
                raise self.unexpected(f"more than {_MOST_PAGES} pages", operation)
            token = {"NextToken": found[-1].next_token}
            found.append(self.read(shape, operation, service=service, **asked, **token))
        return found

    def ask(
        self, shape: type[_Shape], operation: str, *, service: str = "ec2", **asked: Any
    ) -> _Shape | AwsRefusal:
        """Send a request that is safe to repeat. ProviderUnavailable after some tries."""
        self.confirm()
        return self._tried(False, service, operation, shape, asked)

    def rent(self, shape: type[_Shape], **asked: Any) -> _Shape | AwsRefusal:
        """Send RunInstances, which is carried out once at most. CreateUncertain when nobody knows
        whether it was; ProviderUnavailable when it certainly was not."""
        self.confirm()
        return self._tried(True, "ec2", "run_instances", shape, asked)

    def refused(self, refusal: AwsRefusal, doing: str) -> ProviderError:
        if refusal.code in DENIED:
            return ProviderDenied(
                f"AWS account {self.account} may not {doing} in {self.region}: {refusal}. Check "
                "the credentials block and its user's or role's policy (docs/guide/markets/ec2.md)"
            )
        return ProviderError(f"AWS refused to {doing} in {self.region}: {refusal}")

    def unexpected(self, told: object, doing: str) -> UnexpectedAnswer:
        return UnexpectedAnswer(
            f"AWS answered {doing} in {self.region} in a shape that torpor does not know: "
            f"{str(told)[:_TOLD_CHARACTERS]}. Nothing is concluded from it; look at the EC2 "
            "console and report this"
        )

    def _accepted(self, answer: _Shape | AwsRefusal, doing: str) -> _Shape:
        if isinstance(answer, AwsRefusal):
            raise self.refused(answer, doing)
        return answer

    def _tried(
        self, once: bool, service: str, operation: str, shape: type[_Shape], asked: dict[str, Any]
    ) -> _Shape | AwsRefusal:
        wait_s = _FIRST_WAIT_S
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._once(once, service, operation, shape, asked)
            except ProviderUnavailable:
                if not tries_left:
                    raise
            self._sleep(wait_s * random.uniform(0.75, 1.25))  # noqa: S311
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _once(
        self, once: bool, service: str, operation: str, shape: type[_Shape], asked: dict[str, Any]
    ) -> _Shape | AwsRefusal:
        try:
            answer = getattr(self._client(service), operation)(**asked)
        except ClientError as cause:
            return self._meaning(cause, once, operation)
        except _NO_LOGIN as cause:
            raise ProviderDenied(
                f"there is no login for AWS account {self.account}: {cause}; fill in the "
                "credentials block"
            ) from cause
        except ParamValidationError as cause:
            raise InvalidInput(f"AWS has no such request as {operation}: {cause}") from cause
        except _NOT_SENT as cause:
            raise self._unavailable(f"cannot be reached: {cause}", operation) from cause
        except (_NotAws, BotoCoreError) as cause:
            raise self._unanswered(once, f"{type(cause).__name__} {cause}", operation) from cause
        except (ResponseParserError, AttributeError, KeyError, TypeError, ValueError) as cause:
            # botocore's parsers raise Python's own errors for some malformed answers.
            told = f"{type(cause).__name__} {cause}"
            raise self._shapeless(once, told, operation) from cause
        try:
            return msgspec.convert(answer, learned(shape))
        except msgspec.ValidationError as cause:
            raise self._shapeless(once, cause, operation) from cause

    def _meaning(self, error: ClientError, once: bool, operation: str) -> AwsRefusal:
        told = error.response.get("Error", {})
        refusal = AwsRefusal(str(told.get("Code", "")), str(told.get("Message", "")))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if refusal.code in _THROTTLED or status == 429:
            raise self._unavailable(f"asks for fewer requests ({refusal.code})", operation)
        if status in UNDECIDED or (once and status == 409):
            raise self._unanswered(once, refusal, operation)
        # "No capacity" comes with status 500, too.
        if status >= 500 and not refusal.code.startswith("Insufficient"):
            raise self._unanswered(once, refusal, operation)
        return refusal

    def _client(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                region = _PRICE_LIST_REGION if service == "pricing" else self.region
                name: Any = service
                made = self._session.client(
                    name, region_name=region, endpoint_url=self._url, config=self._config
                )
                made.meta.events.register("before-parse", _stop_strangers)
                self._clients[service] = made
            return self._clients[service]

    def _shapeless(self, once: bool, told: object, operation: str) -> ProviderError:
        return self._unanswered(once, told, operation) if once else self.unexpected(told, operation)

    def _unanswered(self, once: bool, told: object, operation: str) -> ProviderError:
        if not once:
            return self._unavailable(f"did not answer: {told}", operation)
        return CreateUncertain(
            f"{self.identity} may have rented a machine: {operation} had no answer that says so or "
            f"not: {told}. The attempt is abandoned; reconcile ends the machine if it appears"
        )

    def _unavailable(self, what: str, operation: str) -> ProviderUnavailable:
        return ProviderUnavailable(f"{self.identity} {what} ({operation}); try again later")


def _stop_strangers(response_dict: dict[str, Any], **_: object) -> None:
    """Raise for an answer that is not from AWS. botocore's parsers take it for a damaged answer,
    and an HTML page for an empty one, whatever its status."""
    status, body = response_dict["status_code"], response_dict["body"].lstrip()
    is_page = body[:14].lower().startswith((b"<html", b"<!doctype html"))
    if is_page or (status >= 300 and not body.startswith((b"<", b"{"))):
        raise _NotAws(f"{status} {body[:_TOLD_CHARACTERS].decode(errors='replace')}")
