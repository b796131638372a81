"""A store that drips its answer for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.fixtures.dripping import Dripping
from torpor.control.store.pace import within
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import StoreUnavailable
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import ObjectKey

pytestmark = pytest.mark.rule("H8")

KEY = ObjectKey("jobs/open/1")


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
    assert dripping.is_named(ask)


def test_a_host_that_starts_no_further_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StoreUnavailable, match="this host starts no further thread"):
        within("get jobs/open/1", 1.0, lambda: b"")
