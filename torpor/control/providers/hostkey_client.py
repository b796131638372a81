"""HOSTKEY's InvAPI: forms with a session, whose refusals are answers with 200.

https://hostkey.com/documentation/apidocs. A session is bought with the account's key, and an
account without servers gets none.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from torpor.control.providers.market_client import TIMEOUT, Form, MarketClient, Refusal
from torpor.shared.errors import ProviderDenied, ProviderError

_SESSION_S: Final = 3600
_LEAD_S: Final = 120.0  # a session that ends sooner is renewed
_EMPTY: Final = re.compile(r"no.appropriate.servers", re.IGNORECASE)
_EXPIRED: Final = re.compile(r"invalid token|invalid hash|token expired|token is invalid", re.I)
_DENIED: Final = re.compile(r"\bkey\b|permission|denied|authori[sz]ed|access|blocked", re.I)
_GONE: Final = re.compile(r"not found|no such|unknown server|not exist", re.IGNORECASE)

Body = dict[str, Any]


class NoServers(ProviderDenied):
    """HOSTKEY gives no session to an account without servers."""


class HostkeyClient:
    """Thread-safe. Neither the key nor a session is in a message or a repr."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._market = MarketClient("hostkey", url, key, bearer=False, timeout=timeout, sleep=sleep)
        self._key = key
        self._lock = threading.Lock()
        self._token = ""
        self._ends = 0.0

    @property
    def identity(self) -> str:
        return self._market.identity

    def public(self, module: str, action: str, **fields: str) -> Body:
        """What needs no session. Any refusal is an error."""
        form = {"action": action, **fields}
        return self._accepted(self._ask(module, form), f"{module}/{action}")

    def read(self, module: str, action: str, **fields: str) -> Body:
        """Any refusal is an error."""
        return self._accepted(self.ask(module, action, **fields), f"{module}/{action}")

    def ask(self, module: str, action: str, **fields: str) -> Body | Refusal:
        """A request that is safe to repeat. NoServers, ProviderDenied, ProviderUnavailable."""
        form = {"action": action, **fields}
        answer = self._ask(module, {**form, "token": self._session()})
        if isinstance(answer, Refusal) and _EXPIRED.search(answer.text):
            with self._lock:
                self._token = ""
            answer = self._ask(module, {**form, "token": self._session()})
        return answer

    def order(self, form: Mapping[str, str]) -> Body | Refusal:
        """Rent: carried out once at most. CreateUncertain when nobody knows whether it was."""
        sent = {"action": "order_instance", **form, "token": self._session()}
        answer = self._market.create("POST", "/eq.php", Body, Form(sent))
        if isinstance(answer, Refusal):
            return answer
        refusal = _refusal_in(answer)
        if refusal is None and answer.get("result") != "OK":
            raise self.uncertain(answer)
        return refusal or answer

    def uncertain(self, told: object) -> ProviderError:
        """Of an order that may have been placed."""
        return self._market.uncertain(told, "eq/order_instance")

    def failed(self, refusal: Refusal, doing: str) -> ProviderError:
        if refusal.status in (401, 402, 403) or _DENIED.search(refusal.text):
            return self._market.denied(refusal, doing)
        return self._market.unexpected(refusal, doing)

    def unexpected(self, told: object, doing: str) -> ProviderError:
        return self._market.unexpected(told, doing)

    def _session(self) -> str:
        with self._lock:
            if self._token and time.time() < self._ends - _LEAD_S:
                return self._token
            form = {"action": "login", "key": self._key, "ttl": str(_SESSION_S)}
            answer = self._market.ask("POST", "/auth.php", Body, body=Form(form))
            # {"result": {"token": ...}} on the live service, {"token": ...} in its documentation
            told = answer.get("result") if isinstance(answer, dict) else None
            told = told if isinstance(told, dict) else answer
            if not isinstance(told, dict) or not isinstance(told.get("token"), str):
                raise self._no_session(answer)
            ends = told.get("token_expire")
            self._ends = float(ends) if isinstance(ends, int) else time.time() + _SESSION_S
            self._token = told["token"]
            return self._token

    def _no_session(self, answer: Body | Refusal) -> ProviderError:
        refusal = answer if isinstance(answer, Refusal) else _refusal_in(answer)
        if refusal is None:
            return self._market.unexpected("no token and no error", "auth/login")
        if _EMPTY.search(refusal.text):
            return NoServers(
                f"{self.identity} has no servers, and HOSTKEY refuses the login of such an "
                "account: its API can neither list nor order. The key need not be wrong. Order "
                "one server, the smallest will do, in HOSTKEY's panel, and keep it"
            )
        return self.failed(refusal, "log in")

    def _ask(self, module: str, form: Mapping[str, str]) -> Body | Refusal:
        answer = self._market.ask("POST", f"/{module}.php", Body, body=Form(form))
        if isinstance(answer, Refusal):
            return answer
        refusal = _refusal_in(answer)
        if refusal is None and answer.get("result") != "OK":
            raise self._market.unexpected(answer, f"{module}/{form['action']}")
        return refusal or answer

    def _accepted(self, answer: Body | Refusal, doing: str) -> Body:
        if isinstance(answer, Refusal):
            raise self.failed(answer, doing)
        return answer


def is_gone(refusal: Refusal) -> bool:
    """Whether HOSTKEY says that there is no such server."""
    return bool(_GONE.search(refusal.text))


def _refusal_in(body: Body) -> Refusal | None:
    """{"result": -1 or a word, "code": ..., "message" or "error": words}."""
    words = body.get("message") or body.get("error")
    if not words or body.get("result", -1) == "OK":
        return None
    code = body.get("code")
    return Refusal(200, f"{code} {words}" if isinstance(code, str) else str(words), body)
