"""Many small files in one call: looked at, read, written.

In C (gpu_kernels/disk), without the interpreter's lock: Python takes longer for a small file than
the kernel does. The C functions handle only the plain case. Files that they leave, and all files
where the library is missing, are handled one by one in Python, which knows what each error means.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import add
from typing import Final, NamedTuple

from gpu_kernels.native import DiskLibrary, address_of, disk_library
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.memory import Memory

_STAT: Final = struct.Struct("=Q3qQ7q")
_SIGNATURE: Final = struct.Struct("=4Q")
SIGNATURE_BYTES: Final = _SIGNATURE.size
_WHOLE: Final = (1 << 64) - 1
IS_DIRECTORY, HAS_SEVERAL_NAMES, IS_READ, IS_UNKNOWN = 1, 2, 4, 128
"""What a name is, as in disk.h."""
_ATTRIBUTES: Final = struct.Struct("=4q")


class Stat(NamedTuple):
    """What lstat says of a name. ``error``: 0, or the errno because of which nothing is known."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    mode: int
    nlink: int
    uid: int
    gid: int
    blocks: int
    atime_ns: int
    error: int = 0

    @classmethod
    def of(cls, st: os.stat_result) -> Stat:
        return cls(
            st.st_ino,
            st.st_size,
            st.st_mtime_ns,
            st.st_ctime_ns,
            st.st_dev,
            st.st_mode,
            st.st_nlink,
            st.st_uid,
            st.st_gid,
            st.st_blocks,
            st.st_atime_ns,
        )

    @classmethod
    def unknown(cls, cause: OSError) -> Stat:
        return cls(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, cause.errno or errno.EIO)

    @property
    def is_read(self) -> bool:
        """Whether a file was read since it was last changed or restored. A restore sets the access
        time to the mtime, which may be in the future."""
        return self.ctime_ns < self.atime_ns != self.mtime_ns and stat.S_ISREG(self.mode)

    @property
    def kind(self) -> int:
        if self.error:
            return IS_UNKNOWN
        several = self.nlink > 1 and stat.S_ISREG(self.mode)
        return (
            (IS_DIRECTORY if stat.S_ISDIR(self.mode) else 0)
            | (HAS_SEVERAL_NAMES if several else 0)
            | (IS_READ if self.is_read else 0)
        )


class Looked(NamedTuple):
    """What names are. Of each, ``signatures`` has 32 bytes and ``kinds`` one."""

    signatures: bytes | bytearray
    kinds: bytes | bytearray
    found: bytearray | Sequence[Stat]  # as C or Python has seen the names

    @classmethod
    def of(cls, stats: Sequence[Stat]) -> Looked:
        return cls(
            b"".join(packed_signature(*st[:4]) for st in stats),
            bytes(st.kind for st in stats),
            stats,
        )

    @property
    def stats(self) -> Sequence[Stat]:
        if isinstance(self.found, bytearray):
            return list(map(_made, _STAT.iter_unpack(self.found)))
        return self.found


def packed_signature(inode: int, size: int, mtime_ns: int, ctime_ns: int) -> bytes:
    """A signature as 32 bytes. Of a time that does not fit into 64 bits, the last 64 bits are
    kept."""
    return _SIGNATURE.pack(inode, size, mtime_ns & _WHOLE, ctime_ns & _WHOLE)


_made: Final[Callable[[tuple[int, ...]], Stat]] = partial(tuple.__new__, Stat)
"""A Stat of its twelve values: what ``Stat._make`` does, without a call of Python for each file."""


class NewFile(NamedTuple):
    """A file to make: ``size`` bytes from ``offset`` of a buffer, and its attributes."""

    name: bytes
    offset: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int


def look_at(directory: int, names: Sequence[bytes]) -> Looked:
    """Look at names below an open directory, never through a symlink at the end of a name. An
    empty name is the directory."""
    if (lib := disk_library()) is None:
        return Looked.of([_stat(directory, name) for name in names])
    count = len(names)
    found, signatures, kinds = (
        bytearray(count * size) for size in (_STAT.size, SIGNATURE_BYTES, 1)
    )
    with (
        address_of(_strings(names)) as asked,
        address_of(found, writable=True) as stats,
        address_of(signatures, writable=True) as signed,
        address_of(kinds, writable=True) as kind,
    ):
        lib.torpor_look_at(directory, asked, count, stats, signed, kind)
    looked = Looked(signatures, kinds, found)
    if IS_UNKNOWN not in kinds:
        return looked
    return Looked.of(
        [
            st if st.error in (0, errno.ENOENT) else _stat(directory, name)
            for name, st in zip(names, looked.stats, strict=True)
        ]  # for a kernel or a sandbox without statx
    )


def stat_names(directory: int, names: Sequence[bytes]) -> Sequence[Stat]:
    """Look at names as look_at does, one by one."""
    return look_at(directory, names).stats


def read_files(
    directory: int, names: Sequence[bytes], sizes: Sequence[int], into: Memory | None = None
) -> Iterator[tuple[memoryview, Stat, Stat] | None]:
    """Read files below an open directory whole. Returns for each file its content, and its stat
    before and after the read; None where it was not a regular file of that size. ``into`` lends
    the memory of the contents."""
    if (lib := disk_library()) is None:
        yield from (None for _ in names)
        return
    size = sum(sizes)
    view = memoryview(bytearray(size)) if into is None else into(size)
    before, after = _read_files(lib, directory, names, sizes, view)
    at = 0
    for size, opened, closed in zip(
        sizes, _STAT.iter_unpack(before), _STAT.iter_unpack(after), strict=True
    ):
        st = _made(closed)
        yield None if st.error else (view[at : at + size], _made(opened), st)
        at += size


def read_unchanged(
    directory: int, names: Sequence[bytes], sizes: Sequence[int], signatures: bytes
) -> bytearray | None:
    """Read files below an open directory whole: the contents, one behind the other. None unless
    each is a regular file that still has its signature (32 bytes) after the read."""
    if (lib := disk_library()) is None:
        return None
    data = bytearray(sum(sizes))
    _, after = _read_files(lib, directory, names, sizes, data)
    found, seen = memoryview(after).cast("Q"), memoryview(signatures).cast("Q")
    words, fields = _STAT.size // 8, SIGNATURE_BYTES // 8
    if any(found[words - 1 :: words]):  # some read failed
        return None
    is_seen = all(found[at::words].tolist() == seen[at::fields].tolist() for at in range(fields))
    return data if is_seen else None


def _read_files(
    lib: DiskLibrary,
    directory: int,
    names: Sequence[bytes],
    sizes: Sequence[int],
    data: bytearray | memoryview,
) -> tuple[bytearray, bytearray]:
    """Read the contents of files into ``data``, which has room for all; returns their stats before
    and after the read."""
    before, after = (bytearray(_STAT.size * len(names)) for _ in range(2))
    with (
        address_of(_strings(names)) as asked,
        address_of(array("Q", sizes)) as lengths,
        address_of(data, writable=True) as content,
        address_of(before, writable=True) as then,
        address_of(after, writable=True) as now,
    ):
        lib.torpor_read_files(directory, asked, lengths, len(names), content, then, now)
    return before, after


def is_plain(mtime_ns: int) -> bool:
    """Whether a time fits into 64 bits of nanoseconds, as C sets it: from 1677 to 2262."""
    return -(1 << 63) <= mtime_ns < 1 << 63


def write_files(
    directory: int, files: Sequence[NewFile], data: Buffer, *, owners: bool
) -> list[int]:
    """Make new files in an open directory; returns the positions of those that are not made, or
    only half."""
    if (lib := disk_library()) is None:
        return list(range(len(files)))
    count = len(files)
    names, offsets, sizes, *rest = zip(*files, strict=True)
    if min(offsets) < 0 or min(sizes) < 0 or max(map(add, offsets, sizes)) > len(data):
        raise ValueError(f"a file lies outside the {len(data)} bytes that were given")
    errors = array("i", (0,)) * count
    with (
        address_of(_strings(names)) as asked,
        address_of(data) as content,
        address_of(array("Q", offsets)) as starts,
        address_of(array("Q", sizes)) as lengths,
        address_of(b"".join(map(_ATTRIBUTES.pack, *rest))) as wanted,
        address_of(errors, writable=True) as failed,
    ):
        lib.torpor_write_files(
            directory, asked, content, starts, lengths, wanted, owners, count, failed
        )
    return [number for number, error in enumerate(errors) if error]


def _strings(names: Sequence[bytes]) -> bytes:
    """The names, each with a zero byte at its end, as C takes them."""
    joined = b"\0".join([*names, b""])
    if joined.count(b"\0") != len(names):
        raise ValueError("a name has a zero byte in it")
    return joined


def _stat(directory: int, name: bytes) -> Stat:
    try:
        return Stat.of(os.stat(name or b".", dir_fd=directory, follow_symlinks=False))
    except OSError as exc:
        return Stat.unknown(exc)
