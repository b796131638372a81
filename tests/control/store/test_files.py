"""The end of one file of a snapshot, fetched by chunks."""

from __future__ import annotations

import os

import msgspec
import pytest

from tests.fixtures.manifests import honest
from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.files import find_file, read_end
from torpor.shared.codecs.encodings import RAW
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.keys import Seal, chunk_associated
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HOLE,
    Chunk,
    Entry,
    Extent,
    Manifest,
    Pack,
)
from torpor.shared.format.names import pack_key

PACK = b"p" * 16
PATH = b".torpor-jobs/0.log"


def _stored(store: MemoryStore, seal: Seal, *contents: bytes) -> Manifest:
    """A snapshot with one file: these chunks, and a hole of 5 bytes after the first."""
    chunks, pack = [], b""
    for content in contents:
        name = seal.name(content)
        sealed = bytes(seal.seal(content, chunk_associated(name, PACK, RAW.code, len(content))))
        chunks.append(Chunk(name, len(content), RAW.code, 0, len(pack), len(sealed)))
        pack += sealed
    extents = [Extent(number, 0, len(content)) for number, content in enumerate(contents)]
    extents.insert(1, Extent(HOLE, 0, 5))
    usual = honest()
    store.put(pack_key(usual.workspace, PACK), pack)
    entries = [
        Entry(DIRECTORY, 0, b"", 0o700, 0, 0, 0, 0),
        Entry(DIRECTORY, 0, PATH, 0o700, 0, 0, 0, 0),  # a name that is no file
        Entry(FILE, 1, PATH, 0o600, 0, 0, 0, sum(e.length for e in extents), tuple(extents)),
    ]
    return msgspec.structs.replace(
        usual,
        roots=["~/a", "~/b/"],
        entries=entries,
        chunks=chunks,
        packs=[Pack(PACK, len(pack), b"")],
    )


@pytest.mark.parametrize("key", [None, os.urandom(32)], ids=["plain", "sealed"])
def test_only_the_end_is_fetched(memory_store: MemoryStore, key: bytes | None) -> None:
    seal = Seal(key)
    manifest = _stored(memory_store, seal, b"first", b"second", b"third")
    entry = find_file(manifest, "~/b/.torpor-jobs/0.log")
    whole = b"first" + bytes(5) + b"secondthird"
    for most in (0, 3, 5, 8, 14, 18, 1000):
        found = read_end(memory_store, manifest, entry, seal, most)
        assert found == whole[len(whole) - min(most, len(whole)) :]


def test_what_is_no_file_is_not_found(memory_store: MemoryStore) -> None:
    manifest = _stored(memory_store, Seal(None), b"first")
    assert find_file(manifest, "~/a/.torpor-jobs/0.log") is None
    assert find_file(manifest, "~/b/.torpor-jobs/1.log") is None
    assert find_file(manifest, "~/c/.torpor-jobs/0.log") is None


def test_a_changed_chunk_is_named(memory_store: MemoryStore) -> None:
    manifest = _stored(memory_store, Seal(None), b"first", b"second")
    memory_store.put(pack_key(manifest.workspace, PACK), b"firstSECOND")
    entry = find_file(manifest, "~/b/.torpor-jobs/0.log")
    with pytest.raises(SnapshotDamaged, match=f"{PACK.hex()}.* does not match its hash"):
        read_end(memory_store, manifest, entry, Seal(None), 3)
