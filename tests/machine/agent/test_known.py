"""What a run knows of files, from pass to pass."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fixtures.trees import let_settle
from torpor.machine.agent.known import KnownFiles
from torpor.machine.pipeline.contents import Contents
from torpor.machine.tree.plan import cut
from torpor.machine.tree.read import Read
from torpor.machine.tree.walk import walk


def test_a_file_that_was_away_when_its_part_was_first_tried_is_kept(tmp_path: Path) -> None:
    """Its names count as unchanged from then on: nobody would see that the manifest lacks them."""
    for name in "ab":
        (tmp_path / name).write_text("hello")
    os.link(tmp_path / "a", tmp_path / "link")
    let_settle()
    known = KnownFiles(["~/work"], None, [], {}, None)
    seen = walk([os.fsencode(tmp_path)], known.held, None, lambda: None)
    known.saw(seen)
    contents = Contents(seen, cut(seen.unread, [os.fsencode(tmp_path)]))
    for read in (Read(b"", stable=False, gone=True), Read(b"hello", stable=True)):
        contents.add_small(0, seen.unread[0], read, 0, 0, b"a" * 16)
    contents.add_small(1, seen.unread[1], Read(b"hello", stable=True), 0, 5, b"b" * 16)
    names = known.complete(seen, contents.gone)
    assert [entry.path for entry in names.entries] == [b"", b"a", b"b", b"link"]
    assert [entry.size for entry in names.entries] == [0, 5, 5, 0]
