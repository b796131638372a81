"""What a run shows while a machine makes the passes of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.phases import phases_told_to
from tasks.plain_runner import PlainRunner
from tasks.progress import followed_by
from tasks.snapshot import store
from tests.fixtures.engine import Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.passes import before_each_store
from tests.fixtures.trees import content, let_settle
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.shared.errors import DiskFull


class _Follower:
    """Notes what begins and ends, and the bytes of what moves."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.open: set[str] = set()

    def begins(self, thing: str, words: str) -> None:
        self.open.add(thing)
        self.lines.append(words)

    def ends(self, thing: str) -> None:
        self.open.discard(thing)

    def moves(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.open.add(what)
        if not done_bytes:
            self.lines.append(f"{what}: {total_bytes}")
        elif done_bytes == total_bytes:
            self.open.discard(what)

    def prints(self, text: str) -> None:
        raise AssertionError("no command runs")


SIZE = 9000


@pytest.fixture
def run(memory_store: MemoryStore, tmp_path: Path) -> Iterator[RemoteSnapshot]:
    was = tmp_path / "was"
    was.mkdir()
    (was / "file").write_bytes(content(1, SIZE))
    let_settle()
    engine = Engine(memory_store, tmp_path / "home")
    yield engine.begin([was])
    engine.runs.close()


def test_each_pass_is_shown_first_as_a_look_and_then_by_its_bytes(run: RemoteSnapshot) -> None:
    follower, phases = _Follower(), list[str]()
    with PlainRunner(), followed_by(follower), phases_told_to(phases.append):
        seen = store(run, 3, 4, [])
    assert (seen.passes, seen.new_bytes) == (2, SIZE)
    assert follower.lines == [
        "looking for what is new, pass 3",
        f"storing demo, pass 3: {SIZE}",
        "looking for what is new, pass 4",
    ]
    assert follower.open == set()
    assert phases == ["scan", "store", "scan"]


def test_a_pass_that_fails_is_shown_no_more(
    run: RemoteSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise DiskFull("no space left")

    follower = _Follower()
    before_each_store(monkeypatch, fail)
    with PlainRunner(retries=0), followed_by(follower), pytest.raises(DiskFull):
        store(run, 1, 4, [])
    assert follower.lines == ["looking for what is new, pass 1"]
    assert follower.open == set()
