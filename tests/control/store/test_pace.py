"""A store that drips its answer for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.fixtures.loopback import Handler, Loopback
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.shared.errors import StoreUnavailable
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import ObjectKey

KEY = ObjectKey("jobs/open/1")


class _Drips(Handler):
    """A byte comes well within the timeout of a socket, and another one, without an end."""

    server: Dripping

    def do_GET(self) -> None:
        if self.server.in_headers:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 30))
            self.end_headers()
        while not self.server.closing.wait(0.05):
            self.wfile.write(b" ")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_POST(self) -> None:
        self.do_PUT()


class Dripping(Loopback):
    def __init__(self) -> None:
        self.closing, self.in_headers = threading.Event(), False
        super().__init__(_Drips)

    def close(self) -> None:
        self.closing.set()
        super().close()


@pytest.fixture
def dripping() -> Iterator[Dripping]:
    server = Dripping()
    yield server
    server.close()


@pytest.mark.parametrize("in_headers", [False, True], ids=["its body", "its headers"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.get(KEY, max_bytes=1 << 30),
        lambda store: store.get_range(KEY, Range(0, 1000)),
        lambda store: [*store.list("jobs/")],
        lambda store: store.put(KEY, b"body"),
        lambda store: store.delete([KEY, ObjectKey("jobs/open/2")]),
    ],
    ids=["get", "range", "list", "put", "delete"],
)
def test_an_answer_that_drips_ends_with_its_time(
    dripping: Dripping, ask: Callable[[S3Store], object], in_headers: bool
) -> None:
    dripping.in_headers = in_headers
    settings = S3Settings(
        *("bucket", "key", "secret", dripping.url),
        attempts=1,
        connect_timeout_s=0.2,
        read_timeout_s=0.3,
    )
    with pytest.raises(StoreUnavailable, match="the store drips its answer"):
        ask(S3Store.connect(settings))
