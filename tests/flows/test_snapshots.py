"""List, show, compare, find, restore a path, pin and delete: flows and plain functions alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

import flows
from flows import (
    frame,
    list_differences,
    list_entries,
    list_kept,
    list_versions,
    restore_path,
)
from tests.fixtures.errors import raises
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import plain, run_plainly
from torpor.control.store.manifests import snapshot_ids
from torpor.control.upkeep.reports import MOST_ROWS, Table
from torpor.shared.errors import InvalidInput, KeyUnknown, SnapshotKept, SnapshotMissing
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId


@pytest.fixture(scope="module")
def history(standing: Lab) -> Iterator[list[SnapshotId]]:
    """Three states of the workspace, oldest first."""
    (machine,) = standing.machines()
    home = standing.workspace(machine.id)
    for number in range(3):
        if number:
            (home / "notes" / "a.txt").write_text("first\n" * 2**number)
            (home / f"added-{number}.txt").touch()
        if number == 2:
            (home / "weights.bin").chmod(0o600)
            (home / "added-1.txt").unlink()
        run_plainly(standing.opened, flows.hibernate, destroy=False)
    yield snapshot_ids(standing.store, WORKSPACE)


def _run(lab: Lab, flow: str, *args: Any, **options: Any) -> Table:
    table = run_plainly(lab.opened, getattr(flows, flow), *args, **options)
    assert isinstance(table, Table)
    return table


def test_snapshots_are_listed_with_their_pins(standing: Lab, history: list[SnapshotId]) -> None:
    _run(standing, "pin", history[0], "before the move")
    table = _run(standing, "snapshots")
    assert [row["snapshot"] for row in table.rows()] == history[::-1]
    assert [row["pinned"] for row in table.rows()] == ["", "", "before the move"]
    assert {(row["verified"], row["machine"]) for row in table.rows()} == {
        ("yes", standing.machines()[0].id)
    }
    held = [(row["made by"], row["files"], row["bytes"]) for row in table.rows()]
    sizes = [("3", "100,024"), ("3", "100,012"), ("2", "100,006")]
    assert held == [("hibernate", *size) for size in sizes]
    new = [int(row["new bytes"].replace(",", "")) for row in table.rows()]
    assert new[0] < 100_000 <= new[2]
    assert [row["goes on from"] for row in table.rows()] == [history[1], history[0], ""]
    newest = history[2]
    assert [row["work also in"] for row in table.rows()] == ["no other", newest, newest]
    day = history[0]
    assert table.rows()[2]["made"].startswith(f"{day[:4]}-{day[4:6]}-{day[6:8]} ")
    _run(standing, "pin", history[0], remove=True)
    with plain(standing.opened):
        kept = frame(list_kept("demo"))
    assert list(kept.columns) == [
        "snapshot", "pinned", "verified", "machine", "made_by", "files", "bytes", "new_bytes",
        "parent", "work_in", "made",
    ]  # fmt: skip
    assert kept["made"].is_monotonic_decreasing


def test_the_files_of_a_snapshot_are_shown(standing: Lab, history: list[SnapshotId]) -> None:
    table = _run(standing, "snapshots", snapshot="newest")
    by_path = {row["path"]: row for row in table.rows()}
    assert by_path["~/workspace/notes/a.txt"]["bytes"] == "24"
    assert by_path["~/workspace/weights.bin"]["mode"] == "0600"
    assert table.heading == "newest: 5 names, 100,024 bytes"
    with plain(standing.opened):
        files = frame(list_entries("demo", history[0])).set_index("path")
    assert files.loc["~/workspace/notes/a.txt", "bytes"] == 6


def test_two_snapshots_are_compared(standing: Lab, history: list[SnapshotId]) -> None:
    table = _run(standing, "diff")
    found = {row["path"]: (row["difference"], row["what"]) for row in table.rows()}
    assert found == {
        "~/workspace": ("metadata", "time"),
        "~/workspace/added-1.txt": ("removed", ""),
        "~/workspace/added-2.txt": ("added", ""),
        "~/workspace/notes/a.txt": ("changed", "content"),
        "~/workspace/weights.bin": ("metadata", "mode"),
    }
    assert f"{history[1]} to {history[2]}: 1 added, 1 removed, 1 changed, 2 meta" in table.heading
    with plain(standing.opened):
        whole = list_differences("demo", history[0], history[2])
        assert len(frame(whole.changes)) == 4
        with raises(SnapshotMissing, "no snapshot before", "nothing to compare"):
            list_differences("demo", after=history[0])
    assert whole.new_bytes >= 24  # small files share a chunk, which is new as a whole
    assert whole.count("changed") == 1


def test_a_file_is_found_in_its_versions(standing: Lab, history: list[SnapshotId]) -> None:
    table = _run(standing, "snapshots", find="notes/*.txt")
    assert [(row["bytes"], row["first in"], row["snapshots"]) for row in table.rows()] == [
        (str(6 * 2**number), history[number], "1") for number in (0, 1, 2)
    ]
    (whole,) = _run(standing, "snapshots", find="weights.bin").rows()
    assert (whole["first in"], whole["last in"]) == (history[0], history[2])
    (one,) = _run(standing, "snapshots", history[1], find="notes/*.txt").rows()
    assert (one["bytes"], one["first in"], one["last in"]) == ("12", history[1], history[1])
    assert _run(standing, "snapshots", find="nothing*").rows() == [{"result": "nothing"}]


def test_a_snapshot_that_cannot_be_read_is_named_and_the_rest_is_searched(
    standing: Lab, history: list[SnapshotId]
) -> None:
    key = manifest_key(WORKSPACE, history[1])
    whole = standing.store.get(key, max_bytes=1 << 20)
    standing.store.put(key, whole[:-10] + bytes(10))
    try:
        with plain(standing.opened):
            found = list_versions("demo", "a.txt")
        assert [one.first for one in found.versions] == [history[0], history[2]]
        (unread,) = found.unread
        assert unread.startswith(f"{history[1]}: ")
        assert "1 snapshots could not be read" in _run(standing, "snapshots", find="a.txt").heading
        assert len(_run(standing, "snapshots").rows()) == 3
    finally:
        standing.store.put(key, whole)


def test_a_key_that_opens_nothing_makes_no_snapshot_unreadable(
    standing: Lab, history: list[SnapshotId]
) -> None:
    """The search ends, and does not ask for the key once for each snapshot."""

    def removed(store: object) -> NoReturn:
        raise KeyUnknown("it was removed")

    with (
        plain(replace(standing.opened, sealing=removed)),
        pytest.raises(KeyUnknown, match="it was removed"),
    ):
        list_versions("demo", "a.txt")


def test_a_path_comes_back_beside_what_is_there(
    standing: Lab, history: list[SnapshotId], home: Path
) -> None:
    report = run_plainly(
        standing.opened,
        restore_path,
        path="notes/a.txt",
        into="~/recovered",
        snapshot=history[0],
    )
    there = home.parent / "recovered" / "a.txt"
    assert there.read_text() == "first\n"
    assert report.restored_to == str(there)
    assert (report.files, report.bytes) == (1, 6)
    again = {"path": "~/workspace/notes", "into": "~/workspace", "snapshot": history[1]}
    with raises(InvalidInput, "workspace/notes already exists on the machine", "move_aside"):
        run_plainly(standing.opened, restore_path, **again)
    report = run_plainly(standing.opened, restore_path, **again, move_aside=True)
    assert (home / "notes" / "a.txt").read_text() == "first\n" * 2
    aside = home / f"notes.before-{history[1]}"
    assert report.moved_aside == str(aside)
    assert {"what": "moved aside", "value": f"what was there is {aside}"} in report.rows()
    assert (aside / "a.txt").read_text() == "first\n" * 4
    assert not [path for path in home.iterdir() if path.name.startswith(".torpor")]
    with plain(standing.opened), raises(InvalidInput, "has no 'notes/b.txt'", "search with `find`"):
        restore_path.fn("demo", "notes/b.txt", "~/recovered")


def test_snapshots_are_deleted_by_name_and_never_pinned_ones(
    standing: Lab, history: list[SnapshotId], events: deque[dict[str, Any]]
) -> None:
    first, second, newest = history
    for options, why in (({}, "needs a reason"), ({"reason": "no", "remove": True}, "without a")):
        with raises(InvalidInput, why):
            _run(standing, "pin", second, **options)
    _run(standing, "pin", second, "why")
    with raises(SnapshotKept, f"{second} .*is pinned", "`pin` with `remove`"):
        _run(standing, "delete_snapshots", [first, second])
    with raises(SnapshotKept, f"{newest} is the newest", "even_newest"):
        _run(standing, "delete_snapshots", [first, newest])
    with raises(InvalidInput, "no snapshot was named"):
        _run(standing, "delete_snapshots", [])
    with raises(InvalidInput, "not a snapshot id"):
        _run(standing, "delete_snapshots", ["newest"])
    assert snapshot_ids(standing.store, WORKSPACE) == history
    assert not events
    table = _run(standing, "delete_snapshots", [newest, first], even_newest=newest)
    assert [row["snapshot"] for row in table.rows()] == [first, newest]
    assert snapshot_ids(standing.store, WORKSPACE) == [second]
    assert [event["resource"]["prefect.resource.id"] for event in events] == [
        f"torpor.snapshot.demo.{first}",
        f"torpor.snapshot.demo.{newest}",
    ]
    assert {event["event"] for event in events} == {"torpor.snapshot.deleted"}


def test_a_long_table_says_how_much_is_left_out() -> None:
    shown = [{"path": str(number), "bytes": "1"} for number in range(MOST_ROWS)]
    rows = Table(WORKSPACE, "", 100_000, shown).rows()
    assert len(rows) == MOST_ROWS + 1
    assert rows[-1] == {
        "path": "and 99,800 more: flows.procedures.listing has them all in Python",
        "bytes": "",
    }
