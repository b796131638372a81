"""HTTP with a market whose login is OAuth client credentials in place of an API key."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import httpx
import msgspec

from torpor.control.providers.market_client import MarketClient, Refusal

_LEAD_S: Final = 60.0  # a token that ends within these seconds is renewed


class _Token(msgspec.Struct):
    access_token: str
    expires_in: float


class CredentialsClient(MarketClient):
    """Buys a token at ``token_path`` and shows it with each request. Thread-safe. Neither the
    secret nor a token is in a message or a repr."""

    def __init__(
        self,
        market: str,
        url: str,
        client_id: str,
        secret: str,
        token_path: str,
        **options: Any,
    ) -> None:
        """``options`` are those of ``MarketClient``."""
        key = f"{client_id}:{secret}"
        super().__init__(market, url, key, bearer=False, **options)
        alike = {name: options[name] for name in ("timeout", "transport") if name in options}
        self._login = MarketClient(market, url, key, bearer=False, quotes=False, **alike)
        self._token_path = token_path
        self._asked = {
            "grant_type": "client_credentials",
            "client_id": client_id,
            "client_secret": secret,
        }
        self._lock = threading.Lock()
        self._token, self._ends_s = "", 0.0

    def _bearer(self, renew: bool) -> str:
        with self._lock:
            if renew or time.monotonic() >= self._ends_s:
                asked = ("POST", self._token_path, _Token, None, self._asked)
                answer = self._login._once("repeat", *asked)  # the caller tries again
                if isinstance(answer, Refusal):
                    raise self.denied(answer, "log in")
                self._token = answer.access_token
                self._ends_s = time.monotonic() + answer.expires_in - _LEAD_S
            return f"Bearer {self._token}"

    def _exchanged(self, method: str, path: str, **sent: Any) -> httpx.Response:
        for renew in (False, True):  # a token may have been revoked
            login = {"Authorization": self._bearer(renew)}
            answer = super()._exchanged(method, path, headers=login, **sent)
            if answer.status_code != 401:
                break
        return answer
