"""Where a store through a mapping moves a file's time, and who could store where it does not."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.mapper import Mapper
from tests.fixtures.trees import let_settle
from torpor.machine.tree import mappings
from torpor.machine.tree.mappings import file_systems, shows_stores
from torpor.machine.tree.walk import Held, Walk, compile_excludes, walk


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a file system without a disk, whose pages are never written back."""
    folder = Path("/dev/shm") / f"torpor-{secrets.token_hex(4)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _walk(root: Path, held: dict[bytes, Held]) -> Walk:
    return walk([os.fsencode(root)], [held], None, lambda: None)


def _held(root: Path) -> dict[bytes, Held]:
    let_settle()
    seen = _walk(root, {})
    pairs = zip(seen.entries, seen.signatures, strict=True)
    return {entry.path: Held(signature, entry) for entry, signature in pairs}


def test_a_file_system_is_tried_and_left_as_it_was(tmp_path: Path, in_memory: Path) -> None:
    for folder, shows in ((tmp_path, True), (in_memory, False)):
        let_settle()
        before = folder.stat()
        assert shows_stores(os.fsencode(folder)) is shows
        assert folder.stat() == before
        assert [*folder.iterdir()] == []


def test_where_a_file_without_a_name_cannot_be_made_another_folder_of_the_disk_is_used(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # EISDIR, as an old overlay says
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "beside"))
    assert shows_stores(os.fsencode(tmp_path))
    assert [*tmp_path.rglob("*")] == [tmp_path / "beside"]
    assert not shows_stores(os.fsencode(in_memory))  # cannot be tried


def test_a_file_that_a_program_can_change_unseen_is_new_in_each_walk(in_memory: Path) -> None:
    for name in ("mapped", "other"):
        (in_memory / name).write_bytes(bytes(5000))
    os.link(in_memory / "mapped", in_memory / "z")
    held = _held(in_memory)
    with Mapper(in_memory / "z") as program:
        before = (in_memory / "mapped").stat()
        program.store()
        assert (in_memory / "mapped").stat() == before  # no time tells
        seen = _walk(in_memory, held)
        assert [u.entry.path for u in seen.unread] == [b"mapped"]
        assert not seen.rests(seen.unread[0])
    assert _walk(in_memory, held).unread == []


def test_a_mapped_file_on_a_disk_is_new_only_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "mapped").write_bytes(bytes(5000))
    held = _held(tmp_path)
    with Mapper(tmp_path / "mapped") as program:
        assert _walk(tmp_path, held).unread == []
        program.store()
        assert [u.entry.path for u in _walk(tmp_path, held).unread] == [b"mapped"]


def test_disks_that_are_mounted_below_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("root/a disk", "root/out/disk", "root/d", "rootless"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "self").mkdir()
    lines = [
        rf"36 35 98:0 / {tmp_path}/{place} rw,noatime master:1 - ext4 /dev/sdb rw"
        for place in ("root", r"root/a\040disk", "root/out/disk", "rootless")
    ]
    (tmp_path / "self/mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(mappings, "PROC", tmp_path)
    root = os.fsencode(tmp_path / "root")
    assert file_systems(root, compile_excludes(["out"])) == [root, root + b"/a disk"]
    assert file_systems(root, None) == [root, root + b"/a disk", root + b"/out/disk"]
