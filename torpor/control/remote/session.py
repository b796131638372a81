"""A conversation with one machine's agent that outlives dropped connections."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Final, TypeVar

from torpor.control.remote.bundle import Bundle
from torpor.control.remote.install import INSTALL_S
from torpor.control.remote.link import Link, Route, open_link
from torpor.control.remote.probe import DEFAULT_HOME, PYTHON_CANDIDATES, Probed
from torpor.control.remote.ssh import BEGIN_S, Completed, Identity
from torpor.shared.errors import AgentLost, TorporError, as_ours, from_wire
from torpor.shared.values import Endpoint
from torpor.shared.wire.protocol import (
    PING_LINE,
    PING_S,
    Hello,
    Said,
    cancel_line,
    request_line,
)
from torpor.shared.wire.request import Event, Request, parse_answer

ATTEMPTS: Final = 5
# waits in seconds before each attempt, times 0.5 to 1.5
BACKOFF_S: Final = (0.1, 1.0, 3.0, 8.0, 15.0)
RECONNECT_S: Final = 60.0  # seconds after which no attempt begins
MAX_SENDS: Final = 5  # tries of a request, which may kill each agent that gets it
UNANSWERED: Final = 20
"""Pings, one each PING_S, after which a link on which no byte came is lost: the agent is stopped,
or its machine hangs. A busy agent answers, because its reader and its writer wait for no
request."""
OPEN_S: Final = 1200.0  # seconds, enough for a first install over a slow link
_WAITING_EVENTS: Final = 64
_CLOSE_S: Final = 20.0

A = TypeVar("A")
T = TypeVar("T")


class SshSession:
    """A Session over SSH. Synchronous; many calls at once go over one SSH connection.

    After a dropped connection it connects again and repeats every unanswered request under the same
    id. So each request is served once as long as the agent lives.
    """

    def __init__(
        self, route: Route, pin: Callable[[str], None] | None, check: Callable[[], None]
    ) -> None:
        self._route = route
        self._pin = pin
        self._check = check
        self._waiting: dict[str, _Waiting] = {}
        self._link: Link | None = None
        self._hello: Hello | None = None
        self._mending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="torpor-session", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        endpoint: Endpoint,
        identity: Identity,
        *,
        home: str | None = None,
        pin: Callable[[str], None] | None = None,
        cache: Path | None = None,
        candidates: Sequence[str] = PYTHON_CANDIDATES,
        source: Path | None = None,
        sampled: bool = False,
        open_s: float = OPEN_S,
        check: Callable[[], None] = lambda: None,
    ) -> SshSession:
        """Connect, check the machine, install the agent where it is not there, and attach, all
        within ``open_s``.

        ``pin`` gets the host key if ``endpoint`` has none, and must record it. ``cache`` holds
        the bundles. ``sampled``: a sampler is to run on the machine from now on. Raises
        MachineUnreachable, MachineDenied, HostKeyChanged, MachineUnfit, DiskFull or AgentLost;
        nothing is sent to a machine that cannot run the agent.
        """
        route = Route(
            endpoint, identity, home or DEFAULT_HOME, tuple(candidates), cache, source, sampled
        )
        session = cls(route, pin, check)
        try:
            session._await(session._connect(), open_s)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def hello(self) -> Hello:
        if self._hello is None:
            raise AgentLost(f"{self._route.where}: no agent was attached")
        return self._hello

    def call(
        self,
        request: Request[A],
        *,
        request_id: str,
        on_event: Callable[[Event], None] | None = None,
        within_s: float | None = None,
    ) -> A:
        line = request_line(request_id, request)
        waiting = _Waiting(request.op, request_id, line, self._route.where, within_s)
        self._submit(lambda: self._begin(waiting))
        try:
            while (event := waiting.next_event()) is not None:
                if on_event is not None:
                    on_event(event)
        except BaseException:
            self.cancel(request_id)
            raise
        finally:
            self._submit(lambda: self._end(waiting), quiet=True)
        return parse_answer(type(request), waiting.result())

    @property
    def machine(self) -> Probed:
        return self._attached().machine

    def execute(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> Completed:
        return self._await(self._attached().execute(argv, timeout_s), _most_s(timeout_s))

    def run_script(self, script: str, *arguments: str, timeout_s: float = 60.0) -> Completed:
        work = self._attached().run_script(script, arguments, timeout_s)
        return self._await(work, _most_s(timeout_s))

    def send_bundle(self, bundle: Bundle) -> str:
        return self._await(self._attached().send_bundle(bundle), _most_s(INSTALL_S))

    def listens(self, port: int) -> bool:
        return self._await(self._attached().listens(port), _CLOSE_S)

    @contextmanager
    def forward(self, port: int) -> Iterator[int]:
        listener = self._await(self._attached().forward(port), _CLOSE_S)
        try:
            yield listener.get_port()
        finally:
            self._submit(listener.close, quiet=True)

    def cancel(self, request_id: str) -> None:
        self._submit(lambda: self._cancel(request_id), quiet=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._await(self._shut(), _CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def __enter__(self) -> SshSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def _attached(self) -> Link:
        if self._link is None:
            raise AgentLost(f"{self._route.where}: the connection is down")
        return self._link

    # -- from the callers' threads to the loop's

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _await(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            future.cancel()
            raise AgentLost(
                f"{self._route.where}: no agent was attached within {timeout_s:g} s"
            ) from error
        except BaseException:  # the caller was interrupted: end its work
            future.cancel()
            raise

    def _submit(self, step: Callable[[], None], quiet: bool = False) -> None:
        try:
            if not self._closed or quiet:
                self._loop.call_soon_threadsafe(step)
                return
        except RuntimeError:  # the loop is closed
            if quiet:
                return
        raise AgentLost(f"the session with {self._route.where} was closed: open a new one")

    # -- on the loop's thread

    def _begin(self, waiting: _Waiting) -> None:
        if waiting.request_id in self._waiting:
            waiting.fail(AgentLost(f"request {waiting.request_id} is being waited for already"))
            return
        if self._closed:
            waiting.fail(AgentLost(f"the session with {self._route.where} was closed"))
            return
        self._waiting[waiting.request_id] = waiting
        if self._link is None:
            self._mend()
        else:
            self._spawn(self._ask(self._link, waiting))

    async def _ask(self, link: Link, waiting: _Waiting) -> None:
        """Send the request. From now on it may take ``within_s``, unless the link ends before."""
        waiting.sends += 1
        if waiting.within_s is not None:
            waiting.end_limit()
            waiting.limit = self._loop.call_later(waiting.within_s, self._expire, link, waiting)
        await self._send(link, waiting.line)

    def _expire(self, link: Link, waiting: _Waiting) -> None:
        if self._link is link and not waiting.done:
            waiting.fail(
                AgentLost(
                    f"{self._route.where}: {waiting.op} was not answered within "
                    f"{waiting.within_s:g} s: does a disk of the machine hang, or is it short of "
                    "memory?"
                )
            )
            self._cancel(waiting.request_id)

    def _end(self, waiting: _Waiting) -> None:
        waiting.end_limit()
        if self._waiting.get(waiting.request_id) is waiting:
            del self._waiting[waiting.request_id]

    def _cancel(self, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.cancelled = True
        if self._link is not None:
            self._spawn(self._send(self._link, cancel_line(request_id)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, link: Link, line: bytes) -> None:
        try:
            await link.send(line)
        except AgentLost:  # `_listen` sees the same end, and reconnects
            return

    async def _connect(self) -> None:
        link, self._hello = await open_link(self._route, self._pinned)
        self._link = link
        self._spawn(self._listen(link))
        self._spawn(self._ping(link))

    def _pinned(self, host_key: str) -> None:
        self._route = self._route.pinned(host_key)
        if self._pin is not None:
            self._pin(host_key)

    async def _listen(self, link: Link) -> None:
        try:
            with suppress(Exception):  # the link is gone: repeat unanswered requests
                async for said in link.messages():
                    waiting = self._waiting.get(said.id or "")
                    if waiting is not None:
                        waiting.take(said)
        finally:
            if self._link is link:
                self._link = None
        await link.close(graceful=False)
        if self._waiting and not self._closed:
            self._mend()

    async def _ping(self, link: Link) -> None:
        """Ping; end a link that is silent. The silence is counted in pings, not in seconds: a
        control side that slept has heard nothing either."""
        heard, unanswered = link.heard, 0
        while self._link is link and unanswered < UNANSWERED:
            # sending may wait for a peer that reads nothing
            self._spawn(self._send(link, PING_LINE))
            await asyncio.sleep(PING_S)
            unanswered = unanswered + 1 if link.heard == heard else 0
            heard = link.heard
        if self._link is link:  # `_listen` sees the end, and reconnects
            await link.close(graceful=False)

    def _mend(self) -> None:
        if self._mending is None or self._mending.done():
            self._mending = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        began, made, cause = time.monotonic(), 0, "no attempt"
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(BACKOFF_S[attempt] * random.uniform(0.5, 1.5))  # noqa: S311  jitter
            if time.monotonic() - began > RECONNECT_S:
                break
            made += 1
            try:
                await asyncio.to_thread(self._check)
                await self._connect()
            except Exception as error:  # noqa: BLE001 - callers would wait for ever
                if not (ours := as_ours(error)).retryable:
                    self._fail_all(ours)
                    return
                cause = str(error)
            else:
                await self._repeat()
                return
        self._fail_all(AgentLost(f"{self._route.where} stays away after {made} attempts: {cause}"))

    async def _repeat(self) -> None:
        link = self._link
        for waiting in list(self._waiting.values()):
            if link is None or waiting.done:
                continue
            if waiting.sends >= MAX_SENDS:
                waiting.fail(
                    AgentLost(
                        f"{self._route.where}: {waiting.op} was asked for {MAX_SENDS} times and "
                        "the agent was lost each time: is it killed there, for want of memory?"
                    )
                )
                continue
            await self._ask(link, waiting)
            if waiting.cancelled:
                await self._send(link, cancel_line(waiting.request_id))

    def _fail_all(self, error: TorporError) -> None:
        for waiting in self._waiting.values():
            waiting.fail(error)

    async def _shut(self) -> None:
        self._fail_all(AgentLost(f"the session with {self._route.where} was closed"))
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        rest = set(self._tasks)
        if self._mending is not None:
            rest.add(self._mending)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class _Waiting:
    """A request without an answer yet. The loop's thread writes it, and the caller's thread reads
    it."""

    def __init__(
        self, op: str, request_id: str, line: bytes, where: str, within_s: float | None
    ) -> None:
        self.op = op
        self.request_id = request_id
        self.line = line
        self.within_s = within_s
        self.limit: asyncio.TimerHandle | None = None
        self._where = where
        self.sends = 0
        self.cancelled = False
        self._wake = threading.Condition()
        self._events: deque[Event] = deque(maxlen=_WAITING_EVENTS)
        self._result: dict[str, Any] | None = None
        self._error: TorporError | None = None

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def take(self, said: Said) -> None:
        with self._wake:
            if self.done:
                return
            if said.error is not None:
                error = from_wire(said.error)
                self._error = type(error)(f"{self._where}: {error}")
            elif said.event is not None:
                self._events.append(said.event)
            elif isinstance(said.result, dict):
                self._result = said.result
            self._wake.notify_all()

    def end_limit(self) -> None:
        """End the time limit. Called on the loop's thread."""
        if self.limit is not None:
            self.limit.cancel()
            self.limit = None

    def fail(self, error: TorporError) -> None:
        with self._wake:
            if not self.done:
                self._error = error
                self._wake.notify_all()

    def next_event(self) -> Event | None:
        """The next event, or None once there is an answer."""
        with self._wake:
            while not self._events and not self.done:
                self._wake.wait()
            return self._events.popleft() if self._events else None

    def result(self) -> dict[str, Any]:
        if self._error is not None:
            raise copy(self._error)
        if self._result is None:
            raise AgentLost(f"{self.op} ({self.request_id}): the session ended before the answer")
        return self._result


def _most_s(timeout_s: float) -> float:
    """Seconds to wait for the answer of a program that may run for ``timeout_s`` after a login."""
    return BEGIN_S + timeout_s + _CLOSE_S
