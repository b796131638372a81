"""The HTTP of a fake market: one handler a request, with the faults that are armed."""

from __future__ import annotations

import hmac
import json
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from urllib.parse import parse_qsl, urlsplit

import httpx
from pydantic import SecretStr

from tests.fixtures.loopback import Handler, Loopback
from tests.fixtures.waiting import PATIENCE_S
from tests.markets.boot import Kind
from tests.markets.faults import Action, Fault, Faults
from tests.markets.market import Market, Rented, Ware
from tests.markets.policies import Need, Policy, Right
from torpor.control.providers.provider import Provider

KEY: Final = "fake-account-key"
HELD_S = 60.0  # a hanging request ends then, so that a lost test ends


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    action: Action = "any"
    fault: Fault | None = None  # that the handler itself acts out

    def has(self, *kinds: str) -> bool:
        return self.fault is not None and self.fault.kind in kinds


@dataclass
class Answer:
    status: int
    body: Any = None  # JSON, or text as it is; None: no body
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


class FakeMarket(Loopback, ABC):
    """A fake market that listens on loopback. Subclasses know the routes and the words.

    ``calls`` lists (method, path) as they came. ``step`` is called twice for each request: before
    it is carried out, and before its answer is sent; when it says False, the connection closes.
    """

    shown: frozenset[str] = frozenset({"lost", "error after"})
    """Faults that happen after the handler; all others before it, or inside it (``acted``)."""
    acted: frozenset[str] = frozenset(
        {"lives", "not found", "error that created", "no capacity", "quota", "denied", "no money"}
    )

    # -- what each market gives

    adapter: ClassVar[Callable[..., Provider]]
    wares: ClassVar[Callable[[], list[Ware]]]
    body: ClassVar[Kind] = "container"
    given_port: ClassVar[bool] = False
    """Whether the market's machines always have port 22, so that the adapter is told the fake's."""
    rents_by_hand: ClassVar[bool] = True
    """False: its machines begin and end by requests only."""
    prefix: ClassVar[str] = ""
    routes: ClassVar[dict[str, tuple[Action, str | dict[str, Any]]]]
    """A pattern of ``asked``: what such a request does, and the method that answers it, which gets
    the groups, or the body of the answer."""
    words: ClassVar[dict[str, tuple[Any, ...]]]
    """What ``error`` is told for each refusal, "wrong key", "no route", "error body", "failed"."""
    rights: ClassVar[Callable[[], list[Right]] | None] = None
    """What the market's page gives the key; None where keys have no scopes."""

    @staticmethod
    @abstractmethod
    def error(*words: Any) -> Answer:
        """A refusal as this market writes it."""

    def asked(self, request: Request) -> str:
        """What the routes are told apart by."""
        return f"{request.method} {request.path.removeprefix(self.prefix)}"

    def needs(self, request: Request) -> Iterable[Need]:
        """What the key must be allowed to do for it."""
        return ()

    def grant(self, rights: list[Right]) -> None:
        """Give the key further rights that the market's page names."""
        if self.policy is not None:
            self.policy.grant(rights)

    def may_adopt(self) -> None:
        """Give it those for ``torpor adopt``."""

    def hand_id(self, number: int) -> str:
        """The id of a machine that is not ours."""
        return f"{900_000 + number:032x}"

    # --

    def __init__(self, market: Market | None = None) -> None:
        self.market = market or Market(wares=type(self).wares())
        self.faults = Faults()
        self.policy = Policy(type(self).rights()) if type(self).rights else None
        self.key = KEY
        self.calls: list[tuple[str, str]] = []
        self.step: Callable[[], bool] = lambda: True
        self.broken: list[BaseException | None] = []
        self.closing = threading.Event()
        super().__init__(_Handler)

    def close(self) -> None:
        self.closing.set()
        super().close()
        self.market.close()
        assert self.broken == [], self.broken

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up in these tests. Any other error is the fake's own."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            self.broken.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(
        self,
        key: str = "",
        *,
        timeout_s: float = PATIENCE_S,
        ssh_port: int = 22,
        sleep: Callable[[float], None] = lambda s: None,
        **more: Any,
    ) -> Any:
        """The adapter at this fake, of its account where no other key is given. It repeats what
        failed without a pause."""
        if self.given_port:
            more["ssh_port"] = ssh_port
        return self.opened(key or self.key, timeout=httpx.Timeout(timeout_s), sleep=sleep, **more)

    def opened(self, key: str, **options: Any) -> Any:
        return type(self).adapter(key, url=self.url, **options)

    def settings(self) -> dict[str, Any]:
        """What a user fills into the market's block."""
        return {"api_key": SecretStr(self.key), "url": self.url}

    def rent_by_hand(self, ware: int = 0) -> Rented:
        """A machine without our label."""
        return self.market.rent(self.market.wares[ware], "by hand", {}, id_of=self.hand_id)

    def disown(self, machine: Rented) -> None:
        """Make it one that its user has rented."""
        machine.label = "mine"

    def action_of(self, request: Request) -> Action:
        """What the request does."""
        found = self._route(request)
        return found[0] if found else "account"

    def variables_of(self, machine: str) -> dict[str, str]:
        """What the market tells a machine of itself: its id, and a key to it alone."""
        return {}

    def handle(self, request: Request) -> Answer:
        """Carry the request out."""
        if request.has("denied"):
            return self.denied(request)
        found = self._route(request)
        if found is None:
            return self.error(*self.words["no route"])
        _, does, groups = found
        return getattr(self, does)(request, *groups) if isinstance(does, str) else Answer(200, does)

    def denied(self, request: Request) -> Answer:
        """The answer to a key that may not do this."""
        return self.error(*self.words["denied"])

    def unauthorized(self) -> Answer:
        """The answer to a wrong key."""
        return self.error(*self.words["wrong key"])

    def error_body(self, request: Request) -> Answer:
        """An error in a 200."""
        answer = self.error(*self.words["error body"])
        return Answer(200, answer.body, answer.content_type)

    def failed(self) -> Answer:
        """A 500, where the market has no other words."""
        if "failed" in self.words:
            return self.error(*self.words["failed"])
        return Answer(500, "Internal Server Error", "text/plain")

    def refusal(self, request: Request, *kinds: str) -> Answer | None:
        """Why nothing is rented, where a fault says so."""
        kinds = kinds or ("no capacity", "quota", "no money")
        kind = next((kind for kind in kinds if request.has(kind)), None)
        return self.error(*self.words[kind]) if kind else None

    def forget(self) -> None:
        """A long time passes: the market knows nothing of machines that have ended."""
        self.market.rented[:] = self.market.alive()

    def gave_up(self, status: int) -> Answer:
        """A gateway's, which no longer waits for the market."""
        return Answer(status, "<html>the gateway gave up</html>", "text/html")

    def login_of(self, request: Request, header: str) -> str:
        """What ``answer`` takes for authorization, where a market wants it elsewhere."""
        return header

    def listed(self, request: Request) -> list[Rented]:
        """The machines that this listing shows."""
        return [] if request.has("not found") else self.market.visible()

    def found(self, request: Request, number: str) -> Rented | None:
        """The live machine of that id, where this request may know it."""
        machine = next((m for m in self.market.alive() if m.id == number), None)
        unseen = machine is None or request.has("not found") or machine.hidden_looks > 0
        return None if unseen else machine

    def end(self, request: Request, machine: Rented) -> None:
        if not request.has("lives"):
            self.market.end(machine)

    def _route(self, request: Request) -> tuple[Action, str | dict[str, Any], Sequence[str]] | None:
        asked = self.asked(request)
        for pattern, (action, does) in self.routes.items():
            if found := re.fullmatch(pattern, asked):
                return action, does, found.groups()
        return None

    # -- one request

    def answer(self, request: Request, authorization: str) -> Answer | None:
        """None: close the connection without an answer."""
        with self.market.lock:
            self.calls.append((request.method, request.path))
        if not self.step():
            return None
        answer = self._faulty(request, authorization)
        return answer if self.step() else None

    def _faulty(self, request: Request, authorization: str) -> Answer | None:
        request.action = self.action_of(request)
        of_account = hmac.compare_digest(authorization, f"Bearer {self.key}")
        if not of_account and not self._ends_itself(request, authorization):
            return self.unauthorized()
        early = self.faults.take(request.action, lambda kind: kind not in self.shown | self.acted)
        if early is not None:
            return self._instead(early, request)
        if of_account and not self._permitted(request):
            return self.denied(request)
        request.fault = self.faults.take(request.action, lambda kind: kind in self.acted)
        answer = self.handle(request)
        after = self.faults.take(request.action, lambda kind: kind in self.shown)
        if after is None:
            return answer
        if after.kind == "lost":
            return None
        if after.status != 500:
            return self.gave_up(after.status)
        return self.failed()

    def _permitted(self, request: Request) -> bool:
        policy = self.policy
        return policy is None or all(policy.permits(need) for need in self.needs(request))

    def _ends_itself(self, request: Request, authorization: str) -> bool:
        """Whether a machine asks, which has the key to itself, for its own end."""
        machine = request.path.rstrip("/").rpartition("/")[2]
        key = next((word for word in self.variables_of(machine).values() if word != machine), None)
        return request.method == "DELETE" and key is not None and authorization == f"Bearer {key}"

    def _instead(self, fault: Fault, request: Request) -> Answer | None:
        if fault.kind == "hang":
            self.closing.wait(HELD_S)
            return None
        if fault.kind == "too many":
            wait = fault.retry_after_s
            headers = {} if wait is None else {"Retry-After": str(wait)}
            text = "API requests too frequent: endpoint threshold=4.5"
            return Answer(429, text, "text/plain", headers)
        if fault.kind == "unavailable":
            return Answer(503, "Service Unavailable", "text/plain")
        if fault.kind == "error body":
            return self.error_body(request)
        if fault.kind == "wrong shape":
            return Answer(200, {"result": {"items": []}})
        if fault.kind == "not json":
            return Answer(200, "<html>maintenance</html>", "text/html")
        raise AssertionError(f"{fault.kind} does not happen before a request")


_LIBRARIES: Final = ("Python-urllib", "python-httpx")
"""What Cloudflare, which stands before some markets, refuses: no name of its own."""


class _Handler(Handler):
    server: FakeMarket

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        if len(raw) < length:
            raise ConnectionResetError("the client was killed before it had sent all")
        parts = urlsplit(self.path)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode(errors="replace")
        request = Request(self.command, parts.path, dict(parse_qsl(parts.query)), body)
        fake = self.server
        login = fake.login_of(request, self.headers.get("Authorization", ""))
        answer: Answer | None
        if self.headers.get("User-Agent", "").startswith(_LIBRARIES):
            answer = Answer(403, "error code: 1010", "text/plain")
        else:
            answer = fake.answer(request, login)
        if answer is None:
            self.close_connection = True
            return
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        body = b"" if answer.body is None else text.encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": answer.content_type, **answer.headers}.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 (http.server's names)
