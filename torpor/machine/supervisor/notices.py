"""What the machine's market says about its end, from the metadata service of the market.

A service that is silent, answers slowly or answers nonsense has said nothing: that is no error.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from torpor.shared.values import KIB
from torpor.shared.wire.job import SPOT_NOTICE_S, Notice, NoticeSource

EVERY_S: Final = {"aws": 5.0, "gcp": 2.0, "azure": 2.0}
"""Seconds between two questions to a service: AWS leaves two minutes, the others thirty seconds."""
ANSWER_S: Final = 2.0
"""Seconds that a service may take for an answer, however slowly it sends."""
ANSWER_BYTES: Final = 64 * KIB
MOST_NOTICES: Final = 100
"""Notices after this many are ignored."""
_TOKEN_S: Final = 21600

_Kind = Literal["aws-spot", "aws-rebalance", "gcp", "azure"]


class MetadataAnswer(NamedTuple):
    """A whole answer, of at most ANSWER_BYTES. Redirects are answers like any other."""

    status: int
    body: bytes


Ask = Callable[[str, str, dict[str, str]], "MetadataAnswer | None"]
"""Sends a request: its verb, URL and headers. None where no whole answer came."""


class NoticeListener:
    """Asks the services of ``sources``, each when it is due. ``clock`` counts seconds, ``now`` is
    the time of day. One thread's own."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        ask: Ask | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._services = [
            _SERVICES[source.kind](source.url, ask or ask_service, now) for source in sources
        ]
        self._every_s = [EVERY_S[source.kind] for source in sources]
        self._clock = clock
        self._due = [clock()] * len(sources)
        self._said: set[tuple[str, str]] = set()

    def poll(self) -> list[Notice]:
        """The notices that were not returned before. Asks only the services that are due; takes at
        most a few times ANSWER_S."""
        found = []
        for number, service in enumerate(self._services):
            if self._clock() < self._due[number]:
                continue
            for mark, notice in service.look():
                if (notice.kind, mark) not in self._said and len(self._said) < MOST_NOTICES:
                    self._said.add((notice.kind, mark))
                    found.append(notice)
            self._due[number] = self._clock() + self._every_s[number]
        return found

    @property
    def wait_s(self) -> float | None:
        """Seconds until a service is due; None if there is no service to ask."""
        return max(0.0, min(self._due) - self._clock()) if self._due else None


class _Service(ABC):
    """A market's metadata service. ``look`` returns what it says now, each with a mark that tells
    one notice from the next of its kind."""

    def __init__(self, url: str, ask: Ask, now: Callable[[], float]) -> None:
        self._url = url.rstrip("/")
        self._ask = ask
        self._now = now

    @abstractmethod
    def look(self) -> list[tuple[str, Notice]]: ...

    def _notice(
        self, kind: _Kind, mark: str, words: str, until_unix: float | None
    ) -> tuple[str, Notice]:
        return mark, Notice(kind, words, self._now(), until_unix)


class _Aws(_Service):
    """IMDSv2: each request needs a token, which the service gives for a time."""

    _token = ""

    def look(self) -> list[tuple[str, Notice]]:
        found = []
        action = self._read("spot/instance-action")
        if isinstance(what := action.get("action"), str):
            at = str(action.get("time"))
            words = f"AWS will {what[:20]} the machine at {at[:40]}"
            found.append(self._notice("aws-spot", f"{what} {at}", words, _iso_unix(at)))
            return found
        since = self._read("events/recommendations/rebalance").get("noticeTime")
        if isinstance(since, str):
            words = f"AWS sees a higher risk since {since[:40]} that it takes the machine"
            found.append(self._notice("aws-rebalance", since, words, None))
        return found

    def _read(self, path: str) -> dict[str, Any]:
        url = f"{self._url}/latest/meta-data/{path}"
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            if not self._token:
                break
            answer = self._ask("GET", url, {"X-aws-ec2-metadata-token": self._token})
            if answer is None or answer.status != 401:
                return _object(answer)
            self._token = ""  # the token has expired
        return {}

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        answer = self._ask("PUT", f"{self._url}/latest/api/token", headers)
        if answer is None or answer.status != 200 or len(answer.body) > KIB:
            return ""
        token = answer.body.decode("latin-1").strip()
        return token if token.isascii() and token.isprintable() else ""


class _Gcp(_Service):
    def look(self) -> list[tuple[str, Notice]]:
        url = f"{self._url}/computeMetadata/v1/instance/preempted"
        answer = self._ask("GET", url, {"Metadata-Flavor": "Google"})
        if answer is None or answer.status != 200 or answer.body.strip().upper() != b"TRUE":
            return []
        given_s = SPOT_NOTICE_S[
            "gcp"
        ]  # GCP says no time: https://cloud.google.com/compute/docs/instances/spot
        words = f"Google Cloud takes the machine within {given_s:.0f} s"
        return [self._notice("gcp", "", words, self._now() + given_s)]


class _Azure(_Service):
    def look(self) -> list[tuple[str, Notice]]:
        url = f"{self._url}/metadata/scheduledevents?api-version=2020-07-01"
        events = _object(self._ask("GET", url, {"Metadata": "true"})).get("Events")
        found = []
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and event.get("EventType") == "Preempt":
                until = str(event.get("NotBefore", ""))
                words = f"Azure takes the machine, not before {until[:40] or 'now'}"
                mark = str(event.get("EventId"))
                found.append(self._notice("azure", mark, words, _http_unix(until)))
        return found


_SERVICES: Final[dict[str, type[_Service]]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def ask_service(
    verb: str, url: str, headers: dict[str, str], answer_s: float = ANSWER_S
) -> MetadataAnswer | None:
    """Send one request by plain HTTP, through no proxy; None unless the whole answer comes in
    time."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{verb} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Length: 0"] if verb == "PUT" else []
    ends = time.monotonic() + answer_s
    try:
        place = (parts.hostname or "", parts.port or 80)
        with socket.create_connection(place, answer_s) as line:
            line.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            lent = cast(socket.socket, _Lent(line, ends))
            with http.client.HTTPResponse(lent, method=verb) as answer:
                answer.begin()
                return MetadataAnswer(answer.status, answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return None


class _Lent:
    """A socket as HTTPResponse needs it, with limits on time and bytes."""

    def __init__(self, line: socket.socket, ends: float) -> None:
        self._line = line
        self._ends = ends

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Bounded(self._line, self._ends), 4 * KIB)


class _Bounded(io.RawIOBase):
    def __init__(self, line: socket.socket, ends: float) -> None:
        self._line = line
        self._ends = ends
        self._left = ANSWER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left_s = self._ends - time.monotonic()
        if left_s <= 0 or not self._left:
            raise TimeoutError("the answer is too slow or too long")
        self._line.settimeout(left_s)
        count = self._line.recv_into(memoryview(into)[: self._left])
        self._left -= count
        return count


def _object(answer: MetadataAnswer | None) -> dict[str, Any]:
    """The JSON object of an answer with status 200; empty for anything else."""
    try:
        found = json.loads(answer.body) if answer and answer.status == 200 else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _iso_unix(text: str) -> float | None:
    try:
        at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return at.timestamp()


def _http_unix(text: str) -> float | None:
    """``Mon, 19 Sep 2016 18:29:47 GMT``; None for what is no time: Azure may say nothing once an
    event has started."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
