"""Reads the end of one file of a snapshot on the control side: a log, never a user's data."""

from __future__ import annotations

from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.chunks import open_chunk
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, HOLE, Entry, Extent, Manifest
from torpor.shared.format.names import pack_key
from torpor.shared.transfer.transfer import Range


def find_file(manifest: Manifest, path: str) -> Entry | None:
    """The regular file at ``path``, which begins with one of the manifest's roots; None if the
    snapshot has none there."""
    for number, root in enumerate(manifest.roots):
        top = f"{root.rstrip('/')}/"
        if path.startswith(top):
            name = path.removeprefix(top).encode()
            for entry in manifest.entries:
                if (entry.kind, entry.root, entry.path) == (FILE, number, name):
                    return entry
    return None


def read_end(
    store: ObjectStore, manifest: Manifest, entry: Entry, seal: Seal, most_bytes: int
) -> bytes:
    """The last ``most_bytes`` of a file. Fetches only the chunks that hold them, and checks each
    against its hash. Raises SnapshotDamaged, StoreMissing and WrongKey."""
    pieces: list[bytes] = []
    left = most_bytes
    for extent in reversed(entry.extents):
        if left <= 0:
            break
        if extent.chunk == HOLE:
            piece = bytes(min(left, extent.length))
        else:
            piece = _content(store, manifest, extent, seal)[-left:]
        pieces.append(piece)
        left -= len(piece)
    return b"".join(reversed(pieces))


def _content(store: ObjectStore, manifest: Manifest, extent: Extent, seal: Seal) -> bytes:
    chunk = manifest.chunks[extent.chunk]
    pack = manifest.packs[chunk.pack].id
    key = pack_key(manifest.workspace, pack)
    stored = store.get_range(key, Range(chunk.offset, chunk.stored))
    try:
        plain = open_chunk(chunk, pack, stored, seal)
    except SnapshotDamaged as error:
        raise SnapshotDamaged(f"a chunk in {key} of {store.address}: {error}") from None
    return bytes(memoryview(plain)[extent.offset : extent.offset + extent.length])
