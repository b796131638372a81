"""Requests to Azure Resource Manager in one subscription: the login, pages, operations, and what
errors mean.

https://learn.microsoft.com/rest/api/resources. Microsoft's own clients take 97 MB and change with
each version of the API: the requests are made here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from torpor.control.providers.market_client import TIMEOUT, Form, MarketClient, Refusal
from torpor.shared.errors import (
    InvalidInput,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
)
from torpor.shared.values import learned

URL: Final = "https://management.azure.com"
LOGIN_URL: Final = "https://login.microsoftonline.com"
_SCOPE: Final = "https://management.azure.com/.default"
_LEAD_S: Final = 300.0  # a token that ends within these seconds is renewed
_MOST_PAGES: Final = 400
_POLLS: Final = 30  # looks at an operation: most allocations that fail do so within a minute
_POLL_S: Final = 2.0
NO_GROUP: Final = "ResourceGroupNotFound"
_GONE: Final = frozenset({NO_GROUP, "ResourceNotFound", "NotFound"})
DENIED: Final = frozenset(
    {"AuthorizationFailed", "LinkedAuthorizationFailed", "AuthenticationFailed",
     "InvalidAuthenticationToken", "InvalidAuthenticationTokenTenant", "ExpiredAuthenticationToken",
     "SubscriptionNotFound", "InvalidSubscriptionId", "ReadOnlyDisabledSubscription",
     "MissingSubscriptionRegistration"}
)  # fmt: skip

_Shape = TypeVar("_Shape")


class Fault(NamedTuple):
    """Azure's code for an error, and its words."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}".strip(": ")

    @property
    def is_quota(self) -> bool:
        """Whether the fault is a quota. ``OperationNotAllowed`` is Azure's code for many things."""
        words = self.message.lower()
        return self.code.endswith(("QuotaExceeded", "LimitReached")) or (
            self.code == "OperationNotAllowed" and "quota" in words
        )


class _Error(msgspec.Struct):
    code: str
    message: str = ""


class _Operation(msgspec.Struct):
    """The operation that a request has begun."""

    status: str
    error: _Error | None = None


class _Page(msgspec.Struct):
    value: list[Any]
    next_link: str | None = msgspec.field(name="nextLink", default=None)


class _Token(msgspec.Struct):
    access_token: str
    expires_in: float


class AzureLogin:
    """Access tokens. ``fetch`` gets one, and says until when it holds (Unix time). Thread-safe."""

    def __init__(
        self, fetch: Callable[[], tuple[str, float]], account: str = "this host's login"
    ) -> None:
        self._fetch, self.account = fetch, account
        self._lock = threading.Lock()
        self._token, self._ends_unix = "", 0.0

    @classmethod
    def of_application(
        cls, tenant: str, application: str, secret: str, *, url: str = LOGIN_URL
    ) -> AzureLogin:
        """An application of Entra ID with a client secret."""
        account = f"application {application}"
        client = MarketClient("azure", url, "", identity=account, bearer=False, quotes=False)
        form = {
            "grant_type": "client_credentials",
            "client_id": application,
            "client_secret": secret,
            "scope": _SCOPE,
        }

        def fetch() -> tuple[str, float]:
            now = time.time()
            told = client.ask("POST", f"/{tenant}/oauth2/v2.0/token", _Token, body=Form(form))
            if isinstance(told, _Token):
                return told.access_token, now + told.expires_in
            body = told.body if isinstance(told.body, dict) else {}
            words = str(body.get("error_description") or body.get("error") or told.status)
            raise ProviderDenied(
                f"Azure refused the login of {account}: {words.splitlines()[0][:300]}. Check the "
                "tenant, the application and its secret in the provider block: secrets expire"
            )

        return cls(fetch, account)

    @classmethod
    def of_this_host(cls) -> AzureLogin:
        """The login that azure-identity finds: of the environment, a workload identity, a managed
        identity, or ``az login``."""
        try:
            import azure.core.exceptions
            import azure.identity
        except ImportError as cause:
            raise InvalidInput(
                "the login of this host at Azure needs azure-identity, which is not installed: run "
                "`pip install '.[azure]'` in torpor's folder, with the Python of the flows, or "
                "fill in the application and its secret in the provider block"
            ) from cause
        credential = azure.identity.DefaultAzureCredential()

        def fetch() -> tuple[str, float]:
            try:
                told = credential.get_token(_SCOPE)
            except azure.core.exceptions.ClientAuthenticationError as cause:
                words = str(cause).splitlines()[0]  # the further lines name each kind of login
                raise ProviderDenied(
                    f"this host has no login at Azure: {words} Run az login, or fill in the "
                    "application and its secret in the provider block"
                ) from cause
            except azure.core.exceptions.AzureError as cause:
                raise ProviderUnavailable(
                    f"Azure's login does not answer: {cause}; try again later"
                ) from cause
            return str(told.token), float(told.expires_on)

        return cls(fetch)

    def token(self) -> str:
        """ProviderDenied where Azure gives none, ProviderUnavailable where it does not answer."""
        with self._lock:
            if time.time() > self._ends_unix - _LEAD_S:
                self._token, self._ends_unix = self._fetch()
            return self._token


class AzureClient(MarketClient):
    """Asks Resource Manager about ``subscription``."""

    def __init__(
        self,
        login: AzureLogin,
        subscription: str,
        *,
        url: str = URL,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(
            "azure",
            url,
            "",
            identity=f"azure://{subscription}",
            bearer=False,
            timeout=timeout,
            sleep=sleep,
            is_gone=lambda refusal: fault_of(refusal).code in _GONE,
        )
        self.subscription = subscription
        self._login, self._pause = login, sleep
        self._began: dict[str, str] = {}  # by path: the operation of the newest PUT

    def at(self, path: str, version: str, more: str = "") -> str:
        """A path of the subscription, with the version of the API."""
        return f"/subscriptions/{self.subscription}{path}?api-version={version}{more}"

    def pages(self, shape: type[_Shape], path: str) -> list[_Shape]:
        """All rows of a listing."""
        rows: list[_Shape] = []
        for _ in range(_MOST_PAGES):
            page = self.read(_Page, path)
            try:
                rows += msgspec.convert(page.value, learned(list[shape]))  # type: ignore[valid-type]
            except msgspec.ValidationError as cause:
                raise self.unexpected(f"{cause} in {page.value}", path) from cause
            if not page.next_link:
                return rows
            path = below(page.next_link)
        raise self.unexpected(f"more than {_MOST_PAGES} pages", path)

    def put(self, path: str, body: Any) -> Fault | None:
        """Make a thing that costs nothing, and wait until it is made. Why it was refused or has
        failed; None where it stands, or is not done after a minute."""
        answer = self.ask("PUT", path, dict[str, Any], body=body)
        return fault_of(answer) if isinstance(answer, Refusal) else self.settled(path)

    def settled(self, path: str) -> Fault | None:
        """Why the operation of the newest PUT of ``path`` has failed; None where it has not failed,
        or still goes on after a minute."""
        operation = self._began.get(path)
        for _ in range(_POLLS if operation else 0):
            seen = self.read(_Operation, below(str(operation)))
            if seen.status in ("Failed", "Canceled"):
                error = seen.error or _Error(seen.status)
                return Fault(error.code, error.message)
            if seen.status == "Succeeded":
                break
            self._pause(_POLL_S)
        return None

    def refused(self, refusal: Refusal, doing: str) -> ProviderError:
        """The error for a refusal that the caller does not handle itself."""
        fault = fault_of(refusal)
        if fault.code in DENIED or refusal.status == 401 or fault.code == "403":
            return self.denied(refusal, doing)
        if refusal.status in (400, 403, 404, 409, 412):
            return ProviderError(f"{self.identity} refused to {doing}: {fault}")
        return self.unexpected(refusal, doing)

    def denied(self, refusal: Refusal, doing: str) -> ProviderDenied:
        return self.not_allowed(fault_of(refusal), doing)

    def not_allowed(self, fault: Fault, doing: str) -> ProviderDenied:
        """The error for a missing permission: who is not allowed, and what to do."""
        remedy = (
            f"Check the login in the provider block, that {self._login.account} has the role in "
            "docs/guide/markets/azure.md in the subscription, and that the subscription is enabled"
        )
        if fault.code == "MissingSubscriptionRegistration":
            remedy = "Run az provider register --namespace, with the namespace that Azure names"
        return ProviderDenied(f"{self.identity} refused to {doing}: {fault}. {remedy}")

    def _exchanged(self, method: str, path: str, **sent: Any) -> httpx.Response:
        login = {"Authorization": f"Bearer {self._login.token()}"}
        answer = super()._exchanged(method, path, headers=login, **sent)
        if method == "PUT":
            # One of Azure's regions may not know yet what was made in another one (terraform
            # #18268).
            if answer.status_code == 404 and NO_GROUP in answer.text:
                raise self._unavailable("does not know the group yet", f"PUT {path}")
            self._began[path] = answer.headers.get("Azure-AsyncOperation", "")
        return answer


def fault_of(refusal: Refusal) -> Fault:
    """Azure's code, such as ``SkuNotAvailable``; the status where it gives none."""
    error = refusal.body.get("error") if isinstance(refusal.body, dict) else None
    if not isinstance(error, dict) or not error.get("code"):
        return Fault(str(refusal.status), refusal.text[:200])
    return Fault(str(error["code"]), str(error.get("message", "")))


def below(link: str) -> str:
    """A link of Azure as a path of the address that is asked, so that the login goes nowhere
    else."""
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"
