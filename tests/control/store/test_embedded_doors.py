"""The embedded store's ports, asked by another account of this host, which has no key."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.contracts.store_contract import KEY
from tests.fixtures.stranger import answers, doors_of, questions
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store

PATHS = (
    "/",
    "/bucket",
    f"/bucket/{KEY}",
    f"/buckets/bucket/{KEY}",  # where the filer has it
    "/dir/assign",  # the master's
    "/dir/status",
    "/1,0123",  # a volume's
    "/metrics",
)


@pytest.mark.rule(21)
@pytest.mark.usefixtures("needs_server")
def test_no_port_of_it_answers_without_a_key(tmp_path: Path) -> None:
    with EmbeddedStore.start(tmp_path, "AKONE", "secret-one", "bucket") as running:
        store = S3Store.connect(running.settings("bucket"))
        store.put(KEY, b"kept")
        doors = doors_of([psutil.Process(running.process.pid)])
        assert {door.host for door in doors if door.port} == {"127.0.0.1"}
        assert len(doors) >= 10
        assert answers(doors, questions(*PATHS)) == []
        assert store.get(KEY, max_bytes=4) == b"kept"
