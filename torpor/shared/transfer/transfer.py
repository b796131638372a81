"""Objects over grants, as the agent moves them: standard library HTTP, no signing, no copies.

One ``Transfer`` serves all threads of an agent. It holds keep-alive connections, one request at a
time each, and is the one place on the machine where a request to the store is repeated.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from torpor.shared.errors import (
    InvalidInput,
    ObjectExists,
    RunCancelled,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
)
from torpor.shared.transfer.answer import ERROR_BODY_BYTES, carried_by, refusal
from torpor.shared.transfer.connections import Connections, Target, target_of
from torpor.shared.transfer.etag import encryption_of, plain_md5
from torpor.shared.transfer.retries import ATTEMPTS, Retries
from torpor.shared.values import KIB, Away, Grant

# a hole up to this size is read and dropped: a second request would take longer
GAP_BYTES = 64 * KIB
SLICE_BYTES = 256 * KIB  # moved between two looks at the pace and at the cancel callback
SLOWEST_BYTES_S = 16 * KIB  # a request that falls below this rate for its timeout has stalled


class Range(NamedTuple):
    """``length`` bytes of an object from ``offset``."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Transfer:
    """PUT and ranged GET over grants, from any number of threads.

    A PUT is sent at most ``attempts`` times. A GET is sent at most ``attempts`` times after the
    last range that arrived. Where the grant has a patience, a store that is away is asked again for
    that long. Each attempt connects at most once. ``on_retry`` gets each error that is retried and
    the wait in seconds; ``on_away`` gets each wait beyond ``attempts``. Once ``cancelled()`` is
    true, a wait ends within NAP_S and a request within one slice, with RunCancelled. A request that
    takes longer than ``timeout_s`` and its bytes at ``slowest_bytes_s`` has stalled.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        attempts: int = ATTEMPTS,
        on_retry: Callable[[StoreError, float], None] | None = None,
        on_away: Callable[[Away], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        connections: Connections | None = None,
        slowest_bytes_s: float = SLOWEST_BYTES_S,
    ) -> None:
        if timeout_s <= 0:
            raise InvalidInput(f"a transfer with timeout_s={timeout_s} would do nothing")
        self._connections = connections or Connections(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._retries = Retries(
            attempts,
            on_retry=on_retry,
            on_away=on_away,
            cancelled=cancelled,
            sleep=sleep,
            clock=clock,
        )
        self._cancelled = cancelled
        self._slowest_bytes_s = slowest_bytes_s

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections; those in use are closed when their request ends."""
        self._connections.close()

    def put(
        self, grant: Grant, pieces: Sequence[bytes | bytearray | memoryview], md5: bytes
    ) -> None:
        """Write the object whole; ``md5`` is the digest of the pieces together.

        Returns when the store has acknowledged these very bytes; or when it says, after an attempt
        whose answer was lost, that the object is there. Raises StoreUnavailable or StoreCorrupt
        after the last attempt; GrantExpired, StoreDenied, StoreMissing, ObjectExists at once.
        """
        sent = 0

        def put() -> None:
            nonlocal sent
            sent += 1
            try:
                self._put_once(target, grant, views, md5)
            except ObjectExists:
                if sent == 1:
                    raise

        target = _target(grant, "PUT")
        views = [memoryview(piece).cast("B") for piece in pieces]
        self._retries.run(put, grant.patience_s)

    def get_ranges(
        self,
        grant: Grant,
        ranges: Sequence[Range],
        *,
        into: Callable[[int], memoryview] | None = None,
    ) -> Generator[memoryview, None, None]:
        """Yield each range's bytes in order; the ranges are sorted, apart and not empty.

        ``into(length)`` gives the buffer for the next range, at least ``length`` bytes (it is the
        caller's again once the view was yielded); without it each range gets a buffer of its own.
        Neighbours share one request. After a fault the rest is asked for again, from the first
        range not yielded. Bytes are what the server sent: the caller checks their hashes.
        """
        target = _target(grant, "GET")
        _check_ranges(grant, ranges)
        view: memoryview | None = None
        done, tries = 0, self._retries.tries(grant.patience_s)
        while done < len(ranges):
            run = _neighbours(ranges, done)
            try:
                with self._opened(target, grant, run) as body:
                    for wanted in run:
                        if view is None:
                            view = _buffer(into, wanted.length)
                        body.read(wanted, view)
                        whole, view = view, None
                        done += 1
                        tries.went()
                        yield whole
            except (StoreUnavailable, StoreCorrupt) as error:
                tries.wait(error)

    def _put_once(self, target: Target, grant: Grant, views: list[memoryview], md5: bytes) -> None:
        length = sum(len(view) for view in views)
        headers = {
            "Content-Length": str(length),
            "Content-MD5": base64.b64encode(md5).decode(),
        }
        if grant.once:
            headers["If-None-Match"] = "*"
        with self._exchange(target, grant, headers, views) as answer:
            if answer.status not in (200, 201, 204):
                raise refusal(grant, target.netloc, answer, answer.read(ERROR_BODY_BYTES))
            answer.read()
            named = {name.lower(): value for name, value in answer.getheaders()}
            stored = plain_md5(named.get("etag"), encryption_of(named))
        if stored is not None and stored != md5.hex():
            raise StoreCorrupt(
                f"PUT {grant.key} at {target.netloc}: the store holds MD5 {stored}, "
                f"{md5.hex()} was sent ({length} bytes)"
            )

    @contextlib.contextmanager
    def _opened(self, target: Target, grant: Grant, run: Sequence[Range]) -> Iterator[_Body]:
        """The answer to one GET for all of ``run``, standing at a known offset."""
        start, end = run[0].offset, run[-1].end
        headers = {"Range": f"bytes={start}-{end - 1}"}
        what = f"GET {grant.key} at {target.netloc}"
        with self._exchange(target, grant, headers, []) as answer:
            if answer.status not in (200, 206):
                raise refusal(grant, target.netloc, answer, answer.read(ERROR_BODY_BYTES))
            carried = carried_by(answer.status, answer.getheader("Content-Range"), answer.length)
            if not carried.start <= start < end <= carried.stop:
                raise StoreCorrupt(
                    f"{what}: asked for bytes {start} to {end}, the store sends {carried.start} "
                    f"to {carried.stop}: the object is shorter than its manifest says, or the "
                    "store does not do ranges"
                )
            yield _Body(answer, grant, target.netloc, carried.start, self._pace(what))

    @contextlib.contextmanager
    def _exchange(
        self, target: Target, grant: Grant, headers: dict[str, str], views: list[memoryview]
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request and lend its answer; keeps the connection if that was read whole."""
        what = f"{grant.verb} {grant.key} at {target.netloc}"
        if self._cancelled():
            raise RunCancelled(f"{what}: cancelled")
        connection = self._connections.take(target)
        answer: http.client.HTTPResponse | None = None
        try:
            with contextlib.ExitStack() as watched:
                try:
                    self._send(connection, target, grant, headers, views, self._pace(what))
                except (BrokenPipeError, ConnectionResetError):
                    # A store may refuse and close before it has read the body: its answer gives the
                    # reason.
                    watched.enter_context(_broken_after(self._timeout_s, connection))
                    answer = connection.getresponse()
                    if answer.status < 400:
                        raise
                else:
                    watched.enter_context(_broken_after(self._timeout_s, connection))
                    answer = connection.getresponse()
                if grant.verb == "GET" and answer.status < 300:
                    watched.close()  # the reader of the body checks the pace
                yield answer
        except TimeoutError:
            raise StoreUnavailable(f"{what}: no progress within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(
                f"{what}: the connection broke ({type(error).__name__}: {error})"
            ) from None
        finally:
            if answer is not None and answer.isclosed() and not answer.will_close:
                self._connections.give(target, connection)
            else:
                if answer is not None:
                    answer.close()
                connection.close()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        target: Target,
        grant: Grant,
        headers: dict[str, str],
        views: list[memoryview],
        pace: Callable[[int], None],
    ) -> None:
        connection.putrequest(grant.verb, target.path, skip_host=True, skip_accept_encoding=True)
        # The Host header as it stands in the URL: the signature covers it, including the port.
        connection.putheader("Host", target.netloc)
        connection.putheader("Accept-Encoding", "identity")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        for view in views:
            for at in range(0, len(view), SLICE_BYTES):
                piece = view[at : at + SLICE_BYTES]
                connection.send(piece)
                pace(len(piece))

    def _pace(self, what: str) -> Callable[[int], None]:
        """A check to call with each count of bytes moved: raises when the run is cancelled or the
        transfer is slower than allowed."""
        began, moved = time.monotonic(), 0

        def check(count: int) -> None:
            nonlocal moved
            moved += count
            if self._cancelled():
                raise RunCancelled(f"{what}: cancelled after {moved} bytes")
            spent_s = time.monotonic() - began
            if spent_s > self._timeout_s + moved / self._slowest_bytes_s:
                raise StoreUnavailable(f"{what}: only {moved} bytes moved in {spent_s:.0f} s")

        return check


class _Body:
    """An answer's body, read forward only, its position known."""

    def __init__(
        self,
        answer: http.client.HTTPResponse,
        grant: Grant,
        host: str,
        at: int,
        pace: Callable[[int], None],
    ) -> None:
        self._answer = answer
        self._what = f"GET {grant.key} at {host}"
        self._at = at
        self._pace = pace

    def read(self, wanted: Range, view: memoryview) -> None:
        """Fill ``view`` with the range; what lies before it is read and dropped."""
        hole = wanted.offset - self._at
        scratch = memoryview(bytearray(min(hole, SLICE_BYTES)))
        while hole > 0:
            hole -= self._read_some(scratch[:hole], wanted)
        filled = 0
        while filled < wanted.length:
            filled += self._read_some(view[filled : filled + SLICE_BYTES], wanted)

    def _read_some(self, view: memoryview, wanted: Range) -> int:
        # At most one receive call between two checks of the pace, so that a slow trickle cannot
        # outlast the timeout.
        plain = self._answer.length is not None and not self._answer.chunked
        count = _receive(self._answer, view) if plain else _receive_chunk(self._answer, view)
        if not count:
            raise StoreUnavailable(
                f"{self._what}: the body ends at byte {self._at}, {wanted.end} was promised"
            )
        self._at += count
        self._pace(count)
        return count


def _receive(answer: http.client.HTTPResponse, view: memoryview) -> int:
    """``readinto`` with at most one receive."""
    length = answer.length or 0
    if not length or answer.fp is None:
        return 0
    count = answer.fp.readinto1(view[:length])
    answer.length = length - count
    if answer.length == 0:
        # reads zero bytes, which marks the answer as read whole, so the connection is kept
        answer.read()
    return count


def _receive_chunk(answer: http.client.HTTPResponse, view: memoryview) -> int:
    """``readinto`` for a chunked body, or for one that ends with its connection."""
    data = answer.read1(len(view))
    view[: len(data)] = data
    return len(data)


@contextlib.contextmanager
def _broken_after(timeout_s: float, connection: http.client.HTTPConnection) -> Iterator[None]:
    """Close the connection and raise TimeoutError if the answer has not come in time. The socket's
    own timeout counts from the last byte, so a store that drips bytes never reaches it; a half
    answer could be taken for a whole one."""
    late = threading.Event()
    timer = threading.Timer(timeout_s, _break, (connection.sock, late))
    timer.daemon = True
    # no thread can be started: an answer that drips is waited for
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TimeoutError


def _break(line: socket.socket | None, late: threading.Event) -> None:
    late.set()
    if line is not None:
        with contextlib.suppress(OSError):  # the socket is closed already
            # no TLS shutdown: another thread is reading the socket
            socket.socket.shutdown(line, socket.SHUT_RDWR)


def _target(grant: Grant, verb: str) -> Target:
    if grant.verb != verb:
        raise InvalidInput(f"the grant for {grant.key} is for {grant.verb}, not for {verb}")
    return target_of(grant.url, f"the grant for {grant.key}")


def _check_ranges(grant: Grant, ranges: Sequence[Range]) -> None:
    last = 0
    for wanted in ranges:
        if wanted.offset < last or wanted.length < 1:
            raise InvalidInput(
                f"ranges of {grant.key} must be sorted, apart and not empty: {wanted.length} "
                f"bytes at {wanted.offset} follow what ends at {last}"
            )
        last = wanted.end


def _neighbours(ranges: Sequence[Range], first: int) -> Sequence[Range]:
    """The ranges from ``first`` on that one request can fetch, where the holes between them are
    small."""
    last = first + 1
    while last < len(ranges) and ranges[last].offset - ranges[last - 1].end <= GAP_BYTES:
        last += 1
    return ranges[first:last]


def _buffer(into: Callable[[int], memoryview] | None, length: int) -> memoryview:
    view = memoryview(bytearray(length)) if into is None else into(length)
    if view.readonly or view.format != "B" or len(view) < length:
        raise InvalidInput(f"the buffer given for {length} bytes is read-only or too small")
    return view[:length]
