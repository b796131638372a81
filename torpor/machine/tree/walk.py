"""Walk the roots of a workspace and find what is new since it was last held."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final, NamedTuple

import msgspec

from torpor.machine.tree.batch import Stat, stat_names
from torpor.machine.tree.mappings import file_systems, mapped_unseen, sync_disk
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.format.garbage import uncollected
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry, Skipped

RACY_NS: Final = 100_000_000
"""A file touched less than 0.1 s before it was looked at may be touched again within the same
tick of the file system's clock (4-10 ms on Linux), unseen: it is read again in the next pass."""
RACY_COARSE_NS: Final = 2_100_000_000
"""A file's time must be this old where times have no fraction of a second (FAT: 2 s, some network
file systems: 1 s)."""


_MOST_PATH: Final = 4096  # PATH_MAX of Linux, with the zero at the end
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Signature(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Values that change whenever a file does. The kernel sets ctime; no program can set it
    back.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result) -> Signature:
        return cls(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)

    @classmethod
    def among(cls, st: Stat) -> Signature:
        return cls(*st[:4])


class Held(msgspec.Struct, frozen=True, gc=False):
    """What is known about a path: its entry, and the signature it had then."""

    signature: Signature | None  # None: always look again
    entry: Entry


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A regular file whose content must be read."""

    entry: Entry  # without content
    signature: Signature
    sparse: bool
    before: Entry | None = None  # what was held under its name
    mapped: str = ""  # the process that can change it without moving its times


class Walk(NamedTuple):
    """One walk of all roots, in the order in which entries stand in a manifest."""

    entries: list[Entry]  # an Unread's entry stands here without content
    signatures: list[Signature | None]
    unread: list[Unread]
    skipped: list[Skipped]
    held: list[dict[bytes, Held]]  # unchanged entries; an Unread joins after it was read
    started_ns: int
    walked_ns: int  # when it ended; the disks are synced after that, and then files are read
    parted: list[tuple[int, bytes]]
    """Root and path of names whose file has a name in an earlier root too: a manifest has no hard
    links between roots, so they come back as files of their own."""
    fresh: list[int]  # positions of the entries that are not as they were held
    read: set[tuple[int, bytes]]  # root and path of files that were read since their last change

    def rests(self, file: Unread) -> bool:
        """Whether any change after the walk is sure to change the signature of ``file``."""
        return not file.mapped and settled(file.signature, self.started_ns, self.walked_ns)


Holding = Sequence[dict[bytes, Held]]
"""For each root, what is held for each path."""


def settled(signature: Signature, looked_ns: int, done_ns: int | None = None) -> bool:
    """Whether a change after ``looked_ns`` (wall clock) is sure to change ``signature``, which was
    taken between then and ``done_ns``.

    Times in the future are settled: a write now would set them to now.
    """
    coarse = signature.mtime_ns % 10**9 == 0 and signature.ctime_ns % 10**9 == 0
    margin = RACY_COARSE_NS if coarse else RACY_NS
    # only ctime decides: it moves with every change, and mtime may be set to any value
    later = (looked_ns if done_ns is None else done_ns) + margin
    return not looked_ns - margin <= signature.ctime_ns <= later


def resolve_roots(roots: Sequence[str]) -> list[bytes]:
    """Absolute paths of a workspace's directories on this machine; WorkspaceInvalid if unfit."""
    resolved = [os.path.realpath(os.fsencode(absolute_root(root))) for root in roots]
    for root, path in zip(roots, resolved, strict=True):
        _check_root(root, path)
    if pair := overlapping(resolved):
        raise WorkspaceInvalid(f"workspace paths {pair} overlap: name only the outer one")
    return resolved


def overlapping(paths: Sequence[bytes]) -> str:
    """Two of these real paths of which one holds the other: ``A and B``; empty without any."""
    for first, second in itertools.combinations(paths, 2):
        if is_inside(first, [second]) or is_inside(second, [first]):
            return f"{os.fsdecode(first)} and {os.fsdecode(second)}"
    return ""


def is_inside(path: bytes, places: Sequence[bytes]) -> bool:
    """Whether a real path is one of these, or below one of them."""
    return os.path.join(path, b"").startswith(tuple(os.path.join(place, b"") for place in places))


def absolute_root(root: str) -> str:
    """``~`` and relative paths start at the home of the user that torpor logs in as."""
    return os.path.join(os.path.expanduser("~"), os.path.expanduser(root))


def _check_root(root: str, path: bytes) -> None:
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
            if next(names, None) is None:
                raise WorkspaceInvalid(
                    f"workspace path {root} ({shown}) is empty: there is nothing to keep; check "
                    "the path in the workspace block"
                )
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
    one without against the last name; ``*`` also crosses slashes, as in fnmatch."""
    whole = [fnmatch.translate(p.strip("/")) for p in patterns if "/" in p.strip("/")]
    name = [fnmatch.translate(p.strip("/")) for p in patterns if "/" not in p.strip("/")]
    if not whole and not name:
        return None
    match_whole = re.compile("|".join(whole)).match if whole else None
    match_name = re.compile("|".join(name)).match if name else None

    def excluded(path: bytes) -> bool:
        text = os.fsdecode(path)
        return bool(
            (match_whole and match_whole(text))
            or (match_name and match_name(text.rsplit("/", 1)[-1]))
        )

    return excluded


@uncollected()
def walk(
    roots: Sequence[bytes],
    held: Holding,
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
    found = Walk([], [], [], [], [{} for _ in roots], started_ns, started_ns, [], [], set())
    linked: set[tuple[int, int]] = set()
    for number, root in enumerate(roots):
        linked |= _walk_root(number, root, held[number], excluded, mapped, check, found, linked)
    found = found._replace(walked_ns=time.time_ns())
    _distrust(found)
    if found.unread:
        for place in places:
            sync_disk(place)
    return found


def _distrust(found: Walk) -> None:
    """Take the signature from what may change again without changing it."""
    for number in found.fresh:
        entry, signature = found.entries[number], found.signatures[number]
        if signature and not settled(signature, found.started_ns, found.walked_ns):
            found.signatures[number] = None
            if entry.kind != FILE:
                found.held[entry.root][entry.path] = Held(None, entry)


def _walk_root(
    number: int,
    root: bytes,
    held: dict[bytes, Held],
    excluded: Callable[[bytes], bool] | None,
    mapped: Mapping[tuple[int, int] | bytes, str],
    check: Callable[[], None],
    found: Walk,
    linked: Set[tuple[int, int]],
) -> Set[tuple[int, int]]:
    """Returns the files that have several names; ``linked``: those of the roots before."""
    links: dict[tuple[int, int], bytes] = {}
    entries, signatures, now_held = found.entries, found.signatures, found.held[number]
    within = os.path.join(root, b"")

    def note(path: bytes, st: Stat) -> bool:
        """Add one name; True when it is a directory to go into. 100,000 times a second."""
        inode, size, mtime_ns, ctime_ns, device, mode, nlink, _, _, blocks, atime_ns, _ = st
        is_directory = stat.S_ISDIR(mode)
        first = path
        if nlink > 1 and stat.S_ISREG(mode):
            first = links.setdefault((device, inode), path)
            if (device, inode) in linked:
                found.parted.append((number, path))
        if atime_ns > ctime_ns and is_read(st):
            found.read.add((number, path))
        known = held.get(path)
        process = ""
        if mapped:
            process = mapped.get((device, inode)) or mapped.get(within + path, "")
        signature = Signature(inode, size, mtime_ns, ctime_ns)
        if (
            known is not None
            and known.signature == signature
            and not process
            and (is_directory or nlink == 1 or _names(known.entry, first))
        ):
            entries.append(known.entry)
            signatures.append(known.signature)
            now_held[path] = known
            return is_directory
        new = _new_entry(number, path, within + path, st, first)
        if isinstance(new, Skipped):
            found.skipped.append(new)
            return False
        if new.kind == FILE:
            sparse = blocks * 512 < size
            before = None if known is None else known.entry
            found.unread.append(Unread(new, signature, sparse, before, process))
        else:
            now_held[path] = Held(signature, new)
        found.fresh.append(len(entries))
        entries.append(new)
        signatures.append(None if process else signature)
        return is_directory

    note(b"", Stat.of(os.stat(root)))
    pending = [b""]
    while pending:
        directory = pending.pop()
        check()
        prefix = directory + b"/" if directory else b""
        below = []
        for name, st in listing(os.path.join(root, directory)):
            path = prefix + name
            if excluded is not None and excluded(path):
                continue
            try:
                if note(path, st):
                    below.append(path)
            except FileNotFoundError:
                continue  # gone since it was listed
        pending.extend(reversed(below))
    return links.keys()


def _names(entry: Entry, first: bytes) -> bool:
    """Whether a file of several names still has the part in them that ``entry`` gives it."""
    return entry.target == (b"" if first == entry.path else first)


def _new_entry(number: int, path: bytes, full: bytes, st: Stat, first: bytes) -> Entry | Skipped:
    mode = st.mode
    target = b""
    if stat.S_ISDIR(mode):
        kind = DIRECTORY
    elif stat.S_ISLNK(mode):
        kind, target = SYMLINK, os.readlink(full)
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
        xattrs=read_xattrs(full),
    )


def is_read(st: Stat) -> bool:
    """Whether a file was read since it was last changed or restored. A restore sets the access time
    to the mtime, which may be in the future."""
    read_ns = st.atime_ns
    return st.ctime_ns < read_ns != st.mtime_ns and stat.S_ISREG(st.mode)


def listing(directory: bytes) -> list[tuple[bytes, Stat]]:
    """The names in a directory, sorted; none where it is gone."""
    try:
        place = os.open(directory, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return []  # gone or replaced since its parent was listed: the next pass sees it
    except OSError as exc:
        raise _unreadable(directory, exc.errno) from None
    try:
        names = sorted(os.listdir(b"/proc/self/fd/%d" % place))  # as they are, whatever the locale
        stats = stat_names(place, names)
    except OSError as exc:
        raise _unreadable(directory, exc.errno) from None
    finally:
        os.close(place)
    longest = _MOST_PATH - len(directory) - 1
    there = []
    for name, st in zip(names, stats, strict=True):
        if len(name) >= longest:  # by its path nothing else can be asked, such as its attributes
            raise _unreadable(directory, errno.ENAMETOOLONG)
        if not st.error:
            there.append((name, st))
        elif st.error != errno.ENOENT:
            raise _unreadable(directory, st.error)
    return there


def _unreadable(directory: bytes, error: int | None) -> WorkspaceInvalid:
    return WorkspaceInvalid(
        f"{os.fsdecode(directory)} cannot be read: {os.strerror(error or errno.EIO)}; log in as "
        "its owner or as root, or exclude it in the workspace block"
    )


def read_xattrs(of: bytes | int) -> tuple[tuple[bytes, bytes], ...]:
    """Every extended attribute of a name itself, or of an open file, sorted."""
    follow = isinstance(of, int)  # a descriptor is what it is
    try:
        names = os.listxattr(of, follow_symlinks=follow)
    except OSError:
        return ()  # ENOTSUP: this file system has none
    pairs = []
    for name in sorted(names):
        try:
            value = os.getxattr(of, name, follow_symlinks=follow)
        except OSError:
            continue  # gone since it was listed, or not readable by anyone (trusted.*)
        pairs.append((os.fsencode(name), value))
    return tuple(pairs)


def _kind_name(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "fifo"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "block device" if stat.S_ISBLK(mode) else "character device"
