"""HTTP with a market: one request, its retries, and what each failure means for a rental."""

from __future__ import annotations

import functools
import hashlib
import random
import re
import ssl
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar

import httpx
import msgspec

from torpor.control.variables import Secrets
from torpor.shared.errors import (
    CreateUncertain,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    UnexpectedAnswer,
)
from torpor.shared.values import learned

TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
MOST_BYTES: Final = 64 << 20
"""Bytes of the longest answer that is read."""
MOST_S: Final = 120.0
"""Seconds after which an answer is given up, so that a market that sends a byte every few seconds
delays nobody for long."""
_FRAME: Final = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_TRIES: Final = 4  # tries of a request that is safe to repeat
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0
_TOLD_CHARACTERS: Final = 300  # characters of an answer in an error message
UNDECIDED: Final = frozenset({408, 425, 499})
"""Statuses that a gateway may send for a request that the market carries out all the same."""
_LINE: Final = re.compile(r"[A-Za-z0-9][\w .-]{0,199}")
NO_SECRETS: Final = Secrets()

_Shape = TypeVar("_Shape")


@functools.cache
def _authorities() -> ssl.SSLContext:
    """The certificate authorities that every client trusts. Reading them takes 0.07 s of CPU."""
    return httpx.create_ssl_context()


class Refusal(msgspec.Struct, frozen=True):
    """An answer that is not 2xx and means no retry. ``body`` is None where it is no JSON."""

    status: int
    text: str
    body: Any

    def __str__(self) -> str:
        return f"{self.status}: {self.text[:_TOLD_CHARACTERS].strip() or 'no words'}"


def is_denied(refusal: Refusal) -> bool:
    """Whether the key is wrong, may not do this, or the account has no money."""
    return refusal.status in (401, 402, 403)


def is_decided(refusal: Refusal) -> bool:
    """Whether the market itself has refused. Otherwise a gateway may have, and the request may be
    carried out."""
    return refusal.status < 500 and refusal.status not in UNDECIDED


class Form(msgspec.Struct, frozen=True):
    """A body of fields, where a market takes no JSON."""

    fields: Mapping[str, str]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its outcome. It holds secrets."""

    method: str
    url: str
    request_headers: list[tuple[str, str]]
    request: bytes
    began_unix: float
    seconds: float
    status: int | None = None  # None: no answer came
    headers: list[tuple[str, str]] = []
    body: bytes = b""
    error: str = ""


_OBSERVER: ContextVar[Callable[[Exchange], None] | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Callable[[Exchange], None]) -> Iterator[None]:
    """Show ``observer`` every exchange of the clients that are made in this context."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class MarketClient:
    """Asks ``url``, with ``key`` in the header where ``bearer``. Thread-safe. The key is in no
    message and no repr. ``refusal_in`` finds the refusal in a body that came with 2xx.
    ``denies``, ``is_gone``: whether one is about the key or the account, or says that nothing is
    there. ``throttles``: whether it was not carried out, for there were too many requests.
    ``decides``: whether it is the market's own word, where it refuses with 5xx, too. Another login
    than the key, or a pace, is the subclass's ``_exchanged``."""

    def __init__(
        self,
        market: str,
        url: str,
        key: str,
        *,
        identity: str = "",
        transport: httpx.BaseTransport | None = None,
        bearer: bool = True,
        quotes: bool = True,
        secrets: Secrets = NO_SECRETS,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
        refusal_in: Callable[[Any], Refusal | None] = lambda body: None,
        denies: Callable[[Refusal], bool] = is_denied,
        is_gone: Callable[[Refusal], bool] = lambda refusal: refusal.status == 404,
        throttles: Callable[[Refusal], bool] = lambda refusal: refusal.status == 429,
        decides: Callable[[Refusal], bool] = is_decided,
        lines: bool = False,
        unquoted: Container[str] = (),
    ) -> None:
        """Without ``identity``, the account is named by a hash of its key. ``quotes``: errors may
        repeat the market's answers; off where an answer can hold a secret. ``secrets``: what is
        hidden in the answers that errors repeat. ``lines``: a line of plain words, such as an id,
        counts as JSON that holds it. ``unquoted``: paths where an answer holds secrets, unless it
        is a refusal."""
        hashed = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        self.identity = identity or f"{market}://{hashed}"
        self.claimed = self.identity != f"{market}://{hashed}"
        self._observer = _OBSERVER.get()
        self._quotes, self._secrets = quotes, secrets
        self._sleep = sleep
        self._refusal_in = refusal_in
        self.denies = denies
        self.is_gone = is_gone
        self._throttles, self._decides = throttles, decides
        self._lines, self._unquoted = lines, unquoted
        login = {"Authorization": f"Bearer {key}"} if bearer else {}
        self._http = httpx.Client(
            base_url=url,
            headers={"User-Agent": "torpor", **login},
            transport=transport,
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),  # nobody closes a provider's client
            verify=_authorities(),
        )

    def move(self, url: str) -> None:
        """Ask ``url`` from now on."""
        self._http.base_url = httpx.URL(url)

    def read(self, shape: type[_Shape], path: str, params: Mapping[str, str] = {}) -> _Shape:
        """Send a GET. Any refusal is an error."""
        return self._accepted(self.ask("GET", path, shape, params=params), f"GET {path}")

    def search(self, shape: type[_Shape], path: str, body: Any) -> _Shape:
        """Send a POST that changes nothing."""
        return self._accepted(self.ask("POST", path, shape, body=body), f"POST {path}")

    def ask(
        self,
        method: str,
        path: str,
        shape: type[_Shape],
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> _Shape | Refusal:
        """Send a request that is safe to repeat. ProviderUnavailable after some tries."""
        return self._tried("repeat", method, path, shape, params, body)

    def seek(self, method: str, path: str, shape: type[_Shape], doing: str) -> _Shape | None:
        """Send a request about one thing, which is safe to repeat; None where the market does not
        have the thing. Any other refusal is an error."""
        answer = self.ask(method, path, shape)
        if not isinstance(answer, Refusal):
            return answer
        if not self.is_gone(answer):
            raise self.refused(answer, doing)
        return None

    def create(
        self,
        method: str,
        path: str,
        shape: type[_Shape],
        body: Any,
        *,
        reads_conflict: bool = False,
    ) -> _Shape | Refusal:
        """Send a request that rents, which is carried out once at most. CreateUncertain when nobody
        knows whether it was; ProviderUnavailable when it certainly was not. ``reads_conflict``: the
        caller finds out what a 409 means."""
        answer = self._tried("once", method, path, shape, None, body)
        if isinstance(answer, Refusal) and answer.status == 409 and not reads_conflict:
            raise self.uncertain(answer, f"{method} {path}")
        return answer

    def refused(self, refusal: Refusal, doing: str) -> ProviderError:
        """The error for a refusal that the caller does not handle itself."""
        tells = self.denied if self.denies(refusal) else self.unexpected
        return tells(refusal, doing)

    def denied(self, refusal: Refusal, doing: str) -> ProviderDenied:
        return ProviderDenied(
            f"{self.identity} refused to {doing}: {refusal}. Check the provider block's key, its "
            "permissions and the account's balance"
        )

    def unexpected(self, told: object, doing: str) -> UnexpectedAnswer:
        words = str(told)[:_TOLD_CHARACTERS]
        return UnexpectedAnswer(
            f"{self.identity} answered {doing} in a shape that torpor does not know: {words}. "
            "Nothing is concluded from it; look at the market's console and report this"
        )

    def uncertain(self, what: object, doing: str) -> CreateUncertain:
        """The error for a create whose answer was lost: it may have rented."""
        return CreateUncertain(
            f"{self.identity} may have rented a machine: {doing} had no answer that says so or "
            f"not: {str(what)[:_TOLD_CHARACTERS]}. The attempt is abandoned; reconcile ends the "
            "machine if it appears"
        )

    def _accepted(self, answer: _Shape | Refusal, doing: str) -> _Shape:
        if isinstance(answer, Refusal):
            raise self.refused(answer, doing)
        return answer

    def _tried(
        self,
        effect: Literal["repeat", "once"],
        method: str,
        path: str,
        shape: type[_Shape],
        params: Mapping[str, str] | None,
        body: Any,
    ) -> _Shape | Refusal:
        doing = f"{method} {path}"
        wait_s = _FIRST_WAIT_S
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._once(effect, method, path, shape, params, body)
            except ProviderUnavailable as error:
                if not tries_left:
                    raise
                asked_s = error.retry_after_s
            if asked_s > _LONGEST_WAIT_S:
                raise self._unavailable(f"asks to wait {asked_s:.0f} s", doing, asked_s)
            self._sleep(max(asked_s, wait_s * random.uniform(0.75, 1.25)))  # noqa: S311
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _once(
        self,
        effect: Literal["repeat", "once"],
        method: str,
        path: str,
        shape: type[_Shape],
        params: Mapping[str, str] | None,
        body: Any,
    ) -> _Shape | Refusal:
        doing = f"{method} {path}"
        sent: dict[str, Any] = {"data": body.fields} if isinstance(body, Form) else {"json": body}
        try:
            answer = self._exchanged(method, path, params=params or None, **sent)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as cause:
            raise self._unavailable(f"cannot be reached: {cause}", doing) from cause
        except httpx.HTTPError as cause:
            raise self._unanswered(
                effect, f"{type(cause).__name__} {cause}".strip(), doing
            ) from cause
        hidden = self._secrets.hidden_in(answer.text)
        secret = answer.is_success and path in self._unquoted
        text = hidden if self._quotes and not secret else ""
        content = answer.content if answer.is_success else hidden.encode()
        decoded: Any
        try:
            decoded = msgspec.json.decode(content) if content else None
        except (msgspec.DecodeError, RecursionError) as cause:
            if self._lines and answer.is_success and _LINE.fullmatch(answer.text.strip()):
                decoded = answer.text.strip()
            elif answer.is_success:  # a gateway's page: the market itself has not answered
                told = f"no JSON: {text[:_TOLD_CHARACTERS]}"
                raise self._unanswered(effect, told, doing) from cause
            else:
                decoded = None
        refusal = (
            self._refusal_in(decoded)
            if answer.is_success
            else Refusal(answer.status_code, text, decoded)
        )
        if refusal is not None:
            if self._throttles(refusal):
                retry_after_s = _seconds(answer.headers.get("Retry-After"))
                raise self._unavailable(
                    f"asks for fewer requests ({refusal})", doing, retry_after_s
                )
            if not self._decides(refusal):
                raise self._unanswered(effect, str(refusal), doing)
            return refusal
        try:
            return msgspec.convert(decoded, learned(shape))
        except msgspec.ValidationError as cause:
            if effect == "once":
                told = f"{cause} in {text[:_TOLD_CHARACTERS]}"
                raise self._unanswered(effect, told, doing) from cause
            raise self.unexpected(f"{cause} in {text}", doing) from cause

    def _exchanged(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """Send one request, once; ``sent`` is for httpx."""
        observer = self._observer
        if observer is None:
            return self._whole(method, path, **sent)
        began_unix, began_s = time.time(), time.monotonic()

        def show(request: httpx.Request, **came: Any) -> None:
            observer(
                Exchange(
                    method=request.method,
                    url=str(request.url),
                    request_headers=request.headers.multi_items(),
                    request=request.content,
                    began_unix=began_unix,
                    seconds=time.monotonic() - began_s,
                    **came,
                )
            )

        try:
            answer = self._whole(method, path, **sent)
        except httpx.HTTPError as cause:
            request = None
            with suppress(RuntimeError):  # not every error of httpx has its request
                request = cause.request
            if request is not None:
                show(request, error=f"{type(cause).__name__} {cause}".strip())
            raise
        show(
            answer.request,
            status=answer.status_code,
            headers=answer.headers.multi_items(),
            body=answer.content,
        )
        return answer

    def _whole(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """The whole answer; httpx.ReadError where it is too long or does not end in time."""
        until_s = time.monotonic() + MOST_S
        with self._http.stream(method, path, **sent) as answer:
            body = bytearray()
            for part in answer.iter_bytes():
                body += part
                if len(body) > MOST_BYTES or time.monotonic() > until_s:
                    raise httpx.ReadError(
                        f"its answer goes on after {len(body)} bytes", request=answer.request
                    )
        told = [(name, value) for name, value in answer.headers.multi_items() if name not in _FRAME]
        whole = bytes(body)
        return httpx.Response(
            answer.status_code, headers=told, content=whole, request=answer.request
        )

    def _unanswered(self, effect: str, what: str, doing: str) -> ProviderError:
        if effect == "repeat":
            return self._unavailable(f"did not answer: {what}", doing)
        return self.uncertain(what, doing)

    def _unavailable(self, what: str, doing: str, after_s: float = 0.0) -> ProviderUnavailable:
        error = ProviderUnavailable(f"{self.identity} {what} ({doing}); try again later")
        error.retry_after_s = after_s
        return error


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
