"""What the agent keeps about one workspace between runs: its last manifest and signatures."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.tree.abilities import remove_left
from torpor.machine.tree.batch import SIGNATURE_BYTES
from torpor.machine.tree.names import Names, Signature, packed_signatures
from torpor.machine.tree.vanished import Gone, disks
from torpor.machine.tree.walk import is_inside
from torpor.shared.errors import ManifestInvalid, WorkspaceBusy, WorkspaceInvalid, WrongKey
from torpor.shared.format.keys import Seal
from torpor.shared.format.lineage import Lineage
from torpor.shared.format.manifest import FILE, Manifest, decode_manifest
from torpor.shared.format.missed import is_torpors
from torpor.shared.values import SnapshotId, WorkspaceName, learned

_SAMPLED: Final = 64
"""The most files in a sample of a directory."""


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """Signatures in the order of the manifest's entries."""

    root: bytes
    roots: list[bytes]
    signatures: bytes | list[Signature | None]  # packed; the list is of an earlier version


class Index(msgspec.Struct, frozen=True):
    """The snapshot that the workspace equalled, and the signatures that its files had then."""

    root: bytes
    manifest: Manifest
    held: Names
    roots: list[bytes]

    def held_of(self, roots: Sequence[bytes], named: Sequence[str]) -> Names:
        """What it held of other directories than its own, which the block has ``named``."""
        if self.roots == list(roots):
            return self.held
        there = self._now_among(roots, named)
        kept = [
            p
            for p, place in enumerate(self.held.entries.places(range(len(self.held))))
            if there[place.root] >= 0
        ]
        entries = (
            msgspec.structs.replace(entry, root=there[entry.root])
            for entry in map(self.held.entries.__getitem__, kept)
        )
        signatures = b"".join(map(self.held.packed_signature, kept))
        return Names.of(len(roots), entries, signatures)

    def _now_among(self, roots: Sequence[bytes], named: Sequence[str]) -> list[int]:
        """The number among ``roots`` of each of its own: the same directory, else the one that a
        link in its place leads to, else the one that the block names as it named this one. -1:
        none, or another one's already."""
        found = [roots.index(root) if root in roots else -1 for root in self.roots]
        for number, root in enumerate(self.roots):
            real, name = os.path.realpath(root), self.manifest.roots[number]
            for now in (
                roots.index(real) if real in roots else -1,
                named.index(name) if name in named else -1,
            ):
                if found[number] < 0 and now not in found:
                    found[number] = now
        return found

    def sample(self, number: int) -> list[tuple[bytes, int, int]]:
        """Path, size and mtime of some of the files that it held of one of its roots."""
        entries = [self.held.entries[at] for at in self.held.of_root(number)]
        files = [entry for entry in entries if entry.kind == FILE and not is_torpors(entry.path)]
        some = files[:: len(files) // _SAMPLED + 1]
        return [(entry.path, entry.size, entry.mtime_ns) for entry in some]


class Known(msgspec.Struct, frozen=True, array_like=True):
    """By what a directory of the workspace is known again where a link has its name: its own
    device and inode, or some of its ``files`` (``Index.sample``; None: not known)."""

    root: bytes
    device: int
    inode: int
    files: list[tuple[bytes, int, int]] | None = None

    def is_at(self, place: bytes) -> bool:
        """Whether ``place`` is that directory, or has at least half of these files as they were,
        and the directory itself does not lie beside its old place under another name: later work
        may be there."""
        with suppress(OSError):
            found = os.stat(place)
            if self.inode and (found.st_dev, found.st_ino) == (self.device, self.inode):
                return True
        return self._has_files(place) and not any(map(self._has_files, self._beside()))

    def _has_files(self, place: bytes) -> bool:
        if not self.files:
            return False
        return 2 * sum(map(partial(_is_there, place), self.files)) >= len(self.files)

    def _beside(self) -> list[bytes]:
        """What has its inode, in the directory that it was in."""
        try:
            with os.scandir(os.path.dirname(self.root)) as names:
                same = [name for name in names if name.inode() == self.inode]
                return [name.path for name in same if not name.is_symlink()]
        except OSError:
            return []


class Past(msgspec.Struct, frozen=True, array_like=True):
    """What this machine has held of the workspace: the directories that a restore, a sync or a
    snapshot knew, the disks that they were on, and what vanished since. ``line``: the snapshot that
    its tree goes on from, and ``empty``: that has no file. ``known``: by what its directories are
    known again."""

    roots: list[bytes] = []
    disks: list[bytes] = []
    gone: list[Gone] = []
    line: Lineage | None = None
    known: list[Known] = []
    empty: bool = False

    def unnamed(
        self, roots: Sequence[bytes], also: Sequence[bytes], accepted: Sequence[bytes]
    ) -> list[bytes]:
        """Directories of it, or of ``also``, that hold something and are in none of ``roots``, by
        any name, and not ``accepted``."""
        places = sorted({*self.roots, *also})
        return [
            place
            for place in places
            if not is_inside(place, [*roots, *accepted])
            and not self._is_moved_into(place, [*roots, *accepted])
            and _holds_something(place)
        ]

    def and_roots(self, roots: Sequence[bytes]) -> Past:
        """With these directories, and without those that were moved into one of these."""
        left = {root for root in self.roots if not self._is_moved_into(root, roots)}
        known = [old for old in self.known if old.root in left and old.root not in roots]
        return msgspec.structs.replace(
            self, roots=sorted({*left, *roots}), known=[*known, *map(_known, roots)]
        )

    def _is_moved_into(self, place: bytes, roots: Sequence[bytes]) -> bool:
        """Whether a link that has the name of a directory leads to it in one of ``roots``. False
        where nobody knows what the directory was."""
        real = os.path.realpath(place)
        if real == place or not is_inside(real, roots):
            return False
        return any(known.is_at(real) for known in self.known if known.root == place)

    def missing_disks(self) -> list[bytes]:
        return [disk for disk in self.disks if not os.path.ismount(disk)]

    def new_disks(
        self, roots: Sequence[bytes], excluded: Callable[[bytes], bool] | None
    ) -> list[bytes]:
        return [disk for disk in disks(roots, excluded) if disk not in self.disks]


class SyncRecord(msgspec.Struct, frozen=True, array_like=True):
    """A sync that has begun to write and has not ended."""

    token: bytes  # in the names of the files that it stages
    snapshot: SnapshotId
    target: bytes  # the root hash of the snapshot that the tree becomes
    roots: list[bytes]
    mixed: bool  # names have begun to change: the tree is neither the old snapshot nor the new one
    staged: list[tuple[int, bytes, bytes]]  # root, path, and the directory that holds it meanwhile

    def is_of(self, target: bytes, roots: Sequence[bytes]) -> bool:
        """Whether it is a sync to that snapshot, in those directories."""
        return (self.target, self.roots) == (target, roots)


class Use(msgspec.Struct, frozen=True, array_like=True):
    """How a restored tree is used: since when, by this machine's clock, and which files of each of
    ``roots`` had been when the machine was ready. None: nobody has said that it was."""

    roots: list[bytes]
    since_ns: int
    ready: list[set[bytes]] | None = None


_UNREADABLE = SyncRecord(b"", SnapshotId("unknown"), b"", [], True, [])
"""Replaces a damaged record: it may have been any sync, at any step."""


_SEEN, _OWN_SEEN = "seen", "own-seen"
_MANIFESTS = {_SEEN: "manifest", _OWN_SEEN: "own-manifest"}
"""The files of the index, and of the machine's newest own save."""


class WorkspaceState:
    """The folder ``HOME/workspaces/NAME`` (mode 0700)."""

    def __init__(self, home: Path, workspace: WorkspaceName) -> None:
        self.workspace = workspace
        self.folder = home / "workspaces" / workspace
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.journal = self.folder / "journal"
        self.restore_journal = self.folder / "restore"
        self.probe_note = self.folder / "probe"
        self._sync_record = self.folder / "sync"
        self._past = self.folder / "past"
        self._use = self.folder / "use"
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Hold the workspace on this machine until ``unlock`` or the end of the process."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise WorkspaceBusy(
                f"another agent on this machine works on workspace {self.workspace}: wait until "
                "its run has ended"
            ) from None
        self._lock_fd = fd
        remove_left(self.probe_note)

    def unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def save_index(
        self,
        blob: bytes,
        root: bytes,
        roots: Sequence[bytes],
        signatures: bytes,
        gone: Sequence[Gone] | None = None,
        excluded: Callable[[bytes], bool] | None = None,
        line: Lineage | None = None,
    ) -> None:
        """Remember that the disk equals the snapshot in ``blob``. ``gone``: what the machine held
        before and the snapshot does not; None where the snapshot, of this ``line``, was brought
        here."""
        (self.folder / _SEEN).unlink(missing_ok=True)
        if gone is None:
            self.forget_index()
        past = self.past().and_roots(roots)
        lost = past.missing_disks() if gone is not None else []
        found = sorted({*disks(roots, excluded), *lost})
        self._keep_past(
            msgspec.structs.replace(
                past,
                disks=found,
                gone=list(gone or ()),
                line=line or past.line,
                empty=len(signatures) == SIGNATURE_BYTES * len(roots),
            )
        )
        self._write_index(_SEEN, blob, _Seen(root, list(roots), signatures))

    def save_own_save(
        self,
        blob: bytes,
        root: bytes,
        roots: Sequence[bytes],
        signatures: bytes,
    ) -> None:
        """Remember a snapshot that nobody has verified, beside the index."""
        (self.folder / _OWN_SEEN).unlink(missing_ok=True)
        self._write_index(_OWN_SEEN, blob, _Seen(root, list(roots), signatures))

    def forget_index(self) -> None:
        for name in (_SEEN, _OWN_SEEN):
            (self.folder / name).unlink(missing_ok=True)

    def past(self) -> Past:
        """What the workspace held here; empty where nothing is recorded, or another version of the
        agent recorded it."""
        try:
            return msgspec.msgpack.decode(self._past.read_bytes(), type=learned(Past))
        except (FileNotFoundError, msgspec.MsgspecError):
            return Past()

    def go_on_from(
        self,
        line: Lineage,
        roots: Sequence[bytes],
        gone: Sequence[Gone],
        excluded: Callable[[bytes], bool] | None,
        *,
        empty: bool = False,
    ) -> None:
        """Remember, before a manifest is sent, that the tree goes on from it: what comes later has
        its work, also where nobody is left to verify it. The directories and disks that it holds
        are missed from then on, though no control side verifies it. ``empty``: it has no file. On a
        full disk the line is told from the last one that was remembered: a later snapshot then
        seems to lack this work."""
        with suppress(OSError):
            past = self.past().and_roots(roots)
            found = sorted({*past.disks, *disks(roots, excluded)})
            self._keep_past(
                msgspec.structs.replace(past, disks=found, gone=list(gone), line=line, empty=empty)
            )

    def remember_files(self, roots: Sequence[bytes], seal: Seal) -> None:
        """Keep some files of each directory that the index has and ``roots`` do not: the next index
        may not have them. On a full disk they are not kept."""
        past = self.past()
        if all(is_inside(root, roots) for root in past.roots):
            return
        index = self._load_index(_SEEN, None, seal, None)
        if index is None:
            return
        held = {root: number for number, root in enumerate(index.roots)}
        known = {root: Known(root, 0, 0) for root in past.roots}
        known |= {old.root: old for old in past.known}
        found = [
            msgspec.structs.replace(old, files=index.sample(held[old.root]))
            if old.root in held and not is_inside(old.root, roots)
            else old
            for old in known.values()
        ]
        with suppress(OSError):
            self._keep_past(msgspec.structs.replace(past, known=found))

    def use(self) -> Use | None:
        """The use of what a restore brought here; None where none did."""
        try:
            return msgspec.msgpack.decode(self._use.read_bytes(), type=learned(Use))
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def keep_use(self, use: Use) -> None:
        _write(self._use, msgspec.msgpack.encode(use))

    def mirrored(self, roots: Sequence[bytes]) -> bytes | None:
        """The root hash of the snapshot that ``roots`` equalled at the last comparison."""
        if (record := self.sync_record()) is not None and record.mixed:
            return None
        try:
            seen = msgspec.msgpack.decode((self.folder / _SEEN).read_bytes(), type=learned(_Seen))
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return seen.root if seen.roots == list(roots) else None

    @property
    def is_new(self) -> bool:
        """Whether the workspace was never stored, restored or synced on this machine."""
        kept = (self.folder / _SEEN, self.restore_journal, self._sync_record)
        return not any(path.exists() for path in kept)

    def never_held_a_file(self, snapshots: int) -> bool:
        """Whether the snapshot that the tree goes on from has no file, or the workspace has no
        ``snapshots`` and never had one here; and no pack was stored here since. False where that is
        not known."""
        past = self.past()
        empty = past.empty if past.line is not None else self.is_new and not snapshots
        return empty and not self.journal.exists()

    def sync_record(self) -> SyncRecord | None:
        """The sync that has not ended."""
        try:
            return msgspec.msgpack.decode(self._sync_record.read_bytes(), type=learned(SyncRecord))
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            return _UNREADABLE

    def keep_sync_record(self, record: SyncRecord) -> None:
        """Write the record so that it survives a power cut, before the sync goes on."""
        _write(self._sync_record, msgspec.msgpack.encode(record), durable=True)

    def clear_sync_record(self) -> None:
        self._sync_record.unlink(missing_ok=True)

    @property
    def is_half_restored(self) -> bool:
        """Whether a restore has not ended."""
        return self.restore_journal.exists()

    def check_not_half_restored(self, then: str) -> None:
        """Raise WorkspaceInvalid where a restore has not ended."""
        if self.is_half_restored:
            raise WorkspaceInvalid(
                f"workspace {self.workspace} is only half restored on this machine: a wake never "
                f"finished. Wake it here again, which continues it{then}"
            )

    def half_synced(self, record: SyncRecord, then: str) -> WorkspaceInvalid:
        """The refusal of a tree that a sync has half changed."""
        return WorkspaceInvalid(
            f"workspace {self.workspace} on this machine holds only half of snapshot "
            f"{record.snapshot}: a sync to that snapshot never finished. Sync to it again{then}"
        )

    def load_index(
        self, roots: Sequence[bytes], seal: Seal, among: set[bytes] | None
    ) -> Index | None:
        """The index, when it mirrors one of the snapshots whose roots are ``among`` (None: any)."""
        return self._load_index(_SEEN, roots, seal, among)

    def held_here(self, roots: Sequence[bytes], named: Sequence[str], seal: Seal) -> Names | None:
        """What the index held of ``roots``, which the block has ``named``, also where it is of
        other directories too; empty where it is lost. None where this machine remembers nothing of
        the workspace."""
        if not self.past().roots:
            return None
        index = self._load_index(_SEEN, None, seal, None)
        return Names(len(roots)) if index is None else index.held_of(roots, named)

    def load_own_save(self, roots: Sequence[bytes], seal: Seal, among: set[bytes]) -> Index | None:
        """The index of the machine's newest own save, when nothing was verified here since."""
        index, own = self.folder / _SEEN, self.folder / _OWN_SEEN
        with suppress(FileNotFoundError):
            if own.stat().st_mtime_ns < index.stat().st_mtime_ns:
                return None
        return self._load_index(_OWN_SEEN, roots, seal, among)

    def _load_index(
        self, name: str, roots: Sequence[bytes] | None, seal: Seal, among: set[bytes] | None
    ) -> Index | None:
        try:
            seen = msgspec.msgpack.decode((self.folder / name).read_bytes(), type=learned(_Seen))
            if among is not None and seen.root not in among:
                return None
            if roots is not None and seen.roots != list(roots):
                return None
            blob = (self.folder / _MANIFESTS[name]).read_bytes()
            manifest, root = decode_manifest(blob, seal, "the agent's copy of the last manifest")
        except (FileNotFoundError, msgspec.MsgspecError, ManifestInvalid, WrongKey):
            return None  # absent or damaged: every file is read again
        signatures = seen.signatures
        if isinstance(signatures, list):
            signatures = packed_signatures(signatures)
        if root != seen.root or len(signatures) != SIGNATURE_BYTES * len(manifest.entries):
            return None
        held = Names.of(len(seen.roots), manifest.entries, signatures)
        return Index(root, manifest, held, seen.roots)

    def _write_index(self, name: str, blob: bytes, seen: _Seen) -> None:
        _write(self.folder / _MANIFESTS[name], blob)
        _write(self.folder / name, msgspec.msgpack.encode(seen))  # last: it makes both valid

    def _keep_past(self, past: Past) -> None:
        _write(self._past, msgspec.msgpack.encode(past), durable=True)


def _holds_something(path: bytes) -> bool:
    """Whether ``path`` exists and is not an empty directory."""
    try:
        with os.scandir(path) as names:
            return next(names, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _known(root: bytes) -> Known:
    try:
        found = os.stat(root)
    except OSError:
        return Known(root, 0, 0)
    return Known(root, found.st_dev, found.st_ino)


def _is_there(place: bytes, file: tuple[bytes, int, int]) -> bool:
    """Whether a file is below ``place``, with its size and its mtime."""
    path, size, mtime_ns = file
    try:
        found = os.lstat(os.path.join(place, path))
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (size, mtime_ns)


def _write(path: Path, data: bytes, *, durable: bool = False) -> None:
    partial = path.with_name(path.name + ".new")
    with partial.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
