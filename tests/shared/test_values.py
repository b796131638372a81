"""Values are checked where they are made."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.errors import InvalidInput
from torpor.shared.values import (
    Grant,
    Label,
    ObjectKey,
    SnapshotId,
    WorkspaceName,
    new_snapshot_id,
    object_key,
    snapshot_id,
    workspace_name,
)

NOW = datetime(2026, 11, 20, 23, 49, 13, tzinfo=timezone.utc)


@pytest.mark.parametrize("name", ["a", "0", "demo", "my-work-2", "a" * 63, "a--b"])
def test_workspace_names(name: str) -> None:
    assert workspace_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "-a", "a-", "A", "a_b", "a.b", "a/b", "..", "a b", "a\n", "a" * 64, "\u00e9", "a\0"],
)
def test_what_is_no_workspace_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a workspace name: use 1 to 63 lower-case"):
        workspace_name(name)


@pytest.mark.parametrize(
    "text",
    ["", "latest", "20261120T234913Z", "20261120T234913Z-1F0C9AB2", "20261120T234913Z-1f0c9ab2\n"],
)
def test_what_is_no_snapshot_id(text: str) -> None:
    with pytest.raises(InvalidInput, match="such as 20261120T234913Z-1f0c9ab2"):
        snapshot_id(text)


@pytest.mark.parametrize("time", ["20260230T000000Z", "99999999T999999Z", "00000101T000000Z"])
def test_an_id_of_a_time_that_does_not_exist_is_no_snapshot_id(time: str) -> None:
    """Before, an object of such a name in the bucket ended each run that asked for its time."""
    with pytest.raises(InvalidInput, match=f"{time} is no date and time"):
        snapshot_id(f"{time}-1f0c9ab2")


@pytest.mark.parametrize("key", ["a", "a/b", "workspaces/demo/packs/ab/cd", "a.b_c-d", "x" * 900])
def test_object_keys(key: str) -> None:
    assert object_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "", "/a", "a/", "a//b", "../a", "a/../b", "a/.", ".a", "a b", "a?b", "a%2fb", "a\\b",
        "x" * 901,
    ],
)  # fmt: skip
def test_what_is_no_object_key(key: str) -> None:
    with pytest.raises(InvalidInput, match="is not an object name that torpor writes or reads"):
        object_key(key)


def test_snapshot_ids_tell_the_time() -> None:
    made = new_snapshot_id(NOW)
    assert snapshot_id(made) == made
    assert made.startswith("20261120T234913Z-")
    there = NOW.astimezone(timezone(timedelta(hours=9)))
    assert new_snapshot_id(there).startswith("20261120T234913Z-")
    assert new_snapshot_id(NOW) != made


@settings(max_examples=100)
@given(minutes=st.integers(-10_000, 10_000), more=st.integers(1, 4))
def test_a_snapshot_id_sorts_after_the_one_before_whatever_the_clock(
    minutes: int, more: int
) -> None:
    ids: list[SnapshotId] = [new_snapshot_id(NOW)]
    for _ in range(more):
        ids.append(snapshot_id(new_snapshot_id(NOW + timedelta(minutes=minutes), ids[-1])))
    assert ids == sorted(set(ids))


def test_ids_cross_the_end_of_a_year() -> None:
    last = SnapshotId("20261231T235959Z-ffffffff")
    assert new_snapshot_id(NOW, last).startswith("20270101T000000Z-")


def test_a_grant_does_not_show_its_url() -> None:
    grant = Grant(ObjectKey("a/b"), "PUT", "https://host/a/b?X-Amz-Signature=secret", 1)
    assert repr(grant) == "Grant(PUT a/b)"
    assert "secret" not in f"{grant!s} {[grant]} {{'g': {grant!r}}}"


def test_a_label_is_written_as_it_always_was() -> None:
    label = Label("owner", WorkspaceName("demo"), "1")
    assert msgspec.to_builtins(label) == {"owner": "owner", "workspace": "demo", "lease": "1"}


_USED_FIRST = """
import sys, threading, msgspec
from torpor.shared.wire.request import Count, Names, OfRun, parse_answer, parse_request
sys.setswitchinterval(1e-6)
for _ in range(50):
    class Told(msgspec.Struct, frozen=True):
        names: Names
        count: Count
        more: dict[str, list[int]] = {}
    class Asked(OfRun[Told], frozen=True):
        op = "ask"
        parts: list[Told]
    def parse():
        together.wait()
        told = {"names": ["a"], "count": 1}
        parse_request(Asked, {"run": "r", "parts": [told]})
        parse_answer(Asked, told)
    together = threading.Barrier(8)
    threads = [threading.Thread(target=parse) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_many_threads_may_use_a_type_first() -> None:
    """msgspec alone ends the process by SIGSEGV here."""
    done = subprocess.run([sys.executable, "-c", _USED_FIRST], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
