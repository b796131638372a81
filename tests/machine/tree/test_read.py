"""Reading says whether the file changed, whatever takes its place."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from torpor.machine.tree.names import Signature
from torpor.machine.tree.read import Read, data_regions, read_at
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


@pytest.mark.rule(4)
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


@pytest.mark.parametrize("now", ["socket", "loop", "a file for its directory"])
def test_what_is_no_file_any_more_is_gone(file: Path, now: str) -> None:
    """Other changes: tests/machine/agent/test_snapshot_changes.py."""
    seen = _seen(file)
    file.unlink()
    if now == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(file))
    elif now == "loop":
        file.symlink_to(file.name)
    else:
        file.write_text("x")
        assert read_at(os.fsencode(file.parent), b"file/x", 0, 1, seen) == GONE
        return
    assert _read(file, seen) == GONE


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
