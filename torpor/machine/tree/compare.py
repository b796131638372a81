"""Compare a restored tree with its manifest: every attribute, and optionally every byte."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torpor.machine.tree.content import right_extents
from torpor.machine.tree.read import opened
from torpor.machine.tree.walk import RACY_NS, Signature, read_xattrs, settled
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Chunk, Entry

_THREADS = 8
_BATCH = 64
_PIECE_BYTES = 8 << 20


class Comparison:
    """What differs, and the signature of each correct entry."""

    def __init__(self, count: int) -> None:
        self.found: list[tuple[int, str]] = []  # the number of an entry, and how it differs
        self.signatures: list[Signature | None] = [None] * count

    @property
    def differences(self) -> list[str]:
        return [words for _, words in self.found]


def compare_tree(
    entries: Sequence[Entry],
    chunks: Sequence[Chunk],
    targets: Sequence[bytes],
    seal: Seal,
    *,
    full: bool,
    owners: bool,
    refused_xattrs: Container[tuple[int, bytes, bytes]],
    progress: Callable[[int], None],
    check: Callable[[], None],
    in_use_ns: int | None = None,
) -> Comparison:
    """Compare what is on the disk with ``entries``; with ``full``, read and hash every file.

    ``owners``: whether owners were restored and must match. ``refused_xattrs`` (root, path, name)
    could not be set here, and the restore has warned of them. ``check`` may raise RunCancelled.
    ``in_use_ns``: since then programs may make names, which moves the times of directories.
    """
    result = Comparison(len(entries))
    time.sleep(RACY_NS / 1e9)  # let new files settle, so that the index can be trusted
    inodes: dict[tuple[int, bytes], int] = {}
    for number, entry in enumerate(entries):
        if number % 1024 == 0:
            check()
        signature, wrong = _compare_names(entry, targets, inodes, owners, refused_xattrs, in_use_ns)
        if wrong:
            result.found.append((number, wrong))
        looked = time.time_ns()
        if signature is not None and settled(signature, looked):
            result.signatures[number] = signature
    if full:
        _compare_content(entries, chunks, targets, seal, result, progress, check)
    return result


def _compare_names(
    entry: Entry,
    targets: Sequence[bytes],
    inodes: dict[tuple[int, bytes], int],
    owners: bool,
    refused_xattrs: Container[tuple[int, bytes, bytes]],
    in_use_ns: int | None,
) -> tuple[Signature | None, str]:
    """The signature of what is right and at rest; and how it differs."""
    full = os.path.join(targets[entry.root], entry.path)
    shown = os.fsdecode(full)
    try:
        st = os.lstat(full)
    except OSError as exc:
        return None, f"{shown}: {exc.strerror}"
    wrong = []
    moved = False
    kind = (
        SYMLINK
        if stat.S_ISLNK(st.st_mode)
        else DIRECTORY
        if stat.S_ISDIR(st.st_mode)
        else FILE
        if stat.S_ISREG(st.st_mode)
        else None
    )
    if kind != (FILE if entry.kind == HARDLINK else entry.kind):
        return None, f"{shown}: is of another kind"
    if entry.kind == HARDLINK:
        if inodes.get((entry.root, entry.target)) != st.st_ino:
            wrong.append("is not the same file as its hard link")
    else:
        if entry.kind == FILE:
            inodes[(entry.root, entry.path)] = st.st_ino
            if st.st_size != entry.size:
                wrong.append(f"has {st.st_size} bytes, not {entry.size}")
        if entry.kind == SYMLINK and os.readlink(full) != entry.target:
            wrong.append("points elsewhere")
        if entry.kind != SYMLINK and stat.S_IMODE(st.st_mode) != entry.mode:
            wrong.append(f"has mode {stat.S_IMODE(st.st_mode):o}, not {entry.mode:o}")
        if owners and (st.st_uid, st.st_gid) != (entry.uid, entry.gid):
            wrong.append(f"belongs to {st.st_uid}:{st.st_gid}, not {entry.uid}:{entry.gid}")
        if st.st_mtime_ns != entry.mtime_ns:
            moved = kind == DIRECTORY and in_use_ns is not None and st.st_mtime_ns >= in_use_ns
            if not moved:
                wrong.append(f"has mtime {st.st_mtime_ns}, not {entry.mtime_ns}")
        if entry.xattrs:
            lacking = [x[0] for x in set(entry.xattrs) - set(read_xattrs(full))]
            if any((entry.root, entry.path, name) not in refused_xattrs for name in lacking):
                wrong.append("lacks extended attributes")
    if wrong:
        return None, f"{shown}: {'; '.join(wrong)}"
    return None if moved else Signature.of(st), ""


def _compare_content(
    entries: Sequence[Entry],
    chunks: Sequence[Chunk],
    targets: Sequence[bytes],
    seal: Seal,
    result: Comparison,
    progress: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    def compare(batch: Sequence[int]) -> list[tuple[int, str | None, bool]]:
        check()
        return [
            (number, *_compare_file(entries[number], chunks, targets, seal)) for number in batch
        ]

    done = 0
    with ThreadPoolExecutor(_THREADS) as threads:
        for compared in threads.map(compare, _batches(entries)):
            for number, difference, safe in compared:
                done += entries[number].size
                if difference is not None:
                    result.found.append((number, difference))
                if not safe:
                    result.signatures[number] = None
            progress(done)


def _batches(entries: Sequence[Entry]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for number, entry in enumerate(entries):
        if entry.kind != FILE:
            continue
        batch.append(number)
        size += entry.size
        if len(batch) == _BATCH or size > _PIECE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _compare_file(
    entry: Entry, chunks: Sequence[Chunk], targets: Sequence[bytes], seal: Seal
) -> tuple[str | None, bool]:
    """What differs or None, and whether a later change would be seen."""
    full = os.path.join(targets[entry.root], entry.path)
    shown = os.fsdecode(full)
    looked = time.time_ns()
    try:
        with opened(full) as fd:
            seen = Signature.of(os.fstat(fd))
            right = right_extents(fd, entry, chunks, seal)
            now = Signature.of(os.fstat(fd))
    except OSError as exc:
        return f"{shown}: {exc.strerror}", False
    if now != seen:
        return f"{shown}: changed while it was checked", False
    at = 0
    for number, extent in enumerate(entry.extents):
        if number not in right:
            return f"{shown}: content differs at {at} or after", False
        at += extent.length
    return None, settled(seen, looked)
