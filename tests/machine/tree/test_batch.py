"""Small files, many at a time: C does what Python does, and leaves what is not plain."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_kernels import native
from tests.fixtures.manifests import entry
from torpor.machine.tree import batch
from torpor.machine.tree.batch import NewFile, Stat, read_files, stat_names, write_files
from torpor.machine.tree.names import Signature
from torpor.machine.tree.read import Read, read_whole
from torpor.machine.tree.write import TreeWriter
from torpor.shared.format.manifest import FILE, Extent


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def names(tmp_path: Path) -> list[bytes]:
    """A file, a directory, links and a FIFO; the last name is missing."""
    (tmp_path / "file").write_bytes(b"content")
    os.utime(tmp_path / "file", ns=(5, -1_500_000_001))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    os.link(tmp_path / "file", tmp_path / "folder" / "other")
    os.mkfifo(tmp_path / "fifo")
    os.truncate(tmp_path / "file", 1 << 20)  # a hole
    return [b"", b"file", b"folder", b"link", b"folder/other", b"fifo", b"missing"]


@pytest.mark.parametrize("native", [True, False])
def test_names_are_what_lstat_says(
    place: int,
    names: list[bytes],
    tmp_path: Path,
    native: bool,
    built_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert batch.disk_library() is not None
    if not native:
        monkeypatch.setattr(batch, "disk_library", lambda: None)
    *found, missing = stat_names(place, names)
    root = os.fsencode(tmp_path)
    assert found == [Stat.of(os.lstat(os.path.join(root, name))) for name in names[:-1]]
    assert os.strerror(missing.error) == "No such file or directory"


def test_what_a_sandbox_does_not_let_c_see_python_looks_at(
    place: int, names: list[bytes], built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old sandbox answers statx with EPERM."""

    class _Refused:
        def torpor_look_at(self, _: int, __: Any, count: int, *out: int) -> None:
            (ctypes.c_int64 * (12 * count)).from_address(out[0])[:] = [*[0] * 11, 1] * count
            (ctypes.c_uint8 * count).from_address(out[2])[:] = [128] * count

    wanted = stat_names(place, names)
    monkeypatch.setattr(batch, "disk_library", _Refused)
    assert stat_names(place, names) == wanted


def test_a_file_that_is_not_what_the_walk_saw_is_not_stable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("data")
    seen = Signature.of(file.stat())
    others = [
        msgspec.structs.replace(seen, **{name: getattr(seen, name) + 1})
        for name in ("inode", "mtime_ns", "ctime_ns")
    ]
    reads = read_whole(os.fsencode(tmp_path), [(b"file", each) for each in (seen, *others)])
    assert [(bytes(read.data), read.stable) for read in reads] == [
        (b"data", True),
        *[(b"data", False)] * 3,
    ]


def test_files_are_read_at_once_only_if_all_are_as_they_were_seen(
    place: int, tmp_path: Path, built_library: Path
) -> None:
    (tmp_path / "one").write_bytes(b"0123")
    (tmp_path / "two").write_bytes(b"456")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("two")
    seen = [Signature.of(os.stat(tmp_path / name)) for name in ("one", "two")]

    def read(names: list[bytes], signatures: list[Signature]) -> bytearray | None:
        sizes = [signature.size for signature in signatures]
        packed = b"".join(signature.packed() for signature in signatures)
        return batch.read_unchanged(place, names, sizes, packed)

    assert read([b"one", b"two"], seen) == b"0123456"
    for other in (b"missing", b"link", b"fifo", b"folder", b"one"):
        assert read([b"one", other], seen) is None
    for name in ("inode", "size", "mtime_ns", "ctime_ns"):
        for by in (-1, 1):
            wrong = msgspec.structs.replace(seen[0], **{name: getattr(seen[0], name) + by})
            assert read([b"one", b"two"], [wrong, seen[1]]) is None


def test_a_name_with_a_zero_byte_never_reaches_c() -> None:
    with pytest.raises(ValueError, match="zero byte"):
        stat_names(0, [b"a", b"b\0c"])


def test_only_regular_files_of_the_size_are_read(
    place: int, names: list[bytes], tmp_path: Path, built_library: Path
) -> None:
    """A FIFO blocks nothing, no link is followed, and no access time moves."""
    (tmp_path / "whole").write_bytes(b"0123456789")
    (tmp_path / "grown").write_bytes(b"0123456789")
    (tmp_path / "shorter").write_bytes(b"012")
    os.utime(tmp_path / "whole", ns=(7, 7))
    asked = [b"whole", b"shorter", b"grown", b"link", b"fifo", b"folder", b"missing"]
    sizes = [10, 10, 4, 7, 0, 0, 0]
    whole, shorter, grown, *others = read_files(place, asked, sizes)
    assert whole is not None
    assert grown is not None
    assert bytes(whole[0]) == b"0123456789"
    assert whole[1] == whole[2] == Stat.of(os.stat(tmp_path / "whole"))
    assert whole[2].atime_ns == 7
    assert bytes(grown[0]) == b"0123"
    assert grown[2].size == 10
    assert [shorter, *others] == [None] * 5


def test_files_are_read_into_memory_that_is_lent(
    place: int, tmp_path: Path, built_library: Path
) -> None:
    (tmp_path / "one").write_bytes(b"0123")
    (tmp_path / "two").write_bytes(b"456")
    lent = memoryview(bytearray(b"used before"))
    one, two = read_files(place, [b"one", b"two"], [4, 3], lambda size: lent)
    assert one is not None
    assert two is not None
    assert (one[0], two[0], lent) == (b"0123", b"456", b"0123456fore")


def test_new_files_have_their_attributes_and_nothing_is_replaced(
    place: int, tmp_path: Path, built_library: Path
) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("there")
    ids = (os.geteuid(), os.getegid())
    old = -1_500_000_001  # before 1970
    files = [
        NewFile(b"first", 3, 4, 0o4755, *ids, old),
        NewFile(b"there", 0, 2, 0o600, *ids, 1),
        NewFile(b"link", 0, 2, 0o600, *ids, 1),
        NewFile(b"none/below", 0, 2, 0o600, *ids, 1),
        NewFile(b"last", 0, 3, 0o400, *ids, 2),
    ]
    assert write_files(place, files, b"abcdefg", owners=os.geteuid() == 0) == [1, 2, 3]
    first, last = (os.stat(tmp_path / name) for name in ("first", "last"))
    assert (tmp_path / "first").read_bytes() == b"defg"
    assert (first.st_mode & 0o7777, first.st_mtime_ns, first.st_atime_ns) == (0o4755, old, old)
    assert (last.st_mode & 0o7777, last.st_size) == (0o400, 3)
    assert (tmp_path / "there").read_bytes() == b"mine"
    for at, size in ((4, 4), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="outside the 7 bytes"):
            write_files(place, [NewFile(b"x", at, size, 0o600, *ids, 1)], b"abcdefg", owners=False)
    assert not (tmp_path / "x").exists()


def test_a_file_that_the_disk_does_not_take_is_named(
    place: int, tmp_path: Path, built_library: Path
) -> None:
    ids = (os.geteuid(), os.getegid())
    files = [
        NewFile(name, 0, size, 0o600, *ids, 1) for name, size in ((b"a", 8), (b"b", 64), (b"c", 8))
    ]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        assert write_files(place, files, bytes(64), owners=False) == [1, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["a"]  # nothing half, and nothing after it


@pytest.mark.parametrize("year", [1601, 2300])
def test_a_time_that_does_not_fit_is_left_to_python(
    tmp_path: Path, year: int, built_library: Path
) -> None:
    """Many archives hold the year 1601, which is 0 on Windows. Not each file system can."""
    time_ns = int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp()) * 10**9 + 1
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "file"
        file.write_bytes(b"x")
        os.utime(file, ns=(time_ns, time_ns))
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        (st,) = stat_names(fd, [b"file"])
        assert [*read_files(fd, [b"file"], [1])] == [None]
        os.close(fd)
        assert st == Stat.of(os.stat(file))
        assert st.mtime_ns == time_ns
        seen = Signature.among(st)
        assert read_whole(os.fsencode(folder), [(b"file", seen)]) == [Read(b"x", stable=True)]
        made = entry(FILE, b"made", size=1, extents=(Extent(0, 0, 1),), mtime_ns=time_ns)
        writer = TreeWriter([os.fsencode(folder)])
        writer.write_files([(made, 0)], b"y")
        writer.close()
        assert (Path(folder) / "made").stat().st_mtime_ns == time_ns


def test_a_library_of_another_version_is_not_called(
    built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "DISK_VERSION", native.DISK_VERSION + 1)
    native.disk_library.cache_clear()
    assert native.disk_library() is None
    monkeypatch.undo()
    native.disk_library.cache_clear()
    assert native.disk_library() is not None
