"""Names are found by their directory, and what was read stays with them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fixtures.trees import let_settle
from tests.fixtures.walks import as_read
from torpor.machine.tree.names import HELD, NO_SIGNATURE, Names, packed_signatures
from torpor.machine.tree.read import read_at
from torpor.machine.tree.walk import walk
from torpor.shared.format.manifest import Content


def _walked(root: Path) -> Names:
    let_settle()
    return as_read(walk([os.fsencode(root)], Names(1), None, lambda: None))


def test_a_part_that_ends_late_does_not_change_what_the_next_walk_is_given(tmp_path: Path) -> None:
    """Its content would be missing beside a mark that says it is there."""
    (tmp_path / "file").write_text("data")
    (tmp_path / "other").write_text("data")
    seen = walk([os.fsencode(tmp_path)], Names(1), None, lambda: None)
    file, other = seen.unread.positions
    seen.names.hold([file], [Content(4, (), b"")])
    given = seen.names.settled()
    seen.names.hold([other], [Content(4, (), b"")])
    assert (given.held(0, b"file"), given.held(0, b"other")) == (seen.names.held(0, b"file"), None)
    assert [e.size for e in seen.names.settled().entries] == [0, 4, 4]


def test_a_snapshot_has_the_names_that_the_walk_had(tmp_path: Path) -> None:
    for name in ("a", "d/b", "d/e/c", "d/f/x", "z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names = _walked(tmp_path)
    again = Names.of(1, names.entries, names.signatures())
    paths = [entry.path for entry in names.entries]
    assert [again.find(0, path) for path in paths] == list(range(len(paths)))
    assert [again.held(0, path) for path in paths] == [names.held(0, path) for path in paths]
    assert [again.find(0, path) for path in (b"d/a", b"d/e/c/c", b"missing")] == [-1, -1, -1]
    assert not [*again.missing(0, names)]
    (tmp_path / "d/e/c").unlink()
    (tmp_path / "z").rename(tmp_path / "y")
    gone = again.missing(0, _walked(tmp_path))
    assert {again.entries[position].path for position in gone} == {b"d/e/c", b"z"}


def test_a_signature_that_is_not_known_is_never_that_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names = _walked(tmp_path)
    unknown = Names.of(1, names.entries, packed_signatures([None] * len(names)))
    position = unknown.find(0, b"file")
    assert unknown.signature(position) is None
    assert unknown.marks[position] == HELD
    assert not unknown.is_known(position, NO_SIGNATURE)


def test_a_time_centuries_away_is_the_same_in_the_walk_and_when_the_file_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("data")
    os.utime(file, ns=(13_600_000_000 * 10**9,) * 2)  # the year 2400, on file systems that know it
    root = os.fsencode(tmp_path)
    let_settle()
    (unread,) = walk([root], Names(1), None, lambda: None).unread
    assert unread.entry.mtime_ns == file.stat().st_mtime_ns
    assert read_at(root, b"file", 0, 4, unread.signature).stable
