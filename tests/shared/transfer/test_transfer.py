"""The agent's transfers through a proxy that fails on purpose, before a real SeaweedFS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.contracts.store_contract import KEY, download
from tests.fixtures.fault_proxy import Fault, FaultProxy
from tests.fixtures.memory_store import md5_of
from tests.fixtures.stores import Server
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import GAP_BYTES, Range, Transfer
from torpor.shared.values import KIB, MIB, Grant, object_key

BODY = secrets.token_bytes(3 * MIB + 17)
WHOLE = [Range(0, len(BODY))]
RANGES = [Range(n * 256 * KIB, 200 * KIB) for n in range(12)]


class Watch:
    """A Transfer that does not sleep, and what it reported."""

    def __init__(self, **changes: object) -> None:
        self.slept: list[float] = []
        self.retries: list[tuple[StoreError, float]] = []
        self.transfer = Transfer(
            timeout_s=changes.pop("timeout_s", 20.0),  # type: ignore[arg-type]
            attempts=4,
            sleep=changes.pop("sleep", self.slept.append),  # type: ignore[arg-type]
            on_retry=lambda error, wait_s: self.retries.append((error, wait_s)),
            **changes,  # type: ignore[arg-type]
        )


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.transfer.close()


@pytest.fixture
def impatient() -> Iterator[Watch]:
    watch = Watch(timeout_s=3.0)
    yield watch
    watch.transfer.close()


@pytest.fixture
def store(seaweed: Server, fault_proxy: FaultProxy) -> S3Store:
    """Speaks to SeaweedFS itself."""
    return seaweed.store()


@pytest.fixture
def faulty(seaweed: Server, fault_proxy: FaultProxy, store: S3Store) -> S3Store:
    """The same bucket by way of the proxy: for grants."""
    return seaweed.same(store, endpoint_url=fault_proxy.endpoint_url)


def put_grant(faulty: S3Store) -> Grant:
    return faulty.grant("PUT", KEY, expires_s=300)


def get_grant(faulty: S3Store) -> Grant:
    return faulty.grant("GET", KEY, expires_s=300)


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
def test_a_put_survives_what_passes(
    fault: Fault, fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    expected = fault.count
    fault_proxy.add(Fault(**vars(fault)))
    watch.transfer.put(put_grant(faulty), [BODY[:9], memoryview(BODY)[9:]], md5_of(BODY))
    assert store.get(KEY, max_bytes=len(BODY)) == BODY
    assert len(watch.retries) == expected
    assert len(fault_proxy.requests) == expected + 1


@pytest.mark.parametrize(
    "fault",
    [*PASSING, Fault("cut", at_byte=MIB), Fault("reset", at_byte=2 * MIB), Fault("cut", at_byte=0)],
    ids=_name,
)
def test_a_get_survives_what_passes(
    fault: Fault, fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    store.put(KEY, BODY)
    expected = fault.count
    fault_proxy.add(Fault(**vars(fault)))
    got = download(watch.transfer, get_grant(faulty), RANGES)
    assert got == [BODY[wanted.offset : wanted.end] for wanted in RANGES]
    assert len(watch.retries) == expected


def test_a_get_goes_on_where_it_broke_off(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    """More faults than attempts, each after progress: attempts count from the last progress."""
    store.put(KEY, BODY)
    fault_proxy.add(Fault("cut", count=8, at_byte=300 * KIB))
    asked: list[int] = []

    def buffer(length: int) -> memoryview:
        asked.append(length)
        return memoryview(bytearray(length + 5))

    got = [
        bytes(view) for view in watch.transfer.get_ranges(get_grant(faulty), RANGES, into=buffer)
    ]
    assert got == [BODY[wanted.offset : wanted.end] for wanted in RANGES]
    assert len(watch.retries) == 8
    assert asked == [wanted.length for wanted in RANGES]


def test_a_flipped_bit_down_reaches_the_callers_hash(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    store.put(KEY, BODY)
    fault_proxy.add(Fault("flip_down", at_byte=MIB))
    grant = get_grant(faulty)
    (first,), (second,) = (download(watch.transfer, grant, WHOLE) for _ in range(2))
    assert [at for at in range(MIB - 9, MIB + 9) if first[at] != BODY[at]] == [MIB]
    assert second == BODY


def test_a_lax_store_that_keeps_a_flipped_bit_is_found_out(moto: Server, watch: Watch) -> None:
    """moto ignores Content-MD5; the ETag still tells."""
    store = moto.store()
    proxy = FaultProxy(moto.endpoint_url)
    try:
        faulty = moto.same(store, endpoint_url=proxy.endpoint_url)
        proxy.add(Fault("flip_up", at_byte=1))
        watch.transfer.put(put_grant(faulty), [b"abc"], md5_of(b"abc"))
    finally:
        proxy.close()
    assert store.get(KEY, max_bytes=3) == b"abc"
    assert [type(error) for error, _ in watch.retries] == [StoreCorrupt]


@pytest.mark.parametrize("reads_body", [True, False])
def test_a_refusal_is_not_repeated(
    reads_body: bool, fault_proxy: FaultProxy, faulty: S3Store, watch: Watch
) -> None:
    fault = Fault("status", status=403, code="AccessDenied", message="no", count=9)
    fault.reads_body = reads_body
    fault_proxy.add(fault)
    with pytest.raises(StoreDenied, match=r"PUT packs/one at 127\.0\.0\.1:\d+: refused"):
        watch.transfer.put(put_grant(faulty), [BODY], md5_of(BODY))
    with pytest.raises(StoreDenied, match=r"GET packs/one"):
        download(watch.transfer, get_grant(faulty), WHOLE)
    assert len(fault_proxy.requests) == 2
    assert watch.slept == []


def test_a_lasting_fault_ends_after_the_attempts(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    fault_proxy.add(Fault("status", count=99))
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        watch.transfer.put(put_grant(faulty), [BODY], md5_of(BODY))
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        download(watch.transfer, get_grant(faulty), WHOLE)
    assert len(fault_proxy.requests) == 2 * 4
    waits = [wait_s for _, wait_s in watch.retries[:3]]
    assert all(low <= wait <= 2 * low for low, wait in zip((0.25, 0.5, 1.0), waits, strict=True))
    assert store.head(KEY) is None


def test_the_wait_that_the_store_asks_for_is_kept_within_reason(
    fault_proxy: FaultProxy, faulty: S3Store, watch: Watch
) -> None:
    fault_proxy.add(Fault("status", headers=(("Retry-After", "7"),)))
    fault_proxy.add(Fault("status", headers=(("Retry-After", "86400"),)))
    watch.transfer.put(put_grant(faulty), [BODY], md5_of(BODY))
    assert [wait_s for _, wait_s in watch.retries] == [7, 60]
    assert sum(watch.slept) == pytest.approx(67)


def test_a_silent_store_times_out(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, impatient: Watch
) -> None:
    store.put(KEY, BODY)
    fault_proxy.add(Fault("timeout", count=2))
    grant = get_grant(faulty)
    assert download(impatient.transfer, grant, WHOLE) == [BODY]
    assert [type(error) for error, _ in impatient.retries] == [StoreUnavailable] * 2
    assert "no progress within 3 s" in str(impatient.retries[0][0])


def test_a_trickle_is_a_stall() -> None:
    """A server that sends a byte now and then never runs into a socket's timeout."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 206 x\r\nContent-Length: 99999\r\n")
                peer.sendall(b"Content-Range: bytes 0-99998/99999\r\n\r\n")
                while not over.wait(0.02):
                    try:
                        peer.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        grant = Grant(KEY, "GET", f"http://127.0.0.1:{listener.getsockname()[1]}/x", 0x7FFFFFFF)
        try:
            with (
                Transfer(timeout_s=2.0, attempts=1) as transfer,
                pytest.raises(StoreUnavailable, match="bytes moved in"),
            ):
                download(transfer, grant, [Range(0, 99999)])
        finally:
            over.set()
            thread.join()


def test_a_cancelled_wait_ends(fault_proxy: FaultProxy, faulty: S3Store) -> None:
    cancelled = threading.Event()
    watch = Watch(cancelled=cancelled.is_set, sleep=lambda _: cancelled.set())
    fault_proxy.add(Fault("status", count=9, headers=(("Retry-After", "60"),)))
    with watch.transfer, pytest.raises(RunCancelled):
        watch.transfer.put(put_grant(faulty), [BODY], md5_of(BODY))
    assert len(fault_proxy.requests) == 1


def test_a_cancelled_transfer_stops_between_slices(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    store.put(KEY, BODY)
    looks = iter(range(10**9))
    watch = Watch(cancelled=lambda: next(looks) >= 3)
    with watch.transfer, pytest.raises(RunCancelled, match="cancelled after"):
        download(watch.transfer, get_grant(faulty), WHOLE)


@contextlib.contextmanager
def _answering(answer: bytes, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that gives one answer, once, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):  # of a client that hangs up
                speaking = tls.wrap_socket(peer, server_side=True) if tls else peer
                with speaking:
                    speaking.recv(65536)
                    speaking.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/object"
        thread.join()


def test_near_ranges_share_a_request_and_far_ones_do_not(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    store.put(KEY, BODY)
    near = [Range(10, 5), Range(15, 5), Range(20 + GAP_BYTES, 5)]
    far = Range(26 + 2 * GAP_BYTES, 5)
    got = download(watch.transfer, get_grant(faulty), [*near, far])
    assert got == [BODY[wanted.offset : wanted.end] for wanted in [*near, far]]
    assert len(fault_proxy.requests) == 2


def test_a_store_that_ignores_ranges_is_read_through(watch: Watch) -> None:
    """A plain web server: 200 and everything, whatever was asked for."""
    with _answering(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789") as url:
        got = download(
            watch.transfer, Grant(KEY, "GET", url, 0x7FFFFFFF), [Range(2, 3), Range(6, 1)]
        )
    assert got == [b"234", b"6"]


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
    with _answering(b"HTTP/1.1 " + head + b"\r\nContent-Length: 3\r\n\r\nxyz") as url:
        grant = Grant(KEY, "GET", url, 0x7FFFFFFF)
        with Transfer(attempts=1) as transfer, pytest.raises(StoreCorrupt, match="bytes 2 to 5"):
            download(transfer, grant, [Range(2, 3)])


def test_a_closed_port_and_an_unknown_host_are_errors(watch: Watch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/b/k?X-Amz-Signature=s3cret"
    with pytest.raises(StoreUnavailable, match="no connection to 127") as caught:
        download(watch.transfer, Grant(KEY, "GET", url, 0), WHOLE)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(StoreUnavailable, match="cannot be resolved"):
        download(watch.transfer, Grant(KEY, "GET", "http://no.such.host.invalid/x", 0), WHOLE)


def test_https_to_a_plain_port_says_so(seaweed: Server, watch: Watch) -> None:
    url = seaweed.endpoint_url.replace("http:", "https:") + "/b/k"
    with pytest.raises(StoreError, match="no TLS with") as caught:
        download(watch.transfer, Grant(KEY, "GET", url, 0), WHOLE)
    assert not caught.value.retryable


def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    tls = _self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with _answering(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", tls) as url:
        grant = Grant(KEY, "GET", url.replace("http:", "https:"), 0)
        connections = Connections(timeout_s=5, tls=trusting)
        with Transfer(attempts=1, connections=connections) as transfer:
            assert download(transfer, grant, [Range(1, 2)]) == [b"bc"]
    with _answering(b"", tls) as url:
        grant = Grant(KEY, "GET", url.replace("http:", "https:"), 0)
        with Transfer() as transfer, pytest.raises(StoreError, match="is not trusted") as caught:
            download(transfer, grant, [Range(1, 2)])
    assert not caught.value.retryable


def _self_signed(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test store")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / "cert.pem").write_bytes(public)
    (folder / "both.pem").write_bytes(private + public)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    return context


def test_connections_are_kept_and_many_work_at_once(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store, watch: Watch
) -> None:
    keys = [object_key(f"packs/{n}") for n in range(12)]
    together = threading.Barrier(4)

    def move(n: int) -> bool:
        together.wait()
        body = BODY[n : n + MIB]
        watch.transfer.put(faulty.grant("PUT", keys[n], expires_s=300), [body], md5_of(body))
        got = download(
            watch.transfer, faulty.grant("GET", keys[n], expires_s=300), [Range(0, len(body))]
        )
        return got == [body]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(move, range(12)))
    assert watch.retries == []
    below = store.address.split("/", 3)[3]
    assert 2 <= fault_proxy.peak(f"/{below}/packs") <= 4
    assert fault_proxy.connections <= 8  # keep-alive: not one for each of 24 requests


def test_wrong_use_is_refused(watch: Watch, store: S3Store) -> None:
    get, put = (store.grant(verb, KEY, expires_s=60) for verb in ("GET", "PUT"))
    with pytest.raises(InvalidInput, match="is for GET, not for PUT"):
        watch.transfer.put(get, [b""], md5_of(b""))
    with pytest.raises(InvalidInput, match="is for PUT, not for GET"):
        download(watch.transfer, put, WHOLE)
    for ranges in ([Range(5, 5), Range(9, 1)], [Range(5, 5), Range(0, 1)], [Range(0, 0)]):
        with pytest.raises(InvalidInput, match="sorted, apart and not empty"):
            download(watch.transfer, get, ranges)
    for url in ("ftp://h/x", "http://", "h/x", "http://h:x/", "http://h/a b", "http://h/\n"):
        with pytest.raises(InvalidInput, match="http or https URL"):
            download(watch.transfer, Grant(KEY, "GET", url, 0), WHOLE)
