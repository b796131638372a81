"""The agent's transfers, through a proxy that fails on purpose, and with servers that lie."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.contracts.store_contract import KEY, download
from tests.fixtures.fault_proxy import Fault, FaultProxy, puts
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.store.memory import md5_of
from torpor.machine.agent.kept_packs import KeptPacks
from torpor.machine.agent.pack_server import PackServer, trusting
from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from torpor.shared.transfer import transfer as transfer_module
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import GAP_BYTES, Range, Transfer
from torpor.shared.values import KIB, MIB, Grant, ObjectKey, object_key

BODY = secrets.token_bytes(3 * MIB + 17)
WHOLE = [Range(0, len(BODY))]
RANGES = [Range(n * 256 * KIB, 200 * KIB) for n in range(12)]
FOR_EVER = 0x7FFFFFFF


class Watch:
    """A Transfer that does not sleep, and what it reported."""

    def __init__(self, **changes: Any) -> None:
        self.slept: list[float] = []
        self.retries: list[tuple[StoreError, float]] = []
        options = {"timeout_s": PATIENCE_S, "attempts": 4, "sleep": self.slept.append, **changes}
        self.transfer = Transfer(
            on_retry=lambda error, wait_s: self.retries.append((error, wait_s)), **options
        )

    def put(self, grant: Grant, *pieces: bytes | memoryview) -> None:
        self.transfer.put(grant, pieces or [BODY], md5_of(b"".join(pieces or [BODY])))

    def get(self, grant: Grant, ranges: list[Range] = WHOLE) -> list[bytes]:
        return download(self.transfer, grant, ranges)


class Faulty(FaultProxy):
    """Before ``store``, without faults until some are added."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        super().__init__(store.grant("GET", KEY, expires_s=60).url)

    def grant(self, verb: str, key: ObjectKey = KEY) -> Grant:
        """By way of the proxy; what is to be read is there."""
        if verb == "GET" and self.store.head(key) is None:
            self.store.put(key, BODY)
        made = self.store.grant(verb, key, expires_s=300)
        url = urlsplit(made.url)._replace(netloc=urlsplit(self.endpoint_url).netloc)
        return msgspec.structs.replace(made, url=url.geturl())


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.transfer.close()


@pytest.fixture
def faulty(memory_store: MemoryStore) -> Iterator[Faulty]:
    made = Faulty(memory_store)
    yield made
    made.close()


def _get(url: str) -> Grant:
    return Grant(KEY, "GET", url, FOR_EVER)


def _parts(ranges: list[Range]) -> list[bytes]:
    return [BODY[wanted.offset : wanted.end] for wanted in ranges]


def _name(fault: Fault) -> str:
    return f"{fault.kind}-{fault.status}-{fault.at_byte}-{fault.reads_body}"


PASSING = [
    Fault("status", status=500, code="InternalError"),
    Fault("status", status=503, count=3),
    Fault("status", status=429, code="TooManyRequests"),
    Fault("status", status=503, reads_body=False),
    Fault("status", status=400, code="RequestTimeout"),
    Fault("reset"),
    Fault("after"),
]


@pytest.mark.parametrize("fault", [*PASSING, Fault("flip_up", at_byte=MIB)], ids=_name)
def test_a_put_survives_what_passes(fault: Fault, faulty: Faulty, watch: Watch) -> None:
    expected = fault.count
    faulty.add(Fault(**vars(fault)))
    watch.put(faulty.grant("PUT"), BODY[:9], memoryview(BODY)[9:])
    assert faulty.store.get(KEY, max_bytes=len(BODY)) == BODY
    assert len(watch.retries) == expected
    assert len(faulty.requests) == expected + 1


@pytest.mark.parametrize(
    "fault",
    [*PASSING, Fault("cut", at_byte=MIB), Fault("reset", at_byte=2 * MIB), Fault("cut", at_byte=0)],
    ids=_name,
)
def test_a_get_survives_what_passes(fault: Fault, faulty: Faulty, watch: Watch) -> None:
    expected = fault.count
    faulty.add(Fault(**vars(fault)))
    assert watch.get(faulty.grant("GET"), RANGES) == _parts(RANGES)
    assert len(watch.retries) == expected


def test_a_get_goes_on_where_it_broke_off(faulty: Faulty, watch: Watch) -> None:
    """More faults than attempts, each after progress: attempts count from the last progress."""
    faulty.add(Fault("cut", count=8, at_byte=300 * KIB))
    asked: list[int] = []

    def buffer(length: int) -> memoryview:
        asked.append(length)
        return memoryview(bytearray(length + 5))

    views = watch.transfer.get_ranges(faulty.grant("GET"), RANGES, into=buffer)
    assert [bytes(view) for view in views] == _parts(RANGES)
    assert len(watch.retries) == 8
    assert asked == [wanted.length for wanted in RANGES]


def test_a_flipped_bit_down_reaches_the_callers_hash(faulty: Faulty, watch: Watch) -> None:
    faulty.add(Fault("flip_down", at_byte=MIB))
    (first,), (second,) = (watch.get(faulty.grant("GET")) for _ in range(2))
    assert [at for at in range(MIB - 9, MIB + 9) if first[at] != BODY[at]] == [MIB]
    assert second == BODY


@pytest.mark.parametrize("reads_body", [True, False])
def test_a_refusal_is_not_repeated(reads_body: bool, faulty: Faulty, watch: Watch) -> None:
    faulty.add(Fault("status", status=403, code="AccessDenied", count=9, reads_body=reads_body))
    with pytest.raises(StoreDenied, match=r"PUT packs/one at 127\.0\.0\.1:\d+: refused"):
        watch.put(faulty.grant("PUT"))
    with pytest.raises(StoreDenied, match=r"GET packs/one"):
        watch.get(faulty.grant("GET"))
    assert len(faulty.requests) == 2
    assert watch.slept == []


def test_a_lasting_fault_ends_after_the_attempts(faulty: Faulty, watch: Watch) -> None:
    faulty.add(Fault("status", count=99))
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        watch.put(faulty.grant("PUT"))
    assert faulty.store.head(KEY) is None
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        watch.get(faulty.grant("GET"))
    assert len(faulty.requests) == 2 * 4
    waits = [wait_s for _, wait_s in watch.retries[:3]]
    assert all(low <= wait <= 2 * low for low, wait in zip((0.25, 0.5, 1.0), waits, strict=True))


@pytest.mark.parametrize(
    ("status", "code"),
    [(507, "XMinioStorageFull"), (400, "XMinioAdminBucketQuotaExceeded"), (403, "QuotaExceeded")],
)
def test_a_full_store_is_not_waited_for(
    status: int, code: str, faulty: Faulty, watch: Watch
) -> None:
    faulty.add(Fault("status", status=status, code=code, count=99))
    with pytest.raises(StoreFull, match=r"the store is full .*; free space there") as told:
        watch.put(msgspec.structs.replace(faulty.grant("PUT"), patience_s=1800.0))
    assert not told.value.retryable
    assert len(faulty.requests) == 4


def test_the_wait_that_the_store_asks_for_is_kept_within_reason(
    faulty: Faulty, watch: Watch
) -> None:
    faulty.add(Fault("status", headers=(("Retry-After", "7"),)))
    faulty.add(Fault("status", headers=(("Retry-After", "86400"),)))
    watch.put(faulty.grant("PUT"))
    assert [wait_s for _, wait_s in watch.retries] == [7, 60]
    assert sum(watch.slept) == pytest.approx(67)


def test_a_silent_store_times_out(faulty: Faulty) -> None:
    faulty.add(Fault("timeout", count=2))
    watch = Watch(timeout_s=0.5, attempts=1000)  # a busy host may take longer to answer
    with watch.transfer:
        assert watch.get(faulty.grant("GET")) == [BODY]
    assert [type(error) for error, _ in watch.retries[:2]] == [StoreUnavailable] * 2
    assert "no progress within 0.5 s" in str(watch.retries[0][0])


def test_a_cancelled_wait_ends(faulty: Faulty) -> None:
    cancelled = threading.Event()
    watch = Watch(cancelled=cancelled.is_set, sleep=lambda _: cancelled.set())
    faulty.add(Fault("status", count=9, headers=(("Retry-After", "60"),)))
    with watch.transfer, pytest.raises(RunCancelled):
        watch.put(faulty.grant("PUT"))
    assert len(faulty.requests) == 1


def test_a_cancelled_transfer_stops_between_slices(faulty: Faulty) -> None:
    looks = iter(range(10**9))
    watch = Watch(cancelled=lambda: next(looks) >= 3)
    with watch.transfer, pytest.raises(RunCancelled, match="cancelled after"):
        watch.get(faulty.grant("GET"))


def test_near_ranges_share_a_request_and_far_ones_do_not(faulty: Faulty, watch: Watch) -> None:
    near = [Range(10, 5), Range(15, 5), Range(20 + GAP_BYTES, 5)]
    ranges = [*near, Range(26 + 2 * GAP_BYTES, 5)]
    assert watch.get(faulty.grant("GET"), ranges) == _parts(ranges)
    assert len(faulty.requests) == 2


def test_connections_are_kept_and_many_work_at_once(faulty: Faulty, watch: Watch) -> None:
    together, held = threading.Barrier(4), threading.Event()
    faulty.add(Fault("delay", puts("packs/"), delay_s=PATIENCE_S, ends=held))

    def move(number: int) -> bool:
        together.wait()
        body, key = BODY[number : number + MIB], object_key(f"packs/{number}")
        watch.put(faulty.grant("PUT", key), body)
        return watch.get(faulty.grant("GET", key), [Range(0, len(body))]) == [body]

    with ThreadPoolExecutor(4) as pool:
        moved = pool.map(move, range(12))
        until(lambda: faulty.peak("/packs") > 1, "another is moved meanwhile")
        held.set()
        assert all(moved)
    assert watch.retries == []
    assert 2 <= faulty.peak("/packs") <= 4
    assert faulty.connections <= 8  # keep-alive: not one for each of 24 requests


def test_wrong_use_is_refused(watch: Watch, faulty: Faulty) -> None:
    with pytest.raises(InvalidInput, match="is for GET, not for PUT"):
        watch.put(faulty.grant("GET"))
    with pytest.raises(InvalidInput, match="is for PUT, not for GET"):
        watch.get(faulty.grant("PUT"))
    for ranges in ([Range(5, 5), Range(9, 1)], [Range(5, 5), Range(0, 1)], [Range(0, 0)]):
        with pytest.raises(InvalidInput, match="sorted, apart and not empty"):
            watch.get(faulty.grant("GET"), ranges)
    for url in ("ftp://h/x", "http://", "h/x", "http://h:x/", "http://h/a b", "http://h/\n"):
        with pytest.raises(InvalidInput, match="http or https URL"):
            watch.get(_get(url))


# -- servers that lie


@contextmanager
def _served(*serves: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with its connections, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for serve in serves:
                peer, _ = listener.accept()
                with peer, suppress(OSError):  # of a client that hangs up
                    serve(peer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/object"
        finally:
            thread.join()


def _says(answer: bytes, body: bytes = b"") -> Callable[[socket.socket], None]:
    """Give one answer, whatever is asked, after a request with this body."""

    def serve(peer: socket.socket) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n" + body):
            received = peer.recv(65536)
            if not received:
                return
            request += received
        peer.sendall(b"HTTP/1.1 " + answer)

    return serve


def test_a_lax_store_that_keeps_a_flipped_bit_is_found_out(watch: Watch) -> None:
    """It ignores Content-MD5; the ETag still tells."""
    etags = [md5_of(body).hex().encode() for body in (b"abd", b"abc")]
    head = b"200 OK\r\nConnection: close\r\nContent-Length: 0\r\nETag: "
    answers = [head + b'"' + etag + b'"\r\n\r\n' for etag in etags]
    with _served(*(_says(answer, b"abc") for answer in answers)) as url:
        watch.put(Grant(KEY, "PUT", url, FOR_EVER), b"abc")
    assert [type(error) for error, _ in watch.retries] == [StoreCorrupt]


def test_a_trickle_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends a byte now and then never runs into a socket's timeout."""
    clock = SimpleNamespace(monotonic=count(step=PATIENCE_S).__next__)
    monkeypatch.setattr(transfer_module, "time", clock)
    over = threading.Event()

    def trickle(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 206 x\r\nContent-Length: 99999\r\n")
        peer.sendall(b"Content-Range: bytes 0-99998/99999\r\n\r\n")
        while not over.wait(0.02):
            peer.sendall(b"x")

    watch = Watch(attempts=1)
    with _served(trickle) as url:
        with watch.transfer, pytest.raises(StoreUnavailable, match="bytes moved in"):
            watch.get(_get(url), [Range(0, 99999)])
        over.set()


@pytest.mark.rule("H8")
@pytest.mark.parametrize(
    ("verb", "begins"),
    [
        ("PUT", b"HTTP/1.1 200 OK\r\nX-Slow: "),
        ("PUT", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
        ("PUT", b"HTTP/1.1 500 x\r\nContent-Length: 99999\r\n\r\n"),
        ("GET", b"HTTP/1.1 206 x\r\nX-Slow: "),
        ("GET", b"HTTP/1.1 500 x\r\nContent-Length: 99999\r\n\r\n"),
        (
            "GET",
            b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-99998/99999\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n1869F\r\n",
        ),
    ],
)
def test_an_answer_that_drips_ends_with_its_time(verb: str, begins: bytes) -> None:
    over = threading.Event()

    def drip(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(begins)
        with suppress(OSError):
            while not over.wait(0.02):
                peer.sendall(b"x")

    watch = Watch(attempts=1, timeout_s=0.2)
    with _served(drip) as url:
        with watch.transfer, pytest.raises(StoreUnavailable):
            if verb == "PUT":
                watch.put(Grant(KEY, "PUT", url, FOR_EVER), b"abc")
            else:
                watch.get(_get(url), [Range(0, 99999)])
        over.set()


def test_a_store_that_ignores_ranges_is_read_through(watch: Watch) -> None:
    """A plain web server: 200 and everything, whatever was asked for."""
    with _served(_says(b"200 OK\r\nContent-Length: 10\r\n\r\n0123456789")) as url:
        assert watch.get(_get(url), [Range(2, 3), Range(6, 1)]) == [b"234", b"6"]


@pytest.mark.parametrize(
    "head",
    [
        b"206 x\r\nContent-Range: bytes 3-5/10",
        b"206 x\r\nContent-Range: bytes 2-3/10",
        b"206 x\r\nContent-Range: nonsense",
        b"206 x",
    ],
)
def test_other_bytes_than_asked_for_are_refused(head: bytes) -> None:
    watch, wrong = Watch(attempts=1), pytest.raises(StoreCorrupt, match="bytes 2 to 5")
    answer = _says(head + b"\r\nContent-Length: 3\r\n\r\nxyz")
    with _served(answer) as url, watch.transfer, wrong:
        watch.get(_get(url), [Range(2, 3)])


def test_a_closed_port_and_an_unknown_host_are_errors(watch: Watch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/b/k?X-Amz-Signature=s3cret"
    with pytest.raises(StoreUnavailable, match="no connection to 127") as caught:
        watch.get(_get(url))
    assert "s3cret" not in str(caught.value)
    with pytest.raises(StoreUnavailable, match="cannot be resolved"):
        watch.get(_get("http://no.such.host.invalid/x"))


def test_https_to_a_plain_port_says_so(faulty: Faulty, watch: Watch) -> None:
    with pytest.raises(StoreError, match="no TLS with") as caught:
        watch.get(_get(faulty.endpoint_url.replace("http:", "https:") + "/b/k"))
    assert not caught.value.retryable


def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    kept = KeptPacks(tmp_path / "kept", MIB)
    kept.keep(bytes(16), 0, b"abc")
    server = PackServer(kept, "127.0.0.1", tmp_path)
    grant = _get(f"https://127.0.0.1:{server.port}/{server.token}/{'0' * 32}")
    connections = Connections(timeout_s=PATIENCE_S, tls=trusting(server.certificate))
    trusts, doubts = Watch(connections=connections), Watch()
    with closing(server), trusts.transfer, doubts.transfer:
        assert trusts.get(grant, [Range(1, 2)]) == [b"bc"]
        with pytest.raises(StoreError, match="is not trusted") as caught:
            doubts.get(grant, [Range(1, 2)])
    assert not caught.value.retryable
