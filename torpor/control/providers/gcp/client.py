"""Requests to Compute Engine in one project: the login, pages, operations, and what errors mean.

https://cloud.google.com/compute/docs/reference/rest/v1. Google's own client takes 4 s to import, as
much again as a whole flow may take: google-auth gives the login, the requests are made here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeVar

import httpx
import msgspec

from torpor.control.providers.market_client import TIMEOUT, MarketClient, Refusal
from torpor.shared.errors import (
    InvalidInput,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
)
from torpor.shared.values import learned

URL: Final = "https://compute.googleapis.com"
_API: Final = "/compute/v1/projects"
_SCOPE: Final = "https://www.googleapis.com/auth/compute"
_MOST_PAGES: Final = 400
_POLLS: Final = 30  # looks at an operation: a create that GCP refuses says so within a minute
_POLL_S: Final = 2.0
_EMPTY: Final = "NO_RESULTS_ON_PAGE"
_THROTTLED: Final = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
"""Reasons by which Google says that there were too many requests, also with status 403."""
_PERMISSION: Final = re.compile(r"'([a-z]+\.[\w.]+)' permission")

_Shape = TypeVar("_Shape")


class _Page(msgspec.Struct):
    """One page of a listing. ``items``: a list, or, over all zones, a dictionary by zone."""

    kind: str
    items: Any = None
    page_token: str = msgspec.field(name="nextPageToken", default="")
    unreachables: list[str] = []


class _OperationFault(msgspec.Struct):
    code: str
    message: str = ""


class _OperationFaults(msgspec.Struct):
    errors: list[_OperationFault]


class Operation(msgspec.Struct, rename="camel"):
    """The operation that a request has begun."""

    kind: Literal["compute#operation"]
    name: str
    status: str
    operation_type: str
    insert_time: str = ""
    error: _OperationFaults | None = None

    @property
    def fault(self) -> Fault | None:
        """Why the operation failed; None while it runs and when it has not failed."""
        if self.error is None or not self.error.errors:
            return None
        first = self.error.errors[0]
        return Fault(first.code, first.message)


class Fault(NamedTuple):
    """Google's code for an error, and its words."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}".strip(": ")

    @property
    def permission(self) -> str:
        """The permission that the login lacks, where Google names it."""
        found = _PERMISSION.search(self.message)
        return found[1] if found else ""


class GoogleLogin:
    """Access tokens of a service account, or of this host's own login. Thread-safe."""

    def __init__(self, credentials: Any, account: str = "this host's login") -> None:
        self._credentials, self.account = credentials, account
        self._lock = threading.Lock()

    @classmethod
    def of_service_account(cls, text: str) -> GoogleLogin:
        """``text``: the JSON of a service account's key."""
        google = _google()
        try:
            told = msgspec.json.decode(text, type=dict[str, str])
            made = google.oauth2.service_account.Credentials.from_service_account_info(
                told, scopes=[_SCOPE]
            )
        except (msgspec.DecodeError, ValueError) as cause:
            fault = type(cause).__name__  # the error's text may hold a part of the key
            raise InvalidInput(
                f"this is not the JSON key of a Google service account ({fault}): paste the whole "
                "file that Google gave you"
            ) from None
        return cls(made, str(made.service_account_email))

    @classmethod
    def of_this_host(cls) -> GoogleLogin:
        """Application Default Credentials: of gcloud, of a workload identity, or of a machine."""
        google = _google()
        try:
            made, _ = google.auth.default(scopes=[_SCOPE])
        except google.auth.exceptions.GoogleAuthError as cause:
            raise InvalidInput(
                f"this host has no Google login: {cause}. Run gcloud auth application-default "
                "login, or fill in the service account's key in the provider block"
            ) from cause
        return cls(made)

    def token(self) -> str:
        """ProviderDenied where Google gives none, ProviderUnavailable where it does not answer."""
        google = _google()
        with self._lock:
            if not self._credentials.valid:
                try:
                    self._credentials.refresh(google.auth.transport.requests.Request())
                except google.auth.exceptions.TransportError as cause:
                    raise ProviderUnavailable(
                        f"Google's login does not answer: {cause}; try again later"
                    ) from cause
                except google.auth.exceptions.GoogleAuthError as cause:
                    raise ProviderDenied(
                        f"Google refused the login of {self.account}: {cause}. Check the key in "
                        "the provider block, and that the service account is enabled"
                    ) from cause
            return str(self._credentials.token)


class GcpClient(MarketClient):
    """Asks Compute Engine in ``project``. Paths begin below it."""

    def __init__(
        self,
        login: GoogleLogin,
        project: str,
        *,
        url: str = URL,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(
            "gcp",
            url,
            "",
            identity=f"gcp://{project}",
            bearer=False,
            timeout=timeout,
            sleep=sleep,
            throttles=_throttles,
        )
        self.project = project
        self._login, self._pause = login, sleep

    def listed(self, shape: type[_Shape], path: str, asked: str) -> list[_Shape]:
        """All rows of a listing that ``asked`` filters."""
        return [
            row
            for page in self._pages(path, asked, "List")
            for row in self._shaped(list[shape], page.items or [], path)  # type: ignore[valid-type]
        ]

    def everywhere(self, shape: type[_Shape], word: str, asked: str) -> list[tuple[str, _Shape]]:
        """All rows of a listing over all zones and regions, each row with its own, such as
        ``zones/ZONE``."""
        path, found = f"/aggregated/{word}", []
        for page in self._pages(path, asked, "AggregatedList"):
            parts = self._shaped(dict[str, dict[str, Any]], page.items or {}, path)
            for where, part in parts.items():
                code = part.get("warning", {}).get("code", _EMPTY)
                if code != _EMPTY:
                    raise self._incomplete(path, f"{where} ({code})")
                rows = self._shaped(list[shape], part.get(word, []), path)  # type: ignore[valid-type]
                found += [(where, row) for row in rows]
        return found

    def settled(self, operation: Operation, zone: str = "") -> Operation:
        """The operation once it is done, or as it stands after a minute. ``zone``: empty for one of
        the whole project."""
        where = f"zones/{zone}" if zone else "global"
        for _ in range(_POLLS):
            if operation.status == "DONE":
                break
            self._pause(_POLL_S)
            operation = self.read(Operation, f"/{where}/operations/{operation.name}")
        return operation

    def refused(self, refusal: Refusal, doing: str) -> ProviderError:
        """The error for a refusal that the caller does not handle itself."""
        fault = fault_of(refusal)
        if refusal.status == 401 or (refusal.status == 403 and not _is_quota(fault)):
            return self.denied(refusal, doing)
        if refusal.status == 404 and f"'projects/{self.project}'" in fault.message:
            return ProviderDenied(
                f"{self._login.account} sees no project {self.project} at Google: correct the "
                "project or the login in the provider block"
            )
        if refusal.status in (400, 403, 404, 409, 412):
            return ProviderError(f"{self.identity} refused to {doing}: {fault}")
        return self.unexpected(refusal, doing)

    def denied(self, refusal: Refusal, doing: str) -> ProviderDenied:
        """The error for a missing permission, which it names."""
        return denied(self.identity, self._login.account, fault_of(refusal), doing)

    @property
    def account(self) -> str:
        return self._login.account

    def _pages(self, path: str, asked: str, kind: str) -> Iterator[_Page]:
        params = {"filter": asked}
        for _ in range(_MOST_PAGES):
            page = self.read(_Page, path, params)
            if not page.kind.endswith(kind):
                raise self.unexpected(f"a {page.kind}", path)
            if page.unreachables:
                raise self._incomplete(path, ", ".join(page.unreachables[:5]))
            yield page
            if not page.page_token:
                return
            params = {"filter": asked, "pageToken": page.page_token}
        raise self.unexpected(f"more than {_MOST_PAGES} pages", path)

    def _shaped(self, shape: type[_Shape], told: Any, path: str) -> _Shape:
        try:
            return msgspec.convert(told, learned(shape))
        except msgspec.ValidationError as cause:
            raise self.unexpected(f"{cause} in {told}", path) from cause

    def _incomplete(self, path: str, what: str) -> ProviderUnavailable:
        """The error for a listing with a missing part: nothing that may be in it counts as
        absent."""
        return self._unavailable(f"listed {path} without {what}", f"GET {path}")

    def _exchanged(self, method: str, path: str, **sent: Any) -> httpx.Response:
        whole = path if path.startswith(_API) else f"{_API}/{self.project}{path}"
        login = {"Authorization": f"Bearer {self._login.token()}"}
        return super()._exchanged(method, whole, headers=login, **sent)


def of_project(project: str, path: str) -> str:
    """A path in another project, such as the path of an image."""
    return f"{_API}/{project}{path}"


def fault_of(refusal: Refusal) -> Fault:
    """The reason that Google gives, such as ``quotaExceeded``."""
    error = refusal.body.get("error") if isinstance(refusal.body, dict) else None
    if not isinstance(error, dict):
        return Fault(str(refusal.status), refusal.text[:200])
    listed = error.get("errors")
    first = listed[0] if isinstance(listed, list) and listed else {}
    reason = first.get("reason") if isinstance(first, dict) else None
    return Fault(str(reason or error.get("status") or refusal.status), str(error.get("message")))


def _throttles(refusal: Refusal) -> bool:
    slower = refusal.status == 403 and fault_of(refusal).code in _THROTTLED
    return slower or refusal.status == 429


def denied(identity: str, account: str, fault: Fault, doing: str) -> ProviderDenied:
    remedy = "Check the login in the provider block, its roles, and the project's billing"
    if fault.permission:
        remedy = f"Give {account} a role with the permission {fault.permission}"
    return ProviderDenied(f"{identity} refused to {doing}: {fault}. {remedy}")


def _is_quota(fault: Fault) -> bool:
    return fault.code in ("quotaExceeded", "QUOTA_EXCEEDED")


def _google() -> Any:
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests
        import google.oauth2.service_account
    except ImportError as cause:
        raise InvalidInput(
            "GCP needs google-auth, which is not installed: run `pip install '.[gcp]'` in torpor's "
            "folder, with the Python of the flows"
        ) from cause
    return google
