"""Walks the roots of a workspace and finds what is new since it was last held."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Final, NamedTuple

from torpor.machine.tree.absence import GONE
from torpor.machine.tree.batch import (
    IS_DIRECTORY,
    IS_READ,
    IS_UNKNOWN,
    Looked,
    Stat,
    look_at,
    packed_signature,
)
from torpor.machine.tree.mappings import file_systems, mapped_unseen, sync_disk
from torpor.machine.tree.names import HELD, READ, SURE, Names, Signature, UnreadFiles
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry, Skipped

RACY_NS: Final = 100_000_000
"""Nanoseconds. A file that was touched less than 0.1 s before it was looked at may be touched again
unseen, within the same tick of the file system's clock (4-10 ms on Linux), so it is read again in
the next pass."""
RACY_COARSE_NS: Final = 2_100_000_000
"""Nanoseconds that a file's time must be old where times have no fraction of a second (FAT: 2 s,
some network file systems: 1 s)."""


_ORDINARY: Final = bytes((0, IS_DIRECTORY, IS_READ))
_MARKS: Final = bytes(HELD | SURE | (READ if kind & IS_READ else 0) for kind in range(256))
_NAMED: Final = 10
_MOST_PATH: Final = 4096  # PATH_MAX of Linux, with the zero byte at the end
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Walk(NamedTuple):
    """One walk of all roots, in the order in which entries stand in a manifest."""

    names: Names
    unread: UnreadFiles  # files whose content must be read
    skipped: list[Skipped]
    started_ns: int
    walked_ns: int  # when the walk ended; the disks are synced after that, and then files are read
    parted: list[tuple[int, bytes]]
    """Root and path of names whose file has a name in an earlier root too: a manifest has no hard
    links between roots, so they come back as files of their own."""
    fresh: array[int]  # positions of the names that differ from what was held


def settled(signature: Signature, looked_ns: int, done_ns: int | None = None) -> bool:
    """Whether a change after ``looked_ns`` (wall clock) is sure to change ``signature``, which was
    taken between then and ``done_ns``.

    Times in the future are settled: a write now would set them to now.
    """
    coarse = signature.mtime_ns % 10**9 == 0 and signature.ctime_ns % 10**9 == 0
    margin = RACY_COARSE_NS if coarse else RACY_NS
    # only ctime decides: it changes with every change, while a program can set mtime to any value
    later = (looked_ns if done_ns is None else done_ns) + margin
    return not looked_ns - margin <= signature.ctime_ns <= later


def resolve_roots(
    roots: Sequence[str], new: Collection[bytes] = (), *, not_empty: str = "it may have had files"
) -> list[bytes]:
    """Absolute paths of a workspace's directories on this machine; WorkspaceInvalid if unfit.
    ``new``: directories that torpor made empty, some of which may still be empty. ``not_empty``:
    why not all of them may be empty; empty text where no file of the workspace can be missing."""
    resolved = [os.path.realpath(os.fsencode(absolute_root(root))) for root in roots]
    empty = [_is_empty(root, path) for root, path in zip(roots, resolved, strict=True)]
    for root, path, nothing in zip(roots, resolved, empty, strict=True):
        if nothing and (path not in new or (all(empty) and not_empty)):
            raise WorkspaceInvalid(
                f"workspace path {root} ({os.fsdecode(path)}) is empty: there is nothing to keep; "
                f"{_where_work_is(resolved)}check the path in the workspace block, take it out of "
                "`paths`, or put a file there. Where a disk belongs there, mount it first."
                f"{_why_kept(not_empty) if all(empty) else ''}"
            )
    if pair := overlapping(resolved):
        raise WorkspaceInvalid(
            f"workspace paths {pair} overlap: name only the outer one, and a directory only once"
        )
    return resolved


def hold_nothing(roots: Sequence[bytes]) -> bool:
    """Whether these directories contain no name at all, not even an excluded one. False where that
    cannot be seen."""
    try:
        return all(not os.listdir(root) for root in roots)
    except OSError:
        return False


def _why_kept(not_empty: str) -> str:
    return (
        " A workspace without files is stored only from a machine that nobody has used, and "
        f"{not_empty}"
        if not_empty
        else ""
    )


def overlapping(paths: Sequence[bytes]) -> str:
    """Two of these real paths of which one contains the other: ``A and B``; empty without any."""
    for first, second in itertools.combinations(paths, 2):
        if is_inside(first, [second]) or is_inside(second, [first]):
            return f"{os.fsdecode(first)} and {os.fsdecode(second)}"
    return ""


def is_inside(path: bytes, places: Sequence[bytes]) -> bool:
    """Whether a real path is one of these, or below one of them."""
    return os.path.join(path, b"").startswith(tuple(os.path.join(place, b"") for place in places))


def absolute_root(root: str) -> str:
    """The absolute path of a root. ``~`` and relative paths start at the home of the user that
    torpor logs in as."""
    return os.path.join(os.path.expanduser("~"), os.path.expanduser(root))


def _where_work_is(roots: Sequence[bytes]) -> str:
    """The beginning of an advice: what the home holds that may belong into the workspace."""
    home = os.fsencode(os.path.expanduser("~"))
    try:
        names = sorted(name for name in os.listdir(home) if not name.startswith(b"."))
    except OSError:
        return ""
    others = [name for name in names if not is_inside(os.path.join(home, name), roots)]
    if not others:
        return ""
    shown = ", ".join(os.fsdecode(name) for name in others[:_NAMED])
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return f"the home has {shown}{more}: move your work into the workspace, or "


def _is_empty(root: str, path: bytes) -> bool:
    shown = os.fsdecode(path)
    if path in (b"/", os.fsencode(os.path.expanduser("~"))):
        raise WorkspaceInvalid(f"workspace path {root} is {shown}: name a directory inside it")
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise WorkspaceInvalid(
                f"workspace path {root} ({shown}) is a file, not a directory: name its directory"
            )
        with os.scandir(path) as names:
            return next(names, None) is None
    except FileNotFoundError:
        raise WorkspaceInvalid(
            f"workspace path {root} ({shown}) does not exist on the machine: check the path in "
            "the workspace block"
        ) from None
    except PermissionError as exc:
        raise WorkspaceInvalid(
            f"workspace path {root} ({shown}) cannot be read: {exc.strerror}; log in as its "
            "owner or as root"
        ) from None


def compile_excludes(patterns: Sequence[str]) -> Callable[[bytes], bool] | None:
    """A test of relative paths. A pattern with a slash is matched against the whole path,
    one without against the last name; ``*`` also crosses slashes, as in fnmatch. A path or a name
    that is written as it is matches itself, whatever characters it has."""
    whole = [fnmatch.translate(p.strip("/")) for p in patterns if "/" in p.strip("/")]
    name = [fnmatch.translate(p.strip("/")) for p in patterns if "/" not in p.strip("/")]
    if not whole and not name:
        return None
    match_whole = re.compile("|".join(whole)).match if whole else None
    match_name = re.compile("|".join(name)).match if name else None
    written = {p.strip("/") for p in patterns if "[" in p}

    def excluded(path: bytes) -> bool:
        text = os.fsdecode(path)
        last = text.rsplit("/", 1)[-1]
        return bool(
            (match_whole and match_whole(text))
            or (match_name and match_name(last))
            or (written and (text in written or last in written))
        )

    return excluded


def walk(
    roots: Sequence[bytes],
    held: Names,
    excluded: Callable[[bytes], bool] | None,
    check: Callable[[], None],
) -> Walk:
    """Look at every name below ``roots``; what has its held signature is taken as held.

    ``check`` is called once a directory and may raise RunCancelled. Raises WorkspaceInvalid when
    something cannot be looked at: leaving it out silently would lose it.
    """
    places = [place for root in roots for place in file_systems(root, excluded)]
    mapped = mapped_unseen(places)
    started_ns = time.time_ns()
    held = held.settled()
    names = Names(len(roots))
    found = Walk(names, UnreadFiles(names, held), [], started_ns, started_ns, [], array("Q"))
    linked: set[tuple[int, int]] = set()
    for number, root in enumerate(roots):
        look = _Look(number, root, held, found, excluded, mapped, linked)
        look.walk(check)
        linked |= look.links.keys()
    found = found._replace(walked_ns=time.time_ns())
    _distrust(found)
    if found.unread:
        for place in places:
            sync_disk(place)
    return found


def _distrust(found: Walk) -> None:
    """Mark the signatures of files that may change again without changing their signature."""
    names = found.names
    surely_settled_ns = found.started_ns - RACY_COARSE_NS
    for position in found.fresh:
        if names.changed_ns(position) < surely_settled_ns:
            continue  # true of nearly every name
        if not settled(names.seen(position), found.started_ns, found.walked_ns):
            names.distrust(position)


class _Look:
    """The walk of one root. ``linked``: the files that have several names in earlier roots."""

    def __init__(
        self,
        number: int,
        root: bytes,
        held: Names,
        found: Walk,
        excluded: Callable[[bytes], bool] | None,
        mapped: Mapping[tuple[int, int] | bytes, str],
        linked: Set[tuple[int, int]],
    ) -> None:
        self.links: dict[tuple[int, int], bytes] = {}
        self._number = number
        self._root = root
        self._within = os.path.join(root, b"")
        self._held = held
        self._found = found
        self._names = found.names
        self._excluded = excluded
        self._mapped = mapped
        self._linked = linked

    def walk(self, check: Callable[[], None]) -> None:
        self._names.begin(self._number)
        self._note(b"", Stat.of(os.stat(self._root)), self._held.top(self._number))
        pending = [b""]
        while pending:
            directory = pending.pop()
            check()
            prefix = directory + b"/" if directory else b""
            pending.extend(prefix + name for name in reversed(self._directory(directory, prefix)))

    def _directory(self, directory: bytes, prefix: bytes) -> list[bytes]:
        """Add the names in a directory; returns those that are directories to go into."""
        names, looked = listing(os.path.join(self._root, directory), self._left_out(prefix))
        run = self._held.run(self._number, directory)
        joined = b"\0".join(names)
        if (
            run is not None
            and run.names == joined
            and not self._mapped
            and not looked.kinds.translate(None, _ORDINARY)
            and self._held.is_known(run.first, looked.signatures)
        ):
            self._names.take(self._held, run.first, looked.kinds.translate(_MARKS))
            self._names.end_run(self._number, directory, names)
            return [
                name for name, kind in zip(names, looked.kinds, strict=True) if kind & IS_DIRECTORY
            ]
        known = {} if run is None else self._held.positions(run)
        added, below = [], []
        for name, st in zip(names, looked.stats, strict=True):
            before = len(self._names)
            try:
                if self._note(prefix + name, st, known.get(name, -1)):
                    below.append(name)
            except GONE:
                continue  # gone since it was listed
            if len(self._names) > before:
                added.append(name)
        self._names.end_run(self._number, directory, added)
        return below

    def _left_out(self, prefix: bytes) -> Callable[[bytes], bool] | None:
        excluded = self._excluded
        return None if excluded is None else lambda name: excluded(prefix + name)

    def _note(self, path: bytes, st: Stat, known: int) -> bool:
        """Add one name, which has the position ``known`` among those that are held, or -1. True
        when it is a directory to go into."""
        inode, size, _, _, device, mode, nlink, _, _, blocks, _, _ = st
        is_directory = stat.S_ISDIR(mode)
        first = path
        if nlink > 1 and stat.S_ISREG(mode):
            first = self.links.setdefault((device, inode), path)
            if (device, inode) in self._linked:
                self._found.parted.append((self._number, path))
        marks = HELD | SURE | (READ if st.is_read else 0)
        process = ""
        if self._mapped:
            process = self._mapped.get((device, inode)) or self._mapped.get(self._within + path, "")
        signature = packed_signature(*st[:4])
        if (
            known >= 0
            and self._held.is_known(known, signature)
            and not process
            and (is_directory or nlink == 1 or _names(self._held.entry(known), first))
        ):
            self._names.take(self._held, known, bytes([marks]))
            return is_directory
        new = _new_entry(self._number, path, self._within + path, st, first)
        if isinstance(new, Skipped):
            self._found.skipped.append(new)
            return False
        position = len(self._names)
        if new.kind == FILE:
            marks &= ~HELD
            self._found.unread.add(position, sparse=blocks * 512 < size, mapped=process)
        self._found.fresh.append(position)
        try:
            self._names.add(new, signature, marks & ~SURE if process else marks)
        except OverflowError:  # nanoseconds in 64 bits; some file systems have more
            raise WorkspaceInvalid(
                f"{os.fsdecode(self._within + path)} was last written before 1677 or after 2554, by"
                " its time, which no snapshot can hold: set another one (touch), or exclude it in "
                "the workspace block"
            ) from None
        return is_directory


def _names(entry: Entry, first: bytes) -> bool:
    """Whether the names of a file with several names still share it as ``entry`` says."""
    return entry.target == (b"" if first == entry.path else first)


def _new_entry(number: int, path: bytes, full: bytes, st: Stat, first: bytes) -> Entry | Skipped:
    mode = st.mode
    target = b""
    if stat.S_ISDIR(mode):
        kind = DIRECTORY
    elif stat.S_ISLNK(mode):
        kind, target = SYMLINK, _leads(full)
    elif not stat.S_ISREG(mode):
        return Skipped(number, path, _kind_name(mode))
    elif first != path:
        kind, target = HARDLINK, first
    else:
        kind = FILE
    return Entry(
        kind,
        number,
        path,
        stat.S_IMODE(mode),
        st.uid,
        st.gid,
        st.mtime_ns,
        0,
        target=target,
        xattrs=_xattrs(full),
    )


def listing(
    directory: bytes, left_out: Callable[[bytes], bool] | None = None
) -> tuple[list[bytes], Looked]:
    """The names in a directory, sorted, without some, and what they are; none where it is gone."""
    try:
        place = os.open(directory, _DIRECTORY)
    except GONE:
        # gone or replaced since its parent was listed: a later pass sees it
        return [], Looked.of([])
    except OSError as exc:
        raise _unreadable(directory, exc.errno) from None
    try:
        # sorted as bytes, whatever the locale
        names = sorted(os.listdir(b"/proc/self/fd/%d" % place))
        if left_out is not None:
            names = [name for name in names if not left_out(name)]
        looked = look_at(place, names)
    except OSError as exc:
        raise _unreadable(directory, exc.errno) from None
    finally:
        os.close(place)
    longest = _MOST_PATH - len(directory) - 1
    name = max(names, key=len, default=b"")
    if len(name) >= longest:
        # nothing else can be asked by its path, such as its attributes
        raise _unreadable(os.path.join(directory, name), errno.ENAMETOOLONG)
    if IS_UNKNOWN not in looked.kinds:
        return names, looked
    there = []
    for name, st in zip(names, looked.stats, strict=True):
        if not st.error:
            there.append((name, st))
        elif st.error != errno.ENOENT:
            raise _unreadable(os.path.join(directory, name), st.error)
    return [name for name, _ in there], Looked.of([st for _, st in there])


def _unreadable(path: bytes, error: int | None) -> WorkspaceInvalid:
    return WorkspaceInvalid(
        f"{os.fsdecode(path)} cannot be read: {os.strerror(error or errno.EIO)}; log in as "
        "its owner or as root, or exclude it in the workspace block"
    )


def read_xattrs(of: bytes | int) -> tuple[tuple[bytes, bytes], ...]:
    """Every extended attribute of a name itself (not of what a symlink leads to), or of an open
    file, sorted. OSError where they are unknown, as for names of over 64 KiB together (E2BIG).

    The kernel shows trusted.* to root alone; to others it has none, or no value (ENODATA).
    """
    follow = isinstance(of, int)  # a descriptor is never a symlink to follow
    try:
        names = os.listxattr(of, follow_symlinks=follow)
    except OSError as exc:
        if exc.errno != errno.ENOTSUP:
            raise
        return ()  # this file system has no extended attributes
    pairs = []
    for name in sorted(names):
        try:
            value = os.getxattr(of, name, follow_symlinks=follow)
        except OSError as exc:
            if exc.errno != errno.ENODATA:
                raise
            continue  # the attribute is gone since it was listed
        pairs.append((os.fsencode(name), value))
    return tuple(pairs)


def _leads(link: bytes) -> bytes:
    try:
        return os.readlink(link)
    except GONE:
        raise
    except OSError as exc:
        if exc.errno == errno.EINVAL:  # it is no link any more: a later pass sees what it is
            raise FileNotFoundError(exc.errno, exc.strerror, link) from None
        raise _unreadable(link, exc.errno) from None


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    try:
        return read_xattrs(path)
    except GONE:
        raise
    except OSError as exc:
        raise WorkspaceInvalid(
            f"the extended attributes of {os.fsdecode(path)} cannot be read: {exc.strerror}; log in"
            " as its owner or as root, remove some, or exclude it in the workspace block"
        ) from None


def _kind_name(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "fifo"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "block device" if stat.S_ISBLK(mode) else "character device"
