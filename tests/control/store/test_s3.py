"""S3Store against what goes wrong between it and the store, and what users get wrong."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore import auth, compat
from botocore.exceptions import ClientError

from tests.contracts.store_contract import KEY
from tests.fixtures.fault_proxy import Fault, FaultProxy
from tests.fixtures.loopback import Handler, Loopback
from tests.fixtures.stores import Server
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.store.s3 import S3Settings, S3Store, client_config
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    StoreArchived,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnavailable,
    StoreUnreachable,
)
from torpor.shared.transfer import retries
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import object_key


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def store(seaweed: Server) -> S3Store:
    """Speaks to SeaweedFS itself."""
    return seaweed.store("pre")


@pytest.fixture
def faulty(seaweed: Server, store: S3Store, fault_proxy: FaultProxy) -> Iterator[S3Store]:
    """The same bucket and prefix by way of the proxy. Requests are tried twice."""
    found = seaweed.same(
        store, endpoint_url=fault_proxy.endpoint_url, attempts=2, read_timeout_s=PATIENCE_S
    )
    found.probe()
    fault_proxy.clear()
    yield found


@pytest.fixture
def impatient(seaweed: Server, store: S3Store, faulty: S3Store, fault_proxy: FaultProxy) -> S3Store:
    """The same, which waits for a second and asks again until a busy host has answered in time."""
    return seaweed.same(
        store, endpoint_url=fault_proxy.endpoint_url, attempts=1000, read_timeout_s=1
    )


def test_secrets_are_in_no_repr(seaweed: Server) -> None:
    settings = seaweed.settings("b-1", session_token="t0ken")
    store = S3Store.connect(settings)
    shown = f"{settings!r} {settings} {store!r} {store} {store.address}"
    assert seaweed.secret_key not in shown
    assert "t0ken" not in shown


def test_a_client_of_ones_own_can_be_used(seaweed: Server) -> None:
    client = seaweed.client(config=client_config())
    store = S3Store(client, seaweed.bucket())
    sent: list[str] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.extend(request.headers))
    store.put(KEY, b"x")
    assert "Host" in sent or "X-Amz-Date" in sent
    assert "Expect" not in sent
    assert store.get(KEY, max_bytes=1) == b"x"
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in store.grant("GET", KEY, expires_s=9).url


def test_aws_is_addressed_by_bucket_and_region() -> None:
    settings = S3Settings("my-bucket", "AKIA", "secret", region="eu-central-1")
    url = S3Store.connect(settings).grant("GET", KEY, expires_s=9).url
    assert url.startswith("https://my-bucket.s3.eu-central-1.amazonaws.com/packs/one?")


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint_url": "127.0.0.1:8333"},
        {"endpoint_url": "ftp://127.0.0.1"},
        {"endpoint_url": "http://"},
        {"bucket": "no/slashes"},
        {"bucket": ""},
        {"prefix": "a/../b"},
        {"access_key": ""},
        {"secret_key": ""},
        {"region": "not a region"},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(seaweed: Server, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        S3Store.connect(seaweed.settings(**{"bucket": "bucket", **wrong}))


def test_a_wrong_host_port_or_scheme_says_what_to_check(seaweed: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    cases: list[tuple[str, type[StoreError], str]] = [
        (nobody, StoreUnreachable, "check the endpoint's host and port"),
        ("http://no.such.host.invalid", StoreUnreachable, "check the endpoint's host and port"),
        (seaweed.endpoint_url.replace("http:", "https:"), StoreError, "http or https"),
    ]
    for endpoint_url, kind, says in cases:
        store = S3Store.connect(seaweed.settings("b-1", endpoint_url=endpoint_url, attempts=1))
        with pytest.raises(kind, match=says) as caught:
            store.probe()
        assert endpoint_url.partition("//")[2] in str(caught.value)


def test_a_web_server_that_is_no_store() -> None:
    class Page(BaseHTTPRequestHandler):
        """Answers everything with a page."""

        def _page(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html><p>It works!</html>")

        do_GET = do_PUT = do_DELETE = _page  # noqa: N815 (the names http.server calls)
        log_message = lambda *_: None  # noqa: E731

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        settings = S3Settings("b-1", "A", "s", endpoint_url=url, attempts=1)
        with pytest.raises(StoreError, match="endpoint"):
            S3Store.connect(settings).probe()
        server.shutdown()
        thread.join()


def test_a_clock_that_is_off_is_named(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compat.get_current_datetime
    monkeypatch.setattr(auth, "get_current_datetime", lambda: real() - datetime.timedelta(hours=1))
    with pytest.raises(StoreDenied, match="clock of the control side"):
        store.put(KEY, b"x")


def test_a_policy_that_forbids_is_named_and_tried_once(
    fault_proxy: FaultProxy, faulty: S3Store
) -> None:
    for call in (
        lambda: faulty.put(KEY, b"x"),
        lambda: faulty.get(KEY, max_bytes=1),
        lambda: faulty.head(KEY),
        lambda: list(faulty.list("")),
        lambda: faulty.delete([KEY]),
        faulty.probe,
    ):
        fault_proxy.clear()
        fault_proxy.add(Fault("status", status=403, code="AccessDenied", message="no", count=9))
        with pytest.raises(StoreDenied, match="their policy allows"):
            call()
        assert len(fault_proxy.requests) == 1


def test_a_bucket_elsewhere_is_named(fault_proxy: FaultProxy, faulty: S3Store) -> None:
    fault_proxy.add(Fault("status", status=400, code="AuthorizationHeaderMalformed", count=9))
    with pytest.raises(StoreError, match="another region"):
        faulty.put(KEY, b"x")
    assert [method for method, _ in fault_proxy.requests] in (["PUT"], ["PUT", "HEAD"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=500, code="InternalError"),
        Fault("status", status=503),
        Fault("reset"),
        Fault("cut", at_byte=40_000),
        Fault("flip_down", at_byte=77),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_get_survives_what_passes(
    fault: Fault, fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    body = bytes(range(256)) * 400
    store.put(KEY, body)
    fault_proxy.add(Fault(**vars(fault)))
    assert faulty.get(KEY, max_bytes=len(body)) == body
    assert len(fault_proxy.requests) == 2
    if fault.kind != "flip_down":  # a range's hash is its reader's to check
        fault_proxy.add(Fault(**vars(fault)))
        assert faulty.get_range(KEY, Range(7, 99_999)) == body[7 : 7 + 99_999]
        assert len(fault_proxy.requests) == 4


@pytest.mark.rule(18)
@pytest.mark.parametrize("kind", ["status", "reset", "after", "flip_up"])
@pytest.mark.parametrize("condition", ["", "if_absent", "if_version"])
def test_a_put_survives_what_passes(
    kind: Any, condition: str, fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    """``after`` and ``reset`` lose the answer to a write that was done: it is still ours."""
    how: dict[str, Any] = {"if_absent": True} if condition == "if_absent" else {}
    if condition == "if_version":
        store.put(KEY, b"first")
        how = {"if_version": store.read(KEY, max_bytes=9)[1]}
    fault_proxy.add(Fault(kind))
    assert faulty.put(KEY, b"mine", **how).bytes == 4
    assert store.get(KEY, max_bytes=4) == b"mine"
    looked_again = condition and kind in ("after", "reset")
    assert len(fault_proxy.requests) == (3 if looked_again else 2)


def test_a_request_without_an_answer_is_asked_again(
    fault_proxy: FaultProxy, store: S3Store, impatient: S3Store
) -> None:
    for how in ({}, {"if_absent": True}, {"if_version": ""}):
        if "if_version" in how:
            how = {"if_version": store.read(KEY, max_bytes=4)[1]}
        elif how:
            store.delete([KEY])
        fault_proxy.clear()
        fault_proxy.add(Fault("timeout"))
        assert impatient.put(KEY, b"mine", **how).bytes == 4
        assert len(fault_proxy.requests) >= 2
    fault_proxy.add(Fault("timeout"))
    assert impatient.get(KEY, max_bytes=4) == b"mine"


def test_a_lost_answer_does_not_make_anothers_object_ours(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    store.put(KEY, b"theirs")
    fault_proxy.add(Fault("reset"))
    with pytest.raises(ObjectExists, match="packs/one"):
        faulty.put(KEY, b"mine", if_absent=True)
    assert store.get(KEY, max_bytes=9) == b"theirs"


@pytest.mark.rule(18)
def test_a_replacement_that_arrives_late_is_refused(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    store.put(KEY, b"first")
    _, version = store.read(KEY, max_bytes=9)
    theirs_is_there = threading.Event()
    fault_proxy.add(Fault("delay", delay_s=PATIENCE_S, ends=theirs_is_there))
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(faulty.put, KEY, b"mine", if_version=version)
        until(lambda: bool(fault_proxy.requests), "it is on its way")
        store.put(KEY, b"theirs", if_version=version)
        theirs_is_there.set()
        with pytest.raises(ObjectChanged, match="read it again"):
            late.result()
    assert store.get(KEY, max_bytes=9) == b"theirs"


@pytest.mark.rule(18)
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_the_store_s_clock_is_known_from_two_answers(
    ahead_s: float, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)  # botocore signs by another one

    def heard() -> bool:
        with pytest.raises(StoreMissing):  # an error says something of the time, too
            store.get(KEY, max_bytes=1)
        return store.clock_ahead_s() != 0.0

    until(heard, "two quick answers agree")
    assert abs(store.clock_ahead_s() + ahead_s) <= 3


def test_a_conflict_of_writers_is_tried_again(
    fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    fault_proxy.add(Fault("status", status=409, code="ConditionalRequestConflict"))
    faulty.put(KEY, b"mine", if_absent=True)
    assert store.get(KEY, max_bytes=9) == b"mine"


def test_the_wait_that_the_store_asks_for_is_known(
    seaweed: Server, store: S3Store, fault_proxy: FaultProxy
) -> None:
    """``Retries`` waits so long, within reason (tests/shared/transfer/test_transfer.py)."""
    faulty = seaweed.same(store, endpoint_url=fault_proxy.endpoint_url, attempts=1)
    for call in (lambda: faulty.put(KEY, b"x"), lambda: faulty.head(KEY)):
        fault_proxy.add(Fault("status", headers=(("Retry-After", "7"),)))
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("kind", ["status", "reset"])
def test_a_lasting_fault_ends_after_five_requests(
    kind: Any, seaweed: Server, store: S3Store, fault_proxy: FaultProxy
) -> None:
    faulty = seaweed.same(store, endpoint_url=fault_proxy.endpoint_url)
    store.put(KEY, b"x")
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: faulty.put(KEY, b"x"),
        "get": lambda: faulty.get(KEY, max_bytes=1),
        "get_range": lambda: faulty.get_range(KEY, Range(0, 1)),
        "head": lambda: faulty.head(KEY),
        "list": lambda: list(faulty.list("")),
        "delete": lambda: faulty.delete([KEY]),
        "delete many": lambda: faulty.delete([KEY, object_key("k/2")]),
        "make_bucket": faulty.make_bucket,
        "probe": faulty.probe,
    }
    sent = {}
    for name, call in calls.items():
        fault_proxy.clear()
        fault_proxy.add(Fault(kind, count=99))
        with pytest.raises(StoreUnavailable, match="given up after 5 attempts"):
            call()
        sent[name] = len(fault_proxy.requests)
    assert sent == dict.fromkeys(calls, 5)


def test_the_longest_put_is_bounded(
    seaweed: Server, store: S3Store, fault_proxy: FaultProxy
) -> None:
    """Four attempts that fail, one whose name is taken, and a look at what has taken it."""
    faulty = seaweed.same(store, endpoint_url=fault_proxy.endpoint_url)
    faulty.probe()
    fault_proxy.clear()
    fault_proxy.add(Fault("after"))
    fault_proxy.add(Fault("status", count=3))
    fault_proxy.add(Fault("status", lambda method, _: method == "GET", count=99))
    with pytest.raises(StoreUnavailable):
        faulty.put(KEY, b"mine", if_absent=True)
    assert Counter(method for method, _ in fault_proxy.requests) == {"PUT": 5, "GET": 5}
    assert store.get(KEY, max_bytes=9) == b"mine"


def test_a_probe_is_at_most_26_requests(
    seaweed: Server, store: S3Store, fault_proxy: FaultProxy
) -> None:
    fault_proxy.add(Fault("status", lambda method, _: method == "POST", count=1, status=403))
    # not ``faulty``: on a busy machine an answer takes more than its second, and is asked for again
    seaweed.same(store, endpoint_url=fault_proxy.endpoint_url).probe()
    assert len(fault_proxy.requests) == 26


def test_what_the_store_does_not_know_is_asked_once(
    fault_proxy: FaultProxy, faulty: S3Store
) -> None:
    fault_proxy.add(Fault("status", status=501, code="NotImplemented", count=9))
    with pytest.raises(StoreError, match="does not know this request") as caught:
        faulty.get(KEY, max_bytes=1)
    assert not caught.value.retryable
    assert len(fault_proxy.requests) == 1


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (403, "AccessDenied")])
def test_deletes_go_one_by_one_where_batches_are_refused(
    status: int, code: str, fault_proxy: FaultProxy, store: S3Store, faulty: S3Store
) -> None:
    keys = [object_key(f"k/{n}") for n in range(3)]
    for key in keys:
        store.put(key, b"x")
    fault_proxy.add(
        Fault("status", lambda method, _: method == "POST", count=9, status=status, code=code)
    )
    faulty.delete([*keys, object_key("k/gone")])
    assert list(store.list("")) == []


def test_foreign_names_below_the_prefix_are_left_out(seaweed: Server, store: S3Store) -> None:
    _, _, _, bucket, prefix = store.address.split("/", 4)
    seaweed.client().put_object(Bucket=bucket, Key=f"{prefix}/with space", Body=b"")
    store.put(KEY, b"x")
    assert [found.key for found in store.list("")] == [KEY]


@pytest.mark.rule(3)
def test_a_store_that_says_no_bucket_is_not_taken_for_empty(seaweed: Server) -> None:
    store = S3Store.connect(seaweed.settings("never-made"))
    with pytest.raises(StoreMissing, match="no bucket never-made"):
        store.head(KEY)


def test_an_archived_object_is_known_in_listings_and_refused_by_name(moto: Server) -> None:
    store, client = moto.store(), moto.client()
    bucket, prefix = store.address.split("/", 4)[3:]
    client.put_object(Bucket=bucket, Key=f"{prefix}/{KEY}", Body=b"x", StorageClass="GLACIER")
    assert [found.archive for found in store.list("")] == ["GLACIER"]
    head = store.head(KEY)
    assert head is not None
    assert head.archive == "GLACIER"
    with pytest.raises(StoreArchived, match=r"restore-object .*InvalidObjectState"):
        store.get(KEY, max_bytes=9)


@pytest.mark.parametrize(
    ("said", "archive"),
    [
        ("ColdArchive", "ColdArchive"),
        ("DEEP_COLD_ARCHIVE", "DEEP_COLD_ARCHIVE"),
        ("GLACIER_IR", ""),
        ("INTELLIGENT_TIERING", ""),
        ("INTELLIGENT_TIERING, ARCHIVE_ACCESS", "INTELLIGENT_TIERING"),
    ],
)
def test_a_head_says_whether_an_object_can_be_read(said: str, archive: str) -> None:
    headers = ("x_amz_storage_class", "x_amz_archive_status")
    told = dict(zip(headers, said.split(", "), strict=False))
    dated = "Sat, 28 Nov 2026 10:00:00 GMT"

    class Archive(Handler):
        def do_HEAD(self) -> None:
            self.reply(200, Last_Modified=dated, ETag=f'"{"0" * 32}"', **told)

    server = Loopback(Archive)
    head = S3Store.connect(S3Settings("b-1", "A", "s", endpoint_url=server.url)).head(KEY)
    server.close()
    assert head is not None
    assert head.archive == archive


def test_a_write_that_meets_its_own_first_copy_is_done(
    seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy sends it twice, and hands on the second answer: 412. Other content is refused."""
    client = seaweed.client(config=client_config())
    store = S3Store(client, seaweed.bucket())
    store.probe()
    put = client.put_object

    def twice(**request: Any) -> Any:
        with suppress(ClientError):
            put(**request)
        return put(**request)

    monkeypatch.setattr(client, "put_object", twice)
    store.put(KEY, b"mine", if_absent=True)
    with pytest.raises(ObjectExists):
        store.put(KEY, b"other", if_absent=True)
    assert store.get(KEY, max_bytes=9) == b"mine"


def test_an_answer_that_lacks_what_proves_it_whole_says_what() -> None:
    class Bare(Handler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nhalf of it")
            self.close_connection = True

    server = Loopback(Bare)
    store = S3Store.connect(S3Settings("b-1", "A", "s", endpoint_url=server.url))
    with pytest.raises(StoreError, match="no Content-Length: a proxy"):
        store.get(KEY, max_bytes=99)
    server.close()


def test_a_store_may_have_buckets_as_hosts_only() -> None:
    settings = S3Settings("b-1", "A", "s", endpoint_url="https://oss.example", virtual_host=True)
    url = S3Store.connect(settings).grant("GET", KEY, expires_s=60).url
    assert url.startswith(f"https://b-1.oss.example/{KEY}?")
