"""Requests to the API of the installation's own server, without importing Prefect (1 s, 100 MB)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

import httpx

from deployments.server import Server
from torpor.shared.errors import TorporError

TIMEOUT_S: Final = 30.0
WAITS_S: Final = (0.5, 1.0, 2.0, 4.0)
"""The waits in seconds between tries while the server answers 503, because another writer holds its
SQLite file."""
_PAGE: Final = 200  # the most rows in one answer of the API


class Api:
    """A client of one server; close it, or use it as a context. TorporError says what failed."""

    def __init__(self, server: Server) -> None:
        user, _, password = server.login.partition(":")
        self._client = httpx.Client(
            base_url=f"{server.api_url}/",
            auth=(user, password),
            timeout=TIMEOUT_S,
            trust_env=False,  # a proxy that the environment names is never used for loopback
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def ask(self, verb: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """The answer as JSON; None if the answer is empty."""
        for wait_s in (*WAITS_S, None):
            try:
                answer = self._client.request(verb, path, json=content)
            except httpx.HTTPError as error:
                raise TorporError(f"{verb} {self._client.base_url}{path}: {error}") from error
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or wait_s is None:
                break
            time.sleep(wait_s)
        if not answer.is_success:
            raise TorporError(
                f"{verb} {self._client.base_url}{path}: {answer.status_code} {answer.text[:500]}"
            )
        return answer.json() if answer.content else None

    def all(self, path: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All rows that a filter finds, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.ask("POST", path, {**content, "limit": _PAGE, "offset": len(found)})
            found += page
            if len(page) < _PAGE:
                return found
