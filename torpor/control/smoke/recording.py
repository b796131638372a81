"""A recording: a folder with one redacted JSON file for each exchange with a market.

``plan.json`` has the offer and the ids of the rentals.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from torpor.control.providers.market_client import Exchange
from torpor.control.smoke.redact import Redactor

MOST_BYTES: Final = 1 << 20
"""Bytes of the longest body that is kept whole; a longer one is cut."""

PLAN: Final = "plan"


class Recorder:
    """Writes exchanges into ``folder``. Thread-safe. See ``market_client.observed``."""

    def __init__(self, folder: Path, redactor: Redactor) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self._redactor = redactor
        self._numbers = itertools.count(1)
        self._began_unix: float | None = None
        self._lock = threading.Lock()

    def __call__(self, seen: Exchange) -> None:
        with self._lock:
            number = next(self._numbers)
            self._began_unix = self._began_unix or seen.began_unix
        with suppress(OSError):  # the machine matters more than its recording
            self._keep_exchange(f"{number:04}", seen)

    def _keep_exchange(self, name: str, seen: Exchange) -> None:
        parts = urlsplit(seen.url)
        request = dict(seen.request_headers)
        self.keep(
            name,
            {
                "at_s": round(seen.began_unix - (self._began_unix or 0.0), 3),
                "seconds": round(seen.seconds, 3),
                "method": seen.method,
                "path": unquote(parts.path),
                "params": dict(parse_qsl(parts.query, keep_blank_values=True)),
                "request_headers": self._redactor.headers(seen.request_headers),
                "request": self._body(seen.request, request.get("content-type", "")),
                "status": seen.status,
                "headers": self._redactor.headers(seen.headers),
                "body": self._body(seen.body, ""),
                "error": seen.error,
            },
        )

    def keep(self, name: str, what: Any) -> None:
        """Write ``what`` as ``NAME.json``, redacted."""
        told = self._redactor.value(msgspec.to_builtins(what))
        text = msgspec.json.format(msgspec.json.encode(told), indent=1)
        (self.folder / f"{name}.json").write_bytes(text + b"\n")

    def _body(self, body: bytes, content_type: str) -> Any:
        """A body as JSON, as the fields of a form, or as text; None where there is none."""
        if not body:
            return None
        if content_type.startswith("application/x-www-form-urlencoded"):
            return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body[:MOST_BYTES].decode(errors="replace")
