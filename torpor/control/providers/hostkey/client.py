"""HOSTKEY's InvAPI: forms with a session, whose refusals are answers with 200.

https://hostkey.com/documentation/apidocs. A session is bought with the account's key, and an
account without servers gets none. A session knows the servers of its beginning: ``eq/list`` and
``eq/show`` see a newer one only after ``eq/update_servers``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from torpor.control.providers.market_client import TIMEOUT, Form, MarketClient, Refusal, is_denied
from torpor.shared.errors import ProviderDenied, ProviderError

_SESSION_S: Final = 3600
_LEAD_S: Final = 120.0  # a session that ends within these seconds is renewed
_HOST: Final = re.compile(r"(?:https://)?([a-z0-9-]+\.hostkey\.(?:com|ru))/?", re.IGNORECASE)
"""Hosts to which a login may send the session's requests. HOSTKEY's own client follows to no other
host (its Terraform provider, invapi/url.go)."""
_EMPTY: Final = re.compile(r"no.appropriate.servers", re.IGNORECASE)
_EXPIRED: Final = re.compile(
    r"invalid token|invalid hash|token expired|token is invalid|unauthori[sz]ed|not authori[sz]ed"
    r"|authentication failed",
    re.IGNORECASE,
)
_DENIED: Final = re.compile(r"\bkey\b|permission|denied|authori[sz]ed|access|blocked", re.I)
_GONE: Final = re.compile(r"not found|no such|unknown server|not exist", re.IGNORECASE)
_OPAQUE: Final = re.compile(r"[\w+/=-]{24,}")  # words that may be a token
_PLAIN: Final = re.compile(r"[\w .-]{1,20}")
_SUCCESS: Final = (None, "", "OK", 0, 1)
"""The results that HOSTKEY's own client takes for a success (its Terraform provider 0.1.9,
invapi/errors.go); the documentation has only "OK"."""
_ORDERED: Final = ("id", "invoice", "callback")  # the answer to an order has one of these keys

Body = dict[str, Any]


class NoServers(ProviderDenied):
    """HOSTKEY gives no session to an account without servers."""


class HostkeyClient:
    """Thread-safe. Neither the key nor a session is in a message or a repr, and of an answer only
    the keys, the code and the words: it may hold a token or a password."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        account: str = "",
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._market = MarketClient(
            "hostkey",
            url,
            key,
            identity=account,
            bearer=False,
            quotes=False,
            timeout=timeout,
            sleep=sleep,
            denies=lambda refusal: is_denied(refusal) or bool(_DENIED.search(refusal.text)),
        )
        self.identity, self.claimed = self._market.identity, self._market.claimed
        self._key, self._url = key, url
        self._lock = threading.Lock()
        self._token = ""
        self._ends = 0.0
        self.empty_since: float | None = None
        """Since when HOSTKEY has said, each time, that the account has no servers (monotonic
        clock)."""

    def public(self, module: str, action: str, **fields: str) -> Body:
        """Send a request that needs no session. Any refusal is an error."""
        form = {"action": action, **fields}
        return self._accepted(self._ask(module, form), f"{module}/{action}")

    def read(self, module: str, action: str, **fields: str) -> Body:
        """Send a request that only reads. Any refusal is an error."""
        return self._accepted(self.ask(module, action, **fields), f"{module}/{action}")

    def ask(self, module: str, action: str, **fields: str) -> Body | Refusal:
        """Send a request that is safe to repeat. NoServers, ProviderDenied, ProviderUnavailable."""
        form = {"action": action, **fields}
        token = self._session()
        answer = self._ask(module, {**form, "token": token})
        if isinstance(answer, Refusal) and self._is_expired(answer, token):
            answer = self._ask(module, {**form, "token": self._session()})
        return answer

    def servers(self) -> tuple[set[str], Body]:
        """The ids of every server of the account, which HOSTKEY writes as numbers, words or
        records, an empty one for servers whose id cannot be read; and the answer of
        ``eq/update_servers``, without which a session does not see new servers."""
        updated = self.read("eq", "update_servers")
        listed = self.read("eq", "list")
        found = _ids(updated.get("servers") or [], self) | _ids(listed.get("servers"), self)
        self.empty_since = None
        return found, updated

    def order(self, form: Mapping[str, str]) -> Body | Refusal:
        """Rent: carried out once at most. CreateUncertain when nobody knows whether it was."""
        token = self._session()
        sent = {"action": "order_instance", **form, "token": token}
        answer = self._market.create("POST", "/eq.php", Body, Form(sent))
        refusal = answer if isinstance(answer, Refusal) else _refusal_in(answer)
        if refusal is not None:
            refusal = _worded(refusal)
            self._is_expired(refusal, token)  # the next request logs in again
            return refusal
        if isinstance(answer, Refusal) or not _is_success(answer):
            raise self.uncertain(answer)
        if not any(answer.get(key) for key in _ORDERED):
            raise self.uncertain(answer)
        return answer

    def uncertain(self, told: object) -> ProviderError:
        """The error for an order that may have been placed."""
        return self._market.uncertain(_told(told), "eq/order_instance")

    def failed(self, refusal: Refusal, doing: str) -> ProviderError:
        if _EMPTY.search(refusal.text):
            if self.empty_since is None:
                self.empty_since = time.monotonic()
            return NoServers(
                f"{self.identity} has no servers, and HOSTKEY refuses the login of such an "
                "account: its API can neither list nor order. The key need not be wrong. Order "
                "one server, the smallest will do, in HOSTKEY's panel, and keep it"
            )
        return self._market.refused(refusal, doing)

    def unexpected(self, told: object, doing: str) -> ProviderError:
        return self._market.unexpected(_told(told), doing)

    def _is_expired(self, refusal: Refusal, token: str) -> bool:
        """Whether the session is refused; it is dropped."""
        if refusal.status != 401 and not _EXPIRED.search(refusal.text):
            return False
        with self._lock:
            if self._token == token:
                self._token = ""
        return True

    def _session(self) -> str:
        with self._lock:
            if self._token and time.time() < self._ends - _LEAD_S:
                return self._token
            form = {"action": "login", "key": self._key, "ttl": str(_SESSION_S), "fix_ip": "0"}
            answer = self._market.ask("POST", "/auth.php", Body, body=Form(form))
            # {"result": {"token": ...}} on the live service, {"token": ...} in its documentation
            told = answer.get("result") if isinstance(answer, dict) else None
            told = told if isinstance(told, dict) else answer
            if not isinstance(told, dict) or not isinstance(told.get("token"), str):
                raise self._no_session(answer)
            ends = told.get("token_expire")
            self._ends = float(ends) if isinstance(ends, int) else time.time() + _SESSION_S
            home = _HOST.fullmatch(str(told.get("invapi")))
            if home and _HOST.fullmatch(self._url):
                self._market.move(f"https://{home[1]}")
            self._token = told["token"]
            self.empty_since = None
            return self._token

    def _no_session(self, answer: Body | Refusal) -> ProviderError:
        refusal = answer if isinstance(answer, Refusal) else _refusal_in(answer)
        if refusal is None:
            return self._market.unexpected("no token and no error", "auth/login")
        return self.failed(_worded(refusal), "log in")

    def _ask(self, module: str, form: Mapping[str, str]) -> Body | Refusal:
        answer = self._market.ask("POST", f"/{module}.php", Body, body=Form(form))
        refusal = answer if isinstance(answer, Refusal) else _refusal_in(answer)
        if refusal is not None:
            return _worded(refusal)
        if isinstance(answer, Refusal) or not _is_success(answer):
            raise self.unexpected(answer, f"{module}/{form['action']}")
        return answer

    def _accepted(self, answer: Body | Refusal, doing: str) -> Body:
        if isinstance(answer, Refusal):
            raise self.failed(answer, doing)
        return answer


def is_gone(refusal: Refusal) -> bool:
    """Whether HOSTKEY says that there is no such server."""
    return bool(_GONE.search(refusal.text))


def _is_success(body: Body) -> bool:
    return body.get("result") is not False and body.get("result") in _SUCCESS


def _refusal_in(body: Body) -> Refusal | None:
    """{"result": -1 or a word, "code": ..., "message" or "error": words}. A result alone may be the
    refusal, such as "Error" of an order that failed."""
    words, code, result = body.get("message") or body.get("error"), body.get("code"), None
    if body.get("result") == "OK":
        return None
    if isinstance(body.get("result"), (str, int)) and not _is_success(body):
        result = body["result"]
    if not words and result is None and code in (None, 0, "0", ""):
        return None
    words = words or f"result {result}, code {code}"
    return Refusal(200, f"{code} {words}" if isinstance(code, str) else str(words), body)


def _worded(refusal: Refusal) -> Refusal:
    """The refusal's words from its JSON, without what may be a secret among them."""
    words = refusal.text
    if not words and isinstance(refusal.body, dict):
        words = " ".join(str(refusal.body.get(key) or "") for key in ("code", "message", "error"))
    return Refusal(refusal.status, _OPAQUE.sub("...", words).strip(), refusal.body)


def _told(answer: object) -> str:
    """What a message may say of an answer: its keys, and its result, code and words."""
    if isinstance(answer, (str, Refusal, Exception)):
        return str(answer)
    if not isinstance(answer, dict):
        return f"a {type(answer).__name__}"
    said = [f"keys {', '.join(sorted(map(str, answer)))}"]
    for key in ("result", "code", "message", "error"):
        value = answer.get(key)
        if key in ("message", "error") and isinstance(value, str):
            said.append(f"{key} {_OPAQUE.sub('...', value)}")
        elif isinstance(value, (str, int)) and _PLAIN.fullmatch(str(value)):
            said.append(f"{key} {value}")
    return "; ".join(said)


def _ids(rows: object, client: HostkeyClient) -> set[str]:
    if not isinstance(rows, list):
        raise client.unexpected(rows, "for its list of servers")
    ids = {str(row.get("id") if isinstance(row, dict) else row) for row in rows}
    return {number if number.isdecimal() else "" for number in ids}
