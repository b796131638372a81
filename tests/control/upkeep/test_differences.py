"""Differences between manifests, versions of a file, and both as tables."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.manifests import entry, honest
from torpor.control.upkeep.differences import compare, entry_at, find, listed
from torpor.control.upkeep.frames import frame
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    SYMLINK,
    Chunk,
    Entry,
    Extent,
    Manifest,
)
from torpor.shared.values import SnapshotId

LATER = SnapshotId("20261121T000000Z-00000001")
TWO_ROOTS = [*honest().entries, entry(DIRECTORY, b"", root=1), entry(FILE, b"empty", root=1)]


def _without(path: bytes) -> list[Entry]:
    return [kept for kept in honest().entries if kept.path != path]


def _with(path: bytes, **changes: Any) -> list[Entry]:
    return [
        msgspec.structs.replace(kept, **changes) if kept.path == path else kept
        for kept in honest().entries
    ]


def _later(**changes: Any) -> Manifest:
    return honest(snapshot=LATER, **changes)


def _changes(after: Manifest) -> list[tuple[str, str, str]]:
    found = compare(honest(), after).changes
    return [(change.path, change.difference, change.what) for change in found]


def test_equal_snapshots_have_no_differences() -> None:
    found = compare(honest(), _later())
    assert (found.changes, found.new_bytes, found.new_stored_bytes) == ([], 0, 0)
    assert (found.before, found.after) == (honest().snapshot, LATER)
    assert found.bytes_before == found.bytes_after == 280


def test_added_and_removed_names_are_listed_with_their_bytes() -> None:
    found = compare(honest(), _later(entries=_without(b"holed")))
    (gone,) = found.changes
    assert (gone.path, gone.difference, gone.kind) == ("~/workspace/holed", "removed", "file")
    assert (gone.bytes_before, gone.bytes_after) == (130, 0)
    back = compare(_later(entries=_without(b"holed")), honest())
    assert [(new.difference, new.bytes_after) for new in back.changes] == [("added", 130)]
    assert (found.count("removed"), found.count("added")) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mode": 0o755}, "mode"),
        ({"uid": 7}, "owner"),
        ({"mtime_ns": 5, "gid": 3}, "owner, time"),
        ({"xattrs": ((b"user.x", b"z"),)}, "extended attributes"),
    ],
)
def test_a_change_of_metadata_alone_is_listed_as_such(changes: dict[str, Any], what: str) -> None:
    after = _later(entries=_with(b"empty", **changes))
    assert _changes(after) == [("~/workspace/empty", "metadata", what)]


def test_content_is_what_chunks_say_not_where_they_lie() -> None:
    moved = [Chunk(b"b" * 32, 200, 2, 0, 0, 150), Chunk(b"a" * 32, 100, 1, 0, 150, 90)]
    swapped = honest().entries
    for number, kept in enumerate(swapped):
        extents = [Extent(e.chunk if e.chunk < 0 else 1 - e.chunk, e.offset, e.length)
                   for e in kept.extents]  # fmt: skip
        swapped[number] = msgspec.structs.replace(kept, extents=tuple(extents))
    assert _changes(_later(chunks=moved, entries=swapped)) == []


def test_a_small_file_is_the_same_alone_or_in_a_shared_chunk() -> None:
    """Its digest is the beginning of the name that a chunk of its own would have."""
    alone = _with(b"part", digest=b"", extents=(Extent(2, 0, 50),))
    name = b"d" * 16 + b"rest of the name"
    chunks = [*honest().chunks, Chunk(name, 50, 0, 0, 0, 50)]
    assert _changes(_later(entries=alone, chunks=chunks)) == []
    other = [*honest().chunks, Chunk(b"e" * 32, 50, 0, 0, 0, 50)]
    after = _later(entries=alone, chunks=other)
    assert _changes(after) == [("~/workspace/part", "changed", "content")]
    found = compare(honest(), after)
    assert (found.new_bytes, found.new_stored_bytes) == (50, 50)


def test_a_hard_link_counts_as_its_file() -> None:
    """Which name of a file comes first in a walk may change; the file has not."""
    (file,) = [kept for kept in honest().entries if kept.path == b"d/whole"]
    entries = [
        *(kept for kept in _without(b"same") if kept != file),
        msgspec.structs.replace(file, path=b"same"),
        entry(HARDLINK, b"d/whole", target=b"same"),
    ]
    assert _changes(_later(entries=entries)) == []


def test_a_change_of_kind_is_a_change() -> None:
    entries = [*_without(b"empty"), entry(DIRECTORY, b"empty")]
    assert _changes(_later(entries=entries)) == [
        ("~/workspace/empty", "changed", "file to directory")
    ]
    after = _later(entries=_with(b"link", target=b"elsewhere"))
    assert _changes(after) == [("~/workspace/link", "changed", "content")]


def test_equal_paths_below_two_directories_are_two_names() -> None:
    after = _later(roots=["~/workspace", "/data/"], entries=TWO_ROOTS)
    assert _changes(after) == [("/data", "added", ""), ("/data/empty", "added", "")]


def _history() -> list[Manifest]:
    ids = [SnapshotId(f"2026112{day}T000000Z-00000001") for day in range(5)]
    changed = _with(b"part", digest=b"e" * 16)
    states = [honest().entries, honest().entries, changed, _without(b"part"), changed]
    both = zip(ids, states, strict=True)
    return [honest(snapshot=snapshot, entries=entries) for snapshot, entries in both]


def test_a_file_is_found_with_its_versions() -> None:
    days = [manifest.snapshot for manifest in _history()]
    found = find(iter(_history()), "part")
    assert [(version.first, version.last, version.snapshots) for version in found] == [
        (days[0], days[1], 2),
        (days[2], days[2], 1),
        (days[4], days[4], 1),  # gone in between
    ]
    assert {(version.path, version.bytes) for version in found} == {("~/workspace/part", 50)}


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*ol*", ["d/whole", "holed"]),
        ("d/*", ["d/whole"]),
        ("~/workspace/d", ["d"]),
        ("workspace/d/", ["d"]),
        ("~/workspace/*e", ["d/whole", "same"]),
        ("/whole", []),
        ("nothing", []),
    ],
)
def test_globs_fit_names_and_paths(pattern: str, paths: list[str]) -> None:
    found = find([honest()], pattern)
    assert [version.path for version in found] == [f"~/workspace/{path}" for path in paths]


def test_a_hard_link_is_found_with_the_bytes_of_its_file_and_nothing_by_no_pattern() -> None:
    (found,) = find([honest()], "same")
    assert (found.kind, found.bytes) == ("hard link", 100)
    with pytest.raises(InvalidInput, match=r"write a name like \*\.safetensors"):
        find([honest()], " ")


def test_a_path_is_found_as_it_is_shown_or_below_the_workspace() -> None:
    for path in ("~/workspace/d/whole", "d/whole", " d/whole/ "):
        assert entry_at(honest(), path) == (0, b"d/whole")
    assert entry_at(honest(), "~/workspace") == (0, b"")
    for path in ("whole", "", "/", "~/workspace/nowhere"):
        with pytest.raises(InvalidInput, match=r"has no .* search with `find`"):
            entry_at(honest(), path)
    two = honest(roots=["~/workspace", "/data"], entries=TWO_ROOTS)
    assert entry_at(two, "/data/empty") == (1, b"empty")
    assert entry_at(two, "d/whole") == (0, b"d/whole")
    with pytest.raises(InvalidInput, match=r"in several directories .* ~/workspace, /data"):
        entry_at(two, "empty")


def test_a_manifest_opens_as_a_table() -> None:
    odd = entry(SYMLINK, b"\xff not utf-8", target=b"\xfe", mtime_ns=1_800_000_000_123_456_789)
    assert frame([]).empty
    table = frame(list(listed(honest(entries=[*honest().entries, odd]))))
    assert len(table) == 9
    assert table["bytes"].sum() == 280
    assert list(table.columns)[:3] == ["path", "kind", "bytes"]
    by_path = table.set_index("path")
    assert by_path.loc["~/workspace/d/whole", "mode"] == "0644"
    assert by_path.loc["~/workspace/same", "target"] == "d/whole"
    last = table.iloc[-1]
    assert (last["path"], last["target"]) == ("~/workspace/\\xff not utf-8", "\\xfe")
    assert str(last["mtime"]) == "2027-01-15 08:00:00.123456789+00:00"
    assert table.groupby("kind")["bytes"].sum()["file"] == 280
