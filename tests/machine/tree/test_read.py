"""Reading says whether the file changed, whatever takes its place."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from torpor.machine.tree.read import Read, data_regions, opened, read_at
from torpor.machine.tree.walk import Signature
from torpor.shared.errors import WorkspaceInvalid

GONE = Read(b"", stable=False, gone=True)


def _seen(path: Path) -> Signature:
    st = path.stat()
    return Signature(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100)))
    return file


def _read(file: Path, seen: Signature, offset: int = 0, length: int = 100) -> Read:
    return read_at(os.fsencode(file.parent), os.fsencode(file.name), offset, length, seen)


def test_a_file_at_rest_is_stable_and_settled(file: Path) -> None:
    let_settle()
    seen = _seen(file)
    atime = file.stat().st_atime_ns
    assert _read(file, seen) == Read(bytes(range(100)), stable=True)
    assert _read(file, seen, 90, 10).data == bytes(range(90, 100))
    assert file.stat().st_atime_ns == atime


def test_a_write_that_has_begun_is_waited_for(tmp_path: Path) -> None:
    """It set the time when it began, and no time moves when its last bytes are written."""
    file, size = tmp_path / "file", 96 << 20
    with file.open("wb") as new:
        os.posix_fallocate(new.fileno(), 0, size)
    let_settle()
    before = _seen(file)
    fd = os.open(file, os.O_WRONLY)
    writer = threading.Thread(target=os.pwrite, args=(fd, b"new" * (size // 3), 0))
    writer.start()
    while _seen(file) == before:
        pass
    read = _read(file, _seen(file), size - 3, 3)
    writer.join()
    os.close(fd)
    assert read == Read(b"new", stable=True)


@pytest.mark.parametrize("change", ["append", "truncate", "rewrite", "replace", "chmod"])
def test_a_changed_file_is_not_stable(file: Path, change: str) -> None:
    let_settle()
    seen = _seen(file)
    if change == "append":
        with file.open("ab") as f:
            f.write(b"more")
    elif change == "truncate":
        os.truncate(file, 40)
    elif change == "rewrite":
        file.write_bytes(bytes(100))
    elif change == "replace":
        (file.parent / "new").write_bytes(bytes(range(100)))
        os.replace(file.parent / "new", file)
    else:
        file.chmod(0o600)
    read = _read(file, seen)
    assert not read.stable
    assert not read.gone
    assert len(read.data) == (40 if change == "truncate" else 100)


@pytest.mark.parametrize("now", ["nothing", "fifo", "socket", "directory", "symlink", "loop"])
def test_what_is_no_file_any_more_is_gone(file: Path, now: str) -> None:
    seen = _seen(file)
    file.unlink()
    if now == "fifo":
        os.mkfifo(file)  # without a writer: opening it must not wait
    elif now == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(file))
    elif now == "directory":
        file.mkdir()
    elif now == "symlink":
        (file.parent / "secret").write_bytes(bytes(range(100)))
        file.symlink_to("secret")
    elif now == "loop":
        file.symlink_to(file.name)
    assert _read(file, seen) == GONE


def test_a_directory_on_the_way_that_is_a_file_now_means_gone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_text("x")
    seen = _seen(tmp_path / "d/file")
    os.unlink(tmp_path / "d/file")
    os.rmdir(tmp_path / "d")
    (tmp_path / "d").write_text("x")
    assert read_at(os.fsencode(tmp_path), b"d/file", 0, 1, seen) == GONE


def test_a_name_too_long_to_open_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceInvalid, match="File name too long"):
        read_at(os.fsencode(tmp_path), b"x/" * 2100, 0, 1, Signature(1, 1, 1, 1))


def test_data_regions_leave_holes_out(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as f:
        f.truncate(1 << 30)
        os.pwrite(f.fileno(), b"x" * 4096, 1 << 20)
        os.pwrite(f.fileno(), b"y", (1 << 30) - 1)
    regions = data_regions(os.fsencode(tmp_path), b"sparse", 1 << 30)
    assert regions == [(1 << 20, 4096), ((1 << 30) - 4096, 4096)]
    assert data_regions(os.fsencode(tmp_path), b"sparse", 1 << 20) == []
    assert data_regions(os.fsencode(tmp_path), b"missing", 7) == [(0, 7)]


def test_opened_does_not_follow_symlinks(file: Path) -> None:
    (file.parent / "link").symlink_to("file")
    with opened(os.fsencode(file)) as fd:
        assert os.read(fd, 3) == bytes(range(3))
    with pytest.raises(OSError, match="symbolic links"), opened(os.fsencode(file.parent / "link")):
        pass
