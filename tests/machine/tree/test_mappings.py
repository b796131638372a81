"""Where a store through a mapping moves a file's time, and who could store where it does not."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.mapper import Mapper
from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.walks import as_read
from torpor.machine.tree import mappings
from torpor.machine.tree.mappings import file_systems, shows_stores
from torpor.machine.tree.names import Names
from torpor.machine.tree.walk import Walk, compile_excludes, walk
from torpor.shared.errors import DiskFull, MachineError, TorporError

SHOWS = {"ext2/ext3": True, "xfs": True, "btrfs": True, "tmpfs": False}
"""Whether stores are seen, by the name that ``stat`` gives the file system; others do either."""


def _type_of(folder: Path) -> str:
    argv = ["stat", "--file-system", "--format=%T", str(folder)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system without a disk, whose pages are never written back."""
    parent = tmp_path if _type_of(tmp_path) == "tmpfs" else Path("/dev/shm")
    assert _type_of(parent) == "tmpfs", "this test needs a tmpfs at /dev/shm or for temporary files"
    folder = parent / f"torpor-{secrets.token_hex(4)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _walk(root: Path, held: Names | None = None) -> Walk:
    return walk([os.fsencode(root)], held or Names(1), None, lambda: None)


def _held(root: Path) -> Names:
    let_settle()
    return as_read(_walk(root))


@pytest.mark.rule(4)
def test_a_file_system_is_tried_and_left_as_it_was(tmp_path: Path, in_memory: Path) -> None:
    on_disk = tmp_path / "on disk"
    on_disk.mkdir()
    for folder in (on_disk, in_memory):
        let_settle()
        before = folder.stat()
        shows = shows_stores(os.fsencode(folder))
        assert shows is SHOWS.get(_type_of(folder), shows)
        assert folder.stat() == before
        assert [*folder.iterdir()] == []


def test_where_a_file_without_a_name_cannot_be_made_another_folder_of_the_disk_is_used(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, beside = tmp_path / "place", tmp_path / "beside"
    place.mkdir()
    beside.mkdir()
    shows = shows_stores(os.fsencode(place))
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # EISDIR, as an old overlay says
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(beside))
    assert shows_stores(os.fsencode(place)) is shows
    assert [*place.iterdir()] == [*beside.iterdir()] == []
    assert not shows_stores(os.fsencode(in_memory))  # cannot be tried


@pytest.mark.rule(4)
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
        assert seen.unread[0].mapped == program.name
        assert seen.names.signature(seen.unread.positions[0]) is None
    assert not _walk(in_memory, held).unread


class _Library:
    """A C library whose ``syncfs`` fails."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __call__(self, *_: object, **__: object) -> _Library:
        return self

    def syncfs(self, fd: int) -> int:
        ctypes.set_errno(self._code)
        return -1


@pytest.mark.rule(4)
@pytest.mark.parametrize(
    ("code", "error"), [(errno.EIO, MachineError), (errno.ENOSPC, DiskFull)], ids=["EIO", "ENOSPC"]
)
def test_a_disk_that_was_not_synced_ends_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[TorporError]
) -> None:
    """A store after it might move no time: nothing may be destroyed then."""
    (tmp_path / "file").write_bytes(b"new")
    monkeypatch.setattr(ctypes, "CDLL", _Library(code))
    with pytest.raises(error, match=rf"{tmp_path} .*errno {code}\)"):
        _walk(tmp_path)


@pytest.mark.rule(4)
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
def test_without_the_call_a_mapped_file_counts_as_changing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "mapped").write_bytes(bytes(5000))
    held = _held(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", _Library(code))
    with Mapper(tmp_path / "mapped"):
        assert [u.entry.path for u in _walk(tmp_path, held).unread] == [b"mapped"]


@pytest.mark.rule(4)
def test_a_single_file_of_another_disk_is_synced_and_tried_too(
    needs_server: None, tmp_path: Path
) -> None:
    """A bind mount, as containers have it."""
    script = """
import os, sys
from tests.fixtures.mapper import Mapper
from torpor.machine.tree.mappings import file_systems, mapped_unseen, sync_disk
root = os.fsencode(sys.argv[1])
places = file_systems(root, None)
print(places == [root, root + b"/file"])
for place in places:
    sync_disk(place)
with Mapper(sys.argv[1] + "/file"):
    print(root + b"/file" in mapped_unseen(places))
"""
    root, memory = tmp_path / "root", tmp_path / "memory"
    for folder in (root, memory):
        folder.mkdir()
    (root / "file").touch()
    mount = (
        'mount -t tmpfs none "$2" && truncate -s 5000 "$2/file" && '
        'mount --bind "$2/file" "$1/file" && exec "$0" -c "$3" "$1"'
    )
    argv = ["unshare", "--mount", "sh", "-c", mount, sys.executable, *map(str, (root, memory))]
    if os.geteuid() != 0:
        argv.insert(1, "--map-root-user")
    done = subprocess.run(
        [*argv, script], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.stdout, done.returncode) == ("True\nTrue\n", 0), done.stderr


def test_disks_that_are_mounted_below_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("root/a disk", "root/out/disk", "root/d", "rootless"):
        (tmp_path / name).mkdir(parents=True)
    os.mkfifo(tmp_path / "root/pipe")
    (tmp_path / "self").mkdir()
    lines = [
        rf"36 35 98:0 / {tmp_path}/{place} rw,noatime master:1 - ext4 /dev/sdb rw"
        for place in ("root", r"root/a\040disk", "root/out/disk", "root/pipe", "rootless")
    ]
    (tmp_path / "self/mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(mappings, "PROC", tmp_path)
    root = os.fsencode(tmp_path / "root")
    assert file_systems(root, compile_excludes(["out"])) == [root, root + b"/a disk"]
    assert file_systems(root, None) == [root, root + b"/a disk", root + b"/out/disk"]
