"""What a reader refuses: every claim of a manifest is checked before anything trusts it.

The rules M of docs/format.md, "The claims".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.errors import InvalidInput, ManifestInvalid
from torpor.shared.format.keys import SEAL_BYTES
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    HOLE,
    MAX_CHUNK_BYTES,
    SYMLINK,
    Chunk,
    Entries,
    Entry,
    Manifest,
    Pack,
    Skipped,
)
from torpor.shared.format.rows import NotPlain
from torpor.shared.values import snapshot_id, workspace_name

MAX_NAME_BYTES = 255  # the limit of ext4, xfs and overlayfs
# far above PATH_MAX: a restore opens paths component by component, with dir_fds
MAX_PATH_BYTES = 1 << 16
MAX_FILE_BYTES = 1 << 50
MAX_OWNER = (1 << 32) - 2  # one more is -1, which means "leave it" to chown
MAX_TARGET_BYTES = 4095  # Linux: PATH_MAX without the final zero byte
MAX_XATTR_BYTES = 1 << 16  # the limit of Linux for one value
_NO_NAMES = frozenset((b"", b".", b".."))
_AT_ONCE = 4096  # entries that one call checks
MAX_CREATED_UNIX = 253_402_300_799  # the end of the year 9999


def check_manifest(manifest: Manifest, what: str) -> None:
    """Raise ManifestInvalid, naming ``what`` and the claim, unless every claim holds."""
    try:
        _check_names(manifest)
        _check_packs(manifest.packs)
        _check_chunks(manifest.chunks, manifest.packs)
        _check_entries(manifest)
        for skipped in manifest.skipped:
            _check_skipped(skipped, len(manifest.roots))
    except _Refused as refused:
        raise ManifestInvalid(f"{what} is refused: {refused}; nothing was written") from None


class _Refused(Exception):
    pass


def _check_names(manifest: Manifest) -> None:
    try:
        workspace_name(manifest.workspace)
        snapshot_id(manifest.snapshot)
        if manifest.parent is not None:
            snapshot_id(manifest.parent)
    except InvalidInput as exc:
        raise _Refused(str(exc)) from None
    if not 0 <= manifest.created_unix <= MAX_CREATED_UNIX:
        raise _Refused(f"it was created at {manifest.created_unix}, which is no time")


def _check_packs(packs: Sequence[Pack]) -> None:
    ids = set()
    for pack in packs:
        if len(pack.id) != 16 or len(pack.md5) != 16 or pack.size < 0:
            raise _Refused(f"pack {pack.id.hex()} is malformed")
        if pack.id in ids:
            raise _Refused(f"pack {pack.id.hex()} stands twice")
        ids.add(pack.id)


def _check_chunks(chunks: Sequence[Chunk], packs: Sequence[Pack]) -> None:
    names = set()
    for chunk in chunks:
        if chunk.name in names:
            raise _Refused(f"chunk {chunk.name.hex()} stands twice")
        names.add(chunk.name)
        if len(chunk.name) != 32 or not 0 < chunk.plain <= MAX_CHUNK_BYTES:
            raise _Refused(f"chunk {chunk.name.hex()} claims {chunk.plain} bytes")
        if chunk.encoding not in ENCODINGS:
            raise _Refused(f"chunk {chunk.name.hex()} has unknown encoding {chunk.encoding}")
        if not 0 <= chunk.pack < len(packs):
            raise _Refused(f"chunk {chunk.name.hex()} is in pack {chunk.pack}, which is not there")
        end = chunk.offset + chunk.stored
        if chunk.offset < 0 or chunk.stored <= 0 or end > packs[chunk.pack].size:
            raise _Refused(f"chunk {chunk.name.hex()} lies outside its pack")
        if chunk.stored > chunk.plain + SEAL_BYTES:
            raise _Refused(
                f"chunk {chunk.name.hex()} of {chunk.plain} bytes is stored in {chunk.stored}"
            )
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].pack, chunks[i].offset))
    for before, after in pairwise(order):
        a, b = chunks[before], chunks[after]
        if a.pack == b.pack and a.offset + a.stored > b.offset:
            raise _Refused(f"chunks {a.name.hex()} and {b.name.hex()} overlap in their pack")


def _check_entries(manifest: Manifest) -> None:
    if not manifest.roots or len(set(manifest.roots)) != len(manifest.roots):
        raise _Refused(f"roots {manifest.roots} are empty or not distinct")
    if any(not root or "\0" in root for root in manifest.roots):
        raise _Refused(f"roots {manifest.roots} are not all paths")
    if not _is_plain(manifest):
        _check_each(manifest)


def _is_plain(manifest: Manifest) -> bool:
    """Whether the entry surely passes _check_each. True of all entries that torpor writes."""
    if not isinstance(manifest.entries, Entries):
        return False
    directories: list[set[bytes]] = [set() for _ in manifest.roots]
    complete: list[set[bytes]] = [set() for _ in manifest.roots]
    try:
        plain = array("I", (chunk.plain for chunk in manifest.chunks))
        linked = manifest.entries.check(plain, len(manifest.roots))
        for place in manifest.entries.listed():
            there, left = directories[place.root], complete[place.root]
            if not place.is_run:
                if not place.path and there:
                    return False
                there.add(place.path)
            elif place.path in left or place.path not in there:
                return False
            else:
                left.add(place.path)
    except NotPlain:
        return False
    if not all(b"" in there for there in directories):
        return False
    if linked:
        _check_links(manifest.entries)
    return True


def _check_each(manifest: Manifest) -> None:
    places = [_Places() for _ in manifest.roots]
    linked = False
    entries = iter(manifest.entries)
    while some := list(islice(entries, _AT_ONCE)):
        plain = _are_plain([entry.path for entry in some])
        for entry in some:
            if not 0 <= entry.root < len(places):
                raise _Refused(f"{entry.path!r} is under root {entry.root}, which is not there")
            places[entry.root].enter(entry, plain)
            linked = linked or entry.kind == HARDLINK
            if not 0 <= entry.mode <= 0o7777:
                raise _Refused(f"{entry.path!r} has mode {entry.mode:o}")
            if not (0 <= entry.uid <= MAX_OWNER and 0 <= entry.gid <= MAX_OWNER):
                raise _Refused(f"{entry.path!r} belongs to {entry.uid}:{entry.gid}")
            if entry.xattrs:
                _check_xattrs(entry)
            if entry.kind == FILE:
                _check_content(entry, manifest.chunks)
            elif entry.extents or entry.size or entry.digest:
                raise _Refused(f"{entry.path!r} is no file and has content")
    for root, place in enumerate(places):
        if b"" not in place.directories:
            raise _Refused(f"root {manifest.roots[root]!r} has no directory entry of its own")
    if not all(place.in_order for place in places):
        _check_distinct(manifest.entries)
    if linked:
        _check_links(manifest.entries)


class _Places:
    """The names of one root in the order in which they are read: where torpor wrote them, directory
    by directory, sorted."""

    def __init__(self) -> None:
        self.directories: set[bytes] = set()
        self.in_order = True  # while names are in order, no name can occur twice
        self._directory: bytes | None = None  # the directory of the last name
        self._name = b""
        self._left: set[bytes | None] = set()

    def enter(self, entry: Entry, plain: bool) -> None:
        path, kind = entry.path, entry.kind
        if path == b"":
            if b"" in self.directories:
                raise _Refused(f"{path!r} stands twice")
            if kind != DIRECTORY:
                raise _Refused("a root is not a directory")
            if entry.target:
                raise _Refused("a root has a target")
            self.directories.add(path)
            return
        parent, _, name = path.rpartition(b"/")
        if not plain:
            _check_path(path, (name,))
        if parent != self._directory:
            # the parent has passed this check as an entry, so its components are checked
            if parent not in self.directories:
                raise _Refused(
                    f"{path!r} stands before its directory, or in something that is none"
                )
            self._left.add(self._directory)
            self.in_order = self.in_order and parent not in self._left
            self._directory = parent
        elif name <= self._name:
            self.in_order = False
        self._name = name
        if kind in (FILE, DIRECTORY):
            if entry.target:
                raise _Refused(f"{path!r} is no link and has a target")
            if kind == DIRECTORY:
                self.directories.add(path)
        elif kind == SYMLINK:
            if not entry.target or b"\0" in entry.target or len(entry.target) > MAX_TARGET_BYTES:
                raise _Refused(f"{path!r} is a symlink without a usable target")
        elif kind != HARDLINK:
            raise _Refused(f"{path!r} is of unknown kind {kind}")


def _check_distinct(entries: Sequence[Entry]) -> None:
    seen: set[tuple[int, bytes]] = set()
    for entry in entries:
        if (entry.root, entry.path) in seen:
            raise _Refused(f"{entry.path!r} stands twice")
        seen.add((entry.root, entry.path))


def _check_links(entries: Sequence[Entry]) -> None:
    targets = {(entry.root, entry.target) for entry in entries if entry.kind == HARDLINK}
    files: set[tuple[int, bytes]] = set()
    for entry in entries:
        if entry.kind == FILE and (entry.root, entry.path) in targets:
            files.add((entry.root, entry.path))
        elif entry.kind == HARDLINK and (entry.root, entry.target) not in files:
            raise _Refused(
                f"{entry.path!r} is a hard link to {entry.target!r}, which is no file before"
            )


def _are_plain(paths: Sequence[bytes]) -> bool:
    """Whether all of these paths surely pass ``_check_path``. Called with thousands of paths at
    once; each path is checked alone only where this returns False."""
    joined = b"/\0/".join([b"", *paths, b""])  # each path now has a slash on both sides
    return (
        max(map(len, paths), default=0) <= MAX_NAME_BYTES
        and joined.count(b"\0") == len(paths) + 1
        and joined.count(b"//") == paths.count(b"")  # only the roots have empty paths
        and not any(name in joined for name in (b"/./", b"/../"))
    )


def _check_path(path: bytes, names: Iterable[bytes]) -> None:
    """``names`` are the components of ``path`` that have not been checked yet."""
    if len(path) > MAX_PATH_BYTES or b"\0" in path:
        raise _Refused(f"{path[:80]!r}... is not a path")
    if path.startswith(b"/"):
        raise _Refused(f"{path!r} is absolute")
    for name in names:
        if name in _NO_NAMES or len(name) > MAX_NAME_BYTES:
            raise _Refused(f"{path!r} would lead outside its root or is not a name")


def _check_skipped(skipped: Skipped, roots: int) -> None:
    if not 0 <= skipped.root < roots:
        raise _Refused(f"skipped {skipped.path!r} is under root {skipped.root}, which is not there")
    _check_path(skipped.path, skipped.path.split(b"/"))


def _check_xattrs(entry: Entry) -> None:
    for name, value in entry.xattrs:
        if not 0 < len(name) <= MAX_NAME_BYTES or b"\0" in name or len(value) > MAX_XATTR_BYTES:
            raise _Refused(
                f"{entry.path!r} has an extended attribute {name[:80]!r} of {len(value)} bytes"
            )
    if len({name for name, _ in entry.xattrs}) != len(entry.xattrs):
        raise _Refused(f"{entry.path!r} has an extended attribute twice")


def _check_content(entry: Entry, chunks: Sequence[Chunk]) -> None:
    if not 0 <= entry.size <= MAX_FILE_BYTES:
        raise _Refused(f"{entry.path!r} claims {entry.size} bytes")
    if entry.digest and len(entry.digest) != 16:
        raise _Refused(f"{entry.path!r} has a malformed digest")
    total = 0
    for extent in entry.extents:
        if extent.length <= 0:
            raise _Refused(f"{entry.path!r} has an extent of {extent.length} bytes")
        total += extent.length
        if extent.chunk == HOLE:
            if extent.offset != 0:
                raise _Refused(f"{entry.path!r} has a hole with an offset")
            continue
        if not 0 <= extent.chunk < len(chunks):
            raise _Refused(f"{entry.path!r} names chunk {extent.chunk}, which is not there")
        chunk_bytes = chunks[extent.chunk].plain
        if extent.offset < 0 or extent.offset + extent.length > chunk_bytes:
            raise _Refused(f"{entry.path!r} has an extent outside its chunk")
        if extent.length != chunk_bytes and not entry.digest:
            raise _Refused(f"{entry.path!r} uses a part of a chunk and carries no digest")
    if total != entry.size:
        raise _Refused(f"{entry.path!r} claims {entry.size} bytes, its extents have {total}")
