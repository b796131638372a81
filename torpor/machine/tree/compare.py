"""Compare a restored tree with its manifest: every attribute, and optionally every byte."""

from __future__ import annotations

import os
import stat
import time
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, groupby, islice
from typing import Final

from torpor.machine.tree.batch import Stat, read_files, stat_names
from torpor.machine.tree.content import right_extents
from torpor.machine.tree.names import Signature, Signatures
from torpor.machine.tree.read import opened
from torpor.machine.tree.walk import RACY_NS, read_xattrs, settled
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    SYMLINK,
    Chunk,
    Entry,
    described,
)
from torpor.shared.format.rows import Described
from torpor.shared.format.sizes import BIG_FILE_BYTES

_THREADS: Final = 8
_NAMES: Final = 1024  # looked at together
_BATCH: Final = 256  # files read together
_PIECE_BYTES: Final = 2 << 20
_TARGET: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGED: Final = "changed while it was checked"
_KINDS: Final = {stat.S_IFLNK: SYMLINK, stat.S_IFDIR: DIRECTORY, stat.S_IFREG: FILE}


class Comparison:
    """What differs, and the signature of each correct entry."""

    def __init__(self, entries: int) -> None:
        self.found: list[tuple[int, str]] = []  # the number of an entry, and how it differs
        self.signatures = Signatures(entries)

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
    is_what = described(entries)
    links = [entries[number] for number in is_what.of_kind(HARDLINK)]
    linked = {(link.root, link.target) for link in links}
    inodes: dict[tuple[int, bytes], int] = {}
    with _opened(targets) as places:
        numbers = count()
        for some in _runs_of(entries):
            check()
            before = time.time_ns()
            stats = _looked(places, some)
            after = time.time_ns()
            for entry, st, number in zip(some, stats, numbers, strict=False):
                if (entry.root, entry.path) in linked:
                    inodes[entry.root, entry.path] = st.inode
                moved, wrong = _differs(
                    entry, st, targets, inodes, owners, refused_xattrs, in_use_ns
                )
                signature = Signature.among(st)
                if wrong:
                    result.found.append((number, wrong))
                elif not moved and settled(signature, before, after):
                    result.signatures[number] = signature
        if full:
            batches = _batches(is_what)
            _compare_content(
                entries, batches, chunks, targets, places, seal, result, progress, check
            )
    return result


@contextmanager
def _opened(targets: Sequence[bytes]) -> Iterator[list[int | OSError]]:
    """A descriptor of each directory, or why there is none."""
    places: list[int | OSError] = []
    try:
        for target in targets:
            try:
                places.append(os.open(target, _TARGET))
            except OSError as exc:
                places.append(exc)
        yield places
    finally:
        for place in places:
            if isinstance(place, int):
                os.close(place)


def _looked(places: Sequence[int | OSError], entries: Sequence[Entry]) -> Sequence[Stat]:
    """What is on the disk under the names of entries of one root."""
    place = places[entries[0].root]
    if isinstance(place, OSError):
        return [Stat.unknown(place) for _ in entries]
    return stat_names(place, [entry.path for entry in entries])


def _runs_of(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """``entries`` in lists of neighbours of one root."""
    for _, group in groupby(entries, lambda entry: entry.root):
        while run := list(islice(group, _NAMES)):
            yield run


def _differs(
    entry: Entry,
    st: Stat,
    targets: Sequence[bytes],
    inodes: dict[tuple[int, bytes], int],
    owners: bool,
    refused_xattrs: Container[tuple[int, bytes, bytes]],
    in_use_ns: int | None,
) -> tuple[bool, str]:
    """Whether the time of a directory in use has moved, which is no fault; and how a name
    differs."""
    if st.error:
        return False, f"{_shown(entry, targets)}: {os.strerror(st.error)}"
    wrong = []
    moved = False
    if _KINDS.get(stat.S_IFMT(st.mode)) != (FILE if entry.kind == HARDLINK else entry.kind):
        return False, f"{_shown(entry, targets)}: is of another kind"
    if entry.kind == HARDLINK:
        if inodes.get((entry.root, entry.target)) != st.inode:
            wrong.append("is not the same file as its hard link")
    else:
        if entry.kind == FILE and st.size != entry.size:
            wrong.append(f"has {st.size} bytes, not {entry.size}")
        if entry.kind == SYMLINK and _leads(_full(entry, targets)) != entry.target:
            wrong.append("points elsewhere")
        mode = stat.S_IMODE(st.mode)
        if entry.kind != SYMLINK and mode != entry.mode:
            wrong.append(f"has mode {mode:o}, not {entry.mode:o}")
        if owners and (st.uid, st.gid) != (entry.uid, entry.gid):
            wrong.append(f"belongs to {st.uid}:{st.gid}, not {entry.uid}:{entry.gid}")
        if st.mtime_ns != entry.mtime_ns:
            moved = entry.kind == DIRECTORY and in_use_ns is not None and st.mtime_ns >= in_use_ns
            if not moved:
                wrong.append(f"has mtime {st.mtime_ns}, not {entry.mtime_ns}")
        if entry.xattrs:
            lacking = [x[0] for x in set(entry.xattrs) - set(read_xattrs(_full(entry, targets)))]
            if any((entry.root, entry.path, name) not in refused_xattrs for name in lacking):
                wrong.append("lacks extended attributes")
    return moved, f"{_shown(entry, targets)}: {'; '.join(wrong)}" if wrong else ""


def _leads(link: bytes) -> bytes | None:
    """Where a symlink leads; None if it is gone meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def _full(entry: Entry, targets: Sequence[bytes]) -> bytes:
    return os.path.join(targets[entry.root], entry.path)


def _shown(entry: Entry, targets: Sequence[bytes]) -> str:
    return os.fsdecode(_full(entry, targets))


def _compare_content(
    entries: Sequence[Entry],
    batches: Iterator[Sequence[int]],
    chunks: Sequence[Chunk],
    targets: Sequence[bytes],
    places: Sequence[int | OSError],
    seal: Seal,
    result: Comparison,
    progress: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    def compare(batch: Sequence[int]) -> list[tuple[int, int, str | None, bool]]:
        """Number and size of each file, what differs, and whether a change would be seen."""
        check()
        files = [(number, entries[number]) for number in batch]
        found = []
        for (small, root), some in groupby(files, lambda file: (_is_small(file[1]), file[1].root)):
            group = [*some]
            compared = (
                compare_small(root, [file for _, file in group])
                if small
                else (_compare_file(file, chunks, targets, seal) for _, file in group)
            )
            found += [
                (number, file.size, *result)
                for (number, file), result in zip(group, compared, strict=False)
            ]
        return found

    def compare_small(root: int, files: Sequence[Entry]) -> Iterator[tuple[str | None, bool]]:
        place = places[root]
        if isinstance(place, OSError):
            return  # each of its names differs already
        looked = time.time_ns()
        reads = read_files(place, [file.path for file in files], [file.size for file in files])
        for entry, read in zip(files, reads, strict=True):
            if read is None:
                yield _compare_file(entry, chunks, targets, seal)
                continue
            data, before, after = read
            if before[:4] != after[:4]:
                yield f"{_shown(entry, targets)}: {_CHANGED}", False
            elif entry.size and seal.digest(data) != entry.digest:
                yield f"{_shown(entry, targets)}: content differs at 0 or after", False
            else:
                yield None, settled(Signature.among(after), looked, time.time_ns())

    done = 0
    with ThreadPoolExecutor(_THREADS) as threads:
        for compared in threads.map(compare, batches):
            for number, size, difference, safe in compared:
                done += size
                if difference is not None:
                    result.found.append((number, difference))
                if not safe:
                    result.signatures[number] = None
            progress(done)


def _is_small(entry: Entry) -> bool:
    """Whether the file is read at once and has one digest. A manifest may claim any size."""
    return entry.size <= BIG_FILE_BYTES and bool(entry.digest or not entry.size)


def _batches(is_what: Described) -> Iterator[Sequence[int]]:
    """The files, in batches to read together."""
    batch = array("L")
    size = 0
    for number in is_what.of_kind(FILE):
        batch.append(number)
        size += is_what.sizes[number]
        if len(batch) == _BATCH or size > _PIECE_BYTES:
            yield batch
            batch, size = array("L"), 0
    if batch:
        yield batch


def _compare_file(
    entry: Entry, chunks: Sequence[Chunk], targets: Sequence[bytes], seal: Seal
) -> tuple[str | None, bool]:
    """What differs or None, and whether a later change would be seen."""
    shown = _shown(entry, targets)
    looked = time.time_ns()
    try:
        with opened(_full(entry, targets)) as fd:
            seen = Signature.of(os.fstat(fd))
            right = right_extents(fd, entry, chunks, seal)
            now = Signature.of(os.fstat(fd))
    except OSError as exc:
        return f"{shown}: {exc.strerror}", False
    if now != seen:
        return f"{shown}: {_CHANGED}", False
    at = 0
    for number, extent in enumerate(entry.extents):
        if number not in right:
            return f"{shown}: content differs at {at} or after", False
        at += extent.length
    return None, settled(seen, looked)
