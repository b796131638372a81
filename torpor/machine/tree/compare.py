"""Compares a restored tree with its manifest: every attribute, and optionally every byte."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from typing import Final

from msgspec.structs import replace

from torpor.machine.tree.attributes import Attributes, widens
from torpor.machine.tree.batch import Stat, read_files, stat_names
from torpor.machine.tree.content import right_extents
from torpor.machine.tree.names import Signature, Signatures
from torpor.machine.tree.read import opened
from torpor.machine.tree.walk import RACY_COARSE_NS, RACY_NS, read_xattrs, settled
from torpor.shared.codecs.memory import ReusedMemory
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

_THREADS: Final = 8  # that read: a cold disk answered 8 faster than 3 in three of four rounds
_NAMES: Final = 1024  # names that are looked at together
_BATCH: Final = 256  # files read together
_PIECE_BYTES: Final = 2 << 20
_TARGET: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGED: Final = "changed while it was checked"
_ReadFile = tuple[memoryview, Stat, Stat]
"""The content of a file, and its stat before and after it was read."""
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
    attributes: Attributes,
    progress: Callable[[int], None],
    check: Callable[[], None],
    in_use_ns: int | None = None,
) -> Comparison:
    """Compare what is on the disk with ``entries``; with ``full``, read and hash every file.

    ``attributes`` know what this machine and the targets cannot hold, which is no difference,
    because the restore has warned of it. ``check`` may raise RunCancelled. ``in_use_ns``: since
    then programs may make names, which moves the times of directories.
    """
    result = Comparison(len(entries))
    is_coarse = any(able.step_ns >= 10**9 for able in attributes.abilities)
    # let new files settle, so that their signatures can be trusted
    time.sleep((RACY_COARSE_NS if is_coarse else RACY_NS) / 1e9)
    what = described(entries)
    with _opened(targets) as places:
        links = [entries[number] for number in what.of_kind(HARDLINK)]
        differs = partial(
            _differs,
            targets=targets,
            inodes=_inodes_of_linked(links, places),
            attributes=attributes,
            in_use_ns=in_use_ns,
        )
        apart = _files_apart(links, entries, attributes)
        looked_at = [n for n, kind in enumerate(what.kinds) if not (full and kind == FILE)]
        for some in _runs_of(entries, looked_at):
            check()
            before = time.time_ns()
            stats = _looked(places, [entry for _, entry in some])
            after = time.time_ns()
            for (number, entry), st in zip(some, stats, strict=True):
                file = apart.get((entry.root, entry.path))
                if file is not None:  # it has no signature: the next snapshot looks at it again
                    content = (
                        ""
                        if st.error or not full
                        else _compare_file(file, chunks, targets, seal)[0]
                    )
                    wrongs = [words for words in (differs(file, st)[1], content) if words]
                    result.found += [(number, words) for words in wrongs if words]
                    continue
                moved, wrong = differs(entry, st)
                signature = Signature.among(st)
                if wrong:
                    result.found.append((number, wrong))
                elif not moved and settled(signature, before, after):
                    result.signatures[number] = signature
        if full:
            files = _Files(entries, chunks, targets, places, seal, differs)
            done = 0
            with ThreadPoolExecutor(_THREADS) as threads:
                for compared in threads.map(partial(files.compare, check), _batches(what)):
                    for number, wrongs, signature_now in compared:
                        done += what.sizes[number]
                        result.found += [(number, wrong) for wrong in wrongs]
                        result.signatures[number] = signature_now
                    progress(done)
    result.found.sort(key=lambda found: found[0])
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


def _inodes_of_linked(
    links: Sequence[Entry], places: Sequence[int | OSError]
) -> dict[tuple[int, bytes], int]:
    """The inode of each file that exists and has other names, by root and path."""
    inodes = {}
    for link in links:
        if (link.root, link.target) not in inodes:
            (st,) = _looked(places, [replace(link, path=link.target)])
            inodes[link.root, link.target] = st.inode
    return inodes


def _files_apart(
    links: Sequence[Entry], entries: Sequence[Entry], attributes: Attributes
) -> dict[tuple[int, bytes], Entry]:
    """What each hard link must be that is a separate file on this machine, by root and path."""
    apart = [link for link in links if (link.root, link.path) in attributes.apart]
    targets = {(link.root, link.target) for link in apart}
    files = {(e.root, e.path): e for e in entries if (e.root, e.path) in targets} if apart else {}
    return {
        (link.root, link.path): replace(files[link.root, link.target], path=link.path)
        for link in apart
        if (link.root, link.target) in files
    }


def _runs_of(entries: Sequence[Entry], numbers: Sequence[int]) -> Iterator[list[tuple[int, Entry]]]:
    """These entries, each with its number, in lists of neighbours in one root."""
    numbered = ((number, entries[number]) for number in numbers)
    for _, group in groupby(numbered, lambda numbered: numbered[1].root):
        while run := list(islice(group, _NAMES)):
            yield run


def _differs(
    entry: Entry,
    st: Stat,
    targets: Sequence[bytes],
    inodes: dict[tuple[int, bytes], int],
    attributes: Attributes,
    in_use_ns: int | None,
) -> tuple[bool, str]:
    """Whether the time of a directory in use has changed, which is no fault; and how a name
    differs."""
    if st.error:
        return False, f"{_shown(entry, targets)}: {os.strerror(st.error)}"
    before = attributes.unchanged.get((entry.root, entry.path))
    if before is not None and before == Signature.among(st):
        return False, ""  # as far as this machine can hold the time
    wrong = []
    moved = False
    if _KINDS.get(stat.S_IFMT(st.mode)) != (FILE if entry.kind == HARDLINK else entry.kind):
        return False, f"{_shown(entry, targets)}: is of another kind"
    able = attributes.able(entry.root)
    if entry.kind == HARDLINK:
        if inodes.get((entry.root, entry.target)) != st.inode:
            wrong.append("is not the same file as its hard link")
    else:
        if entry.kind == FILE and st.size != entry.size:
            wrong.append(f"has {st.size} bytes, not {entry.size}")
        if entry.kind == SYMLINK and _leads(_full(entry, targets)) != entry.target:
            wrong.append("points elsewhere")
        mode = stat.S_IMODE(st.mode)
        if entry.kind != SYMLINK and able.modes and mode != entry.mode:
            wrong.append(f"has mode {mode:o}, not {entry.mode:o}")
        owner = (entry.uid, entry.gid)
        if attributes.restores_owner(entry) and (st.uid, st.gid) != owner:
            wrong.append(f"belongs to {st.uid}:{st.gid}, not {entry.uid}:{entry.gid}")
        if st.mtime_ns not in (entry.mtime_ns, able.held_ns(entry.mtime_ns)):
            moved = entry.kind == DIRECTORY and in_use_ns is not None and st.mtime_ns >= in_use_ns
            if not moved:
                wrong.append(f"has mtime {st.mtime_ns}, not {entry.mtime_ns}")
        wrong += _wrong_xattrs(entry, targets, attributes)
    return moved, f"{_shown(entry, targets)}: {'; '.join(wrong)}" if wrong else ""


def _wrong_xattrs(entry: Entry, targets: Sequence[bytes], attributes: Attributes) -> list[str]:
    """How extended attributes differ: missing ones, and extra ones, such as an ACL that the
    directory hands down."""
    full = _full(entry, targets)
    try:
        if not entry.xattrs:
            return _more_xattrs(map(os.fsencode, os.listxattr(full, follow_symlinks=False)))
        there = read_xattrs(full)
    except OSError as exc:
        if not entry.xattrs and exc.errno in (errno.ENOTSUP, errno.ENAMETOOLONG):
            return []
        return [f"has extended attributes that cannot be read: {exc.strerror}"]
    wrong = []
    lacking = [name for name, _ in {*entry.xattrs} - {*there}]
    if any((entry.root, entry.path, name) not in attributes.refused_xattrs for name in lacking):
        wrong.append("lacks extended attributes")
    wanted = {name for name, _ in entry.xattrs}
    return wrong + _more_xattrs(name for name, _ in there if name not in wanted)


def _more_xattrs(others: Iterable[bytes]) -> list[str]:
    more = [os.fsdecode(name) for name in others if widens(name)]
    return [f"has extended attributes that the snapshot has not: {', '.join(more)}"] if more else []


def _leads(link: bytes) -> bytes | None:
    """The target of a symlink; None if it is gone meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def _full(entry: Entry, targets: Sequence[bytes]) -> bytes:
    return os.path.join(targets[entry.root], entry.path)


def _shown(entry: Entry, targets: Sequence[bytes]) -> str:
    return os.fsdecode(_full(entry, targets))


class _Files:
    """Compares files with what was restored: attributes and every byte."""

    def __init__(
        self,
        entries: Sequence[Entry],
        chunks: Sequence[Chunk],
        targets: Sequence[bytes],
        places: Sequence[int | OSError],
        seal: Seal,
        differs: Callable[[Entry, Stat], tuple[bool, str]],
    ) -> None:
        self._entries = entries
        self._chunks = chunks
        self._targets = targets
        self._places = places
        self._seal = seal
        self._differs = differs
        self._memories = threading.local()
        # more threads would take the interpreter's lock from each other for each small file
        self._hashing = threading.Semaphore(len(os.sched_getaffinity(0)))

    def compare(
        self, check: Callable[[], None], batch: Sequence[int]
    ) -> list[tuple[int, list[str], Signature | None]]:
        """The number of each file, how it differs, and the signature of a correct one if a later
        change would be seen."""
        check()
        found = []
        for run in _runs_of(self._entries, batch):
            place = self._places[run[0][1].root]
            for small, group in groupby(run, lambda numbered: _is_small(numbered[1])):
                some, looked = [*group], time.time_ns()
                reads: Iterable[_ReadFile | None] = [None] * len(some)
                if small and not isinstance(place, OSError):
                    paths, sizes = zip(*((file.path, file.size) for _, file in some), strict=True)
                    reads = [*read_files(place, paths, sizes, self._memory)]
                alone = []
                with self._hashing:
                    for (number, file), read in zip(some, reads, strict=True):
                        if read is None:
                            alone.append((number, file))
                        else:
                            found.append((number, *self._look(file, read, looked)))
                found += [(number, *self._look_alone(file)) for number, file in alone]
        return found

    def _memory(self, size: int) -> memoryview:
        """The memory of the calling thread."""
        memory: ReusedMemory | None = getattr(self._memories, "memory", None)
        if memory is None:
            memory = self._memories.memory = ReusedMemory()
        return memory(size)

    def _look(
        self, file: Entry, read: _ReadFile, looked_ns: int
    ) -> tuple[list[str], Signature | None]:
        data, before, after = read
        _, wrong = self._differs(file, before)
        wrongs = [wrong] if wrong else []
        if before[:4] != after[:4]:
            wrongs.append(f"{_shown(file, self._targets)}: {_CHANGED}")
        elif file.size and self._seal.digest(data) != file.digest:
            wrongs.append(f"{_shown(file, self._targets)}: content differs at 0 or after")
        signature = Signature.among(after)
        safe = not wrongs and settled(signature, looked_ns, time.time_ns())
        return wrongs, signature if safe else None

    def _look_alone(self, file: Entry) -> tuple[list[str], Signature | None]:
        (st,) = _looked(self._places, [file])
        _, wrong = self._differs(file, st)
        if st.error:
            return [wrong], None
        content, signature = _compare_file(file, self._chunks, self._targets, self._seal)
        wrongs = [words for words in (wrong, content) if words]
        return wrongs, None if wrongs else signature


def _is_small(entry: Entry) -> bool:
    """Whether the file is read at once and has one digest. A manifest may claim any size."""
    return entry.size <= BIG_FILE_BYTES and bool(entry.digest or not entry.size)


def _batches(what: Described) -> Iterator[Sequence[int]]:
    """The files, in batches to read together."""
    batch = array("L")
    size = 0
    for number in what.of_kind(FILE):
        batch.append(number)
        size += what.sizes[number]
        if len(batch) == _BATCH or size > _PIECE_BYTES:
            yield batch
            batch, size = array("L"), 0
    if batch:
        yield batch


def _compare_file(
    entry: Entry, chunks: Sequence[Chunk], targets: Sequence[bytes], seal: Seal
) -> tuple[str, Signature | None]:
    """How the content differs; and the signature, if a later change would be seen."""
    shown = _shown(entry, targets)
    looked = time.time_ns()
    try:
        with opened(_full(entry, targets)) as fd:
            seen = Signature.of(os.fstat(fd))
            right = right_extents(fd, entry, chunks, seal)
            now = Signature.of(os.fstat(fd))
    except OSError as exc:
        return f"{shown}: {exc.strerror}", None
    if now != seen:
        return f"{shown}: {_CHANGED}", None
    at = 0
    for number, extent in enumerate(entry.extents):
        if number not in right:
            return f"{shown}: content differs at {at} or after", None
        at += extent.length
    return "", seen if settled(seen, looked) else None
