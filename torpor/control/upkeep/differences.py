"""The contents of a snapshot, the differences between two, and searches. Pure: no I/O.

Content is compared by the names of chunks, never read. So a file shows as changed if two manifests
cut the same bytes at different places, or if one has a hole where the other has zeros.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, get_args

import msgspec

from torpor.control.reports import Row, exact_moment
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry, Manifest
from torpor.shared.format.missed import content_of
from torpor.shared.values import SnapshotId, WorkspaceName

Kind = Literal["file", "directory", "symlink", "hard link"]
Difference = Literal["added", "removed", "changed", "metadata"]

_KINDS: Final[dict[int, Kind]] = {
    FILE: "file",
    DIRECTORY: "directory",
    SYMLINK: "symlink",
    HARDLINK: "hard link",
}


class ListedEntry(msgspec.Struct, frozen=True):
    """One entry of a snapshot for display; ``path`` begins with the workspace's directory."""

    path: str
    kind: Kind
    bytes: int
    mode: str  # octal
    uid: int
    gid: int
    mtime_ns: int
    target: str  # of a symlink or hard link
    changed_while_read: bool

    def row(self) -> Row:
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": f"{self.bytes:,}",
            "mode": self.mode,
            "changed": exact_moment(self.mtime_ns / 1e9),
        }


class Change(msgspec.Struct, frozen=True):
    """One name that differs between two snapshots; ``what`` lists the differences."""

    path: str
    difference: Difference
    kind: Kind
    bytes_before: int
    bytes_after: int
    what: str

    def row(self) -> Row:
        return {
            "path": self.path,
            "difference": self.difference,
            "what": self.what,
            "bytes before": f"{self.bytes_before:,}",
            "bytes after": f"{self.bytes_after:,}",
        }


class SnapshotDiff(msgspec.Struct, frozen=True):
    """Two snapshots beside each other. ``new_bytes`` are plain bytes of chunks that only the
    later one names, ``new_stored_bytes`` what they take in the store."""

    workspace: WorkspaceName
    before: SnapshotId
    after: SnapshotId
    changes: list[Change]
    bytes_before: int
    bytes_after: int
    new_bytes: int
    new_stored_bytes: int

    def title(self) -> str:
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in get_args(Difference))
        return (
            f"{self.before} to {self.after}: {counts}; {self.bytes_before:,} bytes became "
            f"{self.bytes_after:,}, {self.new_bytes:,} of them new, stored as "
            f"{self.new_stored_bytes:,}"
        )

    def count(self, difference: Difference) -> int:
        return sum(change.difference == difference for change in self.changes)


class FileVersion(msgspec.Struct, frozen=True):
    """A name with one content, in ``snapshots`` snapshots one after the other."""

    path: str
    kind: Kind
    bytes: int
    mtime_ns: int
    first: SnapshotId
    last: SnapshotId
    snapshots: int

    def row(self) -> Row:
        return {
            "path": self.path,
            "bytes": f"{self.bytes:,}",
            "changed": exact_moment(self.mtime_ns / 1e9),
            "first in": self.first,
            "last in": self.last,
            "snapshots": str(self.snapshots),
        }


def listed(manifest: Manifest) -> Iterator[ListedEntry]:
    """Every name of a snapshot, in its order."""
    for entry in manifest.entries:
        yield ListedEntry(
            shown_path(manifest, entry),
            _KINDS[entry.kind],
            entry.size,
            f"{entry.mode:04o}",
            entry.uid,
            entry.gid,
            entry.mtime_ns,
            _text(entry.target),
            entry.changed,
        )


def compare(before: Manifest, after: Manifest) -> SnapshotDiff:
    """The differences between the two snapshots, by path."""
    earlier, later = _Tree(before), _Tree(after)
    changes = []
    for path in sorted(earlier.entries.keys() | later.entries.keys()):
        change = _change(path, earlier, later)
        if change is not None:
            changes.append(change)
    known = {chunk.name for chunk in before.chunks}
    new = [chunk for chunk in after.chunks if chunk.name not in known]
    return SnapshotDiff(
        after.workspace,
        before.snapshot,
        after.snapshot,
        changes,
        sum(entry.size for entry in before.entries),
        sum(entry.size for entry in after.entries),
        sum(chunk.plain for chunk in new),
        sum(chunk.stored for chunk in new),
    )


def find(manifests: Iterable[Manifest], pattern: str) -> list[FileVersion]:
    """Every name that fits the glob ``pattern``, with its versions, by path and age.

    ``manifests`` come oldest first; only one is in memory at a time. A pattern with a slash is
    matched against the whole path or its end, one without against the last name.
    """
    fits = _matcher(pattern)
    open_versions: dict[str, tuple[FileVersion, object]] = {}
    found: list[FileVersion] = []
    for manifest in manifests:
        tree = _Tree(manifest)
        here = {path: entry for path, entry in tree.entries.items() if fits(path)}
        gone = [path for path in open_versions if path not in here]
        found += [open_versions.pop(path)[0] for path in gone]
        for path, entry in here.items():
            content = tree.content(entry)
            version, held = open_versions.get(path, (None, None))
            if version is not None and held == content:
                version = msgspec.structs.replace(
                    version, last=manifest.snapshot, snapshots=version.snapshots + 1
                )
            else:
                if version is not None:
                    found.append(version)
                resolved = tree.resolved(entry)
                version = FileVersion(
                    path,
                    _KINDS[entry.kind],
                    resolved.size,
                    resolved.mtime_ns,
                    manifest.snapshot,
                    manifest.snapshot,
                    1,
                )
            open_versions[path] = (version, content)
    found += [version for version, _ in open_versions.values()]
    return sorted(found, key=lambda version: (version.path, version.first))


def entry_at(manifest: Manifest, path: str) -> tuple[int, bytes]:
    """The root's number and the path below it of the entry that people call ``path``: as a
    listing shows it, or below one of the workspace's directories.

    Raises InvalidInput if there is none or more than one.
    """
    wanted = path.strip().rstrip("/")
    tails = {f"{root.rstrip('/')}/{wanted}" for root in manifest.roots}
    exact, below = [], []
    for entry in manifest.entries:
        shown = shown_path(manifest, entry)
        if shown == wanted:
            exact.append((entry.root, entry.path))
        elif shown in tails:
            below.append((entry.root, entry.path))
    found = exact or below
    if len(found) == 1 and wanted:
        return found[0]
    if found and wanted:
        raise InvalidInput(
            f"{path!r} is in several directories of snapshot {manifest.snapshot}: write the whole "
            f"path, beginning with one of {', '.join(manifest.roots)}"
        )
    raise InvalidInput(
        f"snapshot {manifest.snapshot} of workspace {manifest.workspace} has no {path!r} in "
        f"{', '.join(manifest.roots)}: search with `find` of `snapshots`, or name another snapshot"
    )


class _Tree:
    """A manifest by shown path. Hard links count as the file they lead to: which of a file's
    names is the first may change without the file changing."""

    def __init__(self, manifest: Manifest) -> None:
        self.entries = {shown_path(manifest, entry): entry for entry in manifest.entries}
        self._chunks = manifest.chunks
        self._files = {
            (entry.root, entry.path): entry for entry in manifest.entries if entry.kind == FILE
        }

    def resolved(self, entry: Entry) -> Entry:
        """The file behind a hard link; every other entry itself."""
        return self._files[entry.root, entry.target] if entry.kind == HARDLINK else entry

    def content(self, entry: Entry) -> object:
        """A key that is equal for files of equal content, whichever chunks they share."""
        file = self.resolved(entry)
        if file.kind != FILE:
            return (file.kind, file.target)
        return content_of(file, self._chunks)


def _change(path: str, earlier: _Tree, later: _Tree) -> Change | None:
    was, now = earlier.entries.get(path), later.entries.get(path)
    if was is None or now is None:
        there = now or was
        if there is None:
            raise AssertionError("a path of neither tree")
        difference: Difference = "added" if was is None else "removed"
        return Change(path, difference, _KINDS[there.kind], *_sizes(was, now), "")
    if earlier.content(was) != later.content(now):
        kinds = (_KINDS[was.kind], _KINDS[now.kind])
        what = "content" if kinds[0] == kinds[1] else f"{kinds[0]} to {kinds[1]}"
        return Change(path, "changed", _KINDS[now.kind], *_sizes(was, now), what)
    old, new = earlier.resolved(was), later.resolved(now)
    aspects = [
        name
        for name, before, after in (
            ("mode", old.mode, new.mode),
            ("owner", (old.uid, old.gid), (new.uid, new.gid)),
            ("time", old.mtime_ns, new.mtime_ns),
            ("extended attributes", sorted(old.xattrs), sorted(new.xattrs)),
        )
        if before != after
    ]
    if not aspects:
        return None
    return Change(path, "metadata", _KINDS[now.kind], *_sizes(was, now), ", ".join(aspects))


def _sizes(was: Entry | None, now: Entry | None) -> tuple[int, int]:
    return (was.size if was else 0, now.size if now else 0)


def shown_path(manifest: Manifest, entry: Entry) -> str:
    """An entry's path below the workspace's directory, as listings show it and as users ask for
    it."""
    root = manifest.roots[entry.root].rstrip("/")
    return f"{root}/{_text(entry.path)}" if entry.path else root


def _text(name: bytes) -> str:
    """A name that every table and terminal can show; bytes that are not UTF-8 appear as
    ``\xff``."""
    return name.decode("utf-8", "backslashreplace")


def _matcher(pattern: str) -> Callable[[str], bool]:
    text = pattern.strip().rstrip("/")
    if not text:
        raise InvalidInput("a pattern to find is empty: write a name like *.safetensors")
    match = re.compile(fnmatch.translate(text)).match
    if "/" not in text:
        return lambda path: match(path.rsplit("/", 1)[-1]) is not None
    ending = re.compile(fnmatch.translate(f"*/{text}")).match
    return lambda path: match(path) is not None or ending(path) is not None
