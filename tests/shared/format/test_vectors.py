"""docs/test-vectors.json against the code, and against the reader that shares no code with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests import independent_reader as reader
from torpor.control.store.signatures import Signer, record_in
from torpor.shared.codecs.encodings import ENCODINGS, decode_chunk
from torpor.shared.errors import InvalidInput
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.chunks import open_chunk
from torpor.shared.format.keys import Seal, chunk_associated, workspace_key
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    SYMLINK,
    Chunk,
    decode_manifest,
    manifest_root,
)
from torpor.shared.format.names import (
    manifest_key,
    new_pack_key,
    pack_id_of,
    pack_key,
    snapshot_of,
)
from torpor.shared.format.user_keys import KeyObject, UserKey
from torpor.shared.values import (
    ObjectKey,
    WorkspaceName,
    object_key,
    snapshot_id,
    workspace_name,
)

ROOT = Path(__file__).resolve().parents[3]
VECTORS: dict[str, Any] = json.loads((ROOT / "docs/test-vectors.json").read_text())
STORE_KEY = bytes.fromhex(VECTORS["keys"]["store_key"])
WORKSPACE = WorkspaceName(VECTORS["keys"]["workspace"])
SEAL = Seal(workspace_key(STORE_KEY, WORKSPACE))
PLAIN = Seal(None)
KEYS = reader.Keys(STORE_KEY, WORKSPACE)
NO_KEYS = reader.Keys(None, WORKSPACE)

of_hex = bytes.fromhex
snapshots = pytest.mark.parametrize(
    "vector", VECTORS["snapshots"], ids=lambda vector: "sealed" if vector["sealed"] else "plain"
)
streams = pytest.mark.parametrize("vector", VECTORS["streams"], ids=lambda vector: vector["what"])


def test_keys_follow_from_the_store_key() -> None:
    keys = VECTORS["keys"]
    assert workspace_key(STORE_KEY, WORKSPACE) == of_hex(keys["workspace_key"])
    assert SEAL.key_id == KEYS.id == of_hex(keys["key_id"])
    assert KEYS.names == of_hex(keys["names_key"])
    assert KEYS.sealing == of_hex(keys["sealing_key"])


def test_a_user_key_opens_its_key_object() -> None:
    vector = VECTORS["key_object"]
    key, blob = UserKey(of_hex(vector["key"]), opens=True), of_hex(vector["object"])
    assert reader.store_key_of(blob, key.secret) == STORE_KEY
    found = msgspec.json.decode(record_in(blob), type=KeyObject)
    said = found.associated
    assert key.open(found) == STORE_KEY
    assert (said, key.id) == (of_hex(vector["associated"]), vector["id"])
    assert Signer(STORE_KEY, "").check(object_key(f"keys/{key.id}"), blob)
    assert key.text == vector["text"] and UserKey.of(vector["text"]) == key
    assert UserKey.of(vector["store_key_text"]) == UserKey(STORE_KEY, opens=False)
    sealing = AESGCM(of_hex(vector["sealing_key"]))
    assert sealing.decrypt(found.sealed[:12], found.sealed[12:], said) == STORE_KEY


def test_names_of_objects_lead_back() -> None:
    key = new_pack_key(WORKSPACE)
    assert pack_key(WORKSPACE, pack_id_of(key)) == key == object_key(key) != new_pack_key(WORKSPACE)
    snapshot = snapshot_id(VECTORS["snapshots"][0]["snapshot"])
    assert snapshot_of(manifest_key(WORKSPACE, snapshot)) == snapshot
    with pytest.raises(InvalidInput):
        snapshot_of(ObjectKey("workspaces/demo/snapshots/notes.txt"))
    for name in ("packs/aa/aabb", "packs/aa/" + "a" * 34, "packs/aa/not-hex"):
        with pytest.raises(ValueError, match=r"pack|hex"):
            pack_id_of(ObjectKey(name))


@pytest.mark.parametrize("vector", VECTORS["names"], ids=lambda vector: vector["content"][:12])
def test_names_and_digests(vector: dict[str, str]) -> None:
    content = of_hex(vector["content"])
    for seal, keys, kind in ((PLAIN, NO_KEYS, "plain"), (SEAL, KEYS, "keyed")):
        assert seal.name(content) == keys.name(content) == of_hex(vector[f"{kind}_name"])
        assert seal.digest(content) == of_hex(vector[f"{kind}_digest"]) == seal.name(content)[:16]


def test_a_sealed_chunk() -> None:
    vector = VECTORS["sealed_chunk"]
    plain, encoded, stored = (of_hex(vector[name]) for name in ("plain", "encoded", "stored"))
    name, pack, nonce = (of_hex(vector[name]) for name in ("name", "pack", "nonce"))
    associated = chunk_associated(name, pack, vector["encoding"], len(plain))
    assert associated == of_hex(vector["associated"])
    sealed = AESGCM(of_hex(VECTORS["keys"]["sealing_key"])).encrypt(nonce, encoded, associated)
    assert nonce + sealed == stored
    assert SEAL.name(plain) == name
    chunk = (name, len(plain), vector["encoding"], 0, 0, len(stored))
    assert open_chunk(Chunk(*chunk), pack, stored, SEAL) == plain
    fields = zip(Chunk.__struct_fields__, chunk, strict=True)
    assert reader.read_chunk(reader.Chunk(**dict(fields)), pack, stored, KEYS) == plain


@streams
def test_every_stream_decodes(vector: dict[str, Any]) -> None:
    code, stored, plain = vector["encoding"], of_hex(vector["stored"]), of_hex(vector["plain"])
    assert decode_chunk(code, stored, len(plain)) == plain
    assert reader.decode(code, stored, len(plain)) == plain


def test_every_encoding_has_a_stream() -> None:
    assert {vector["encoding"] for vector in VECTORS["streams"]} == set(ENCODINGS)


@snapshots
def test_the_engine_reads_the_snapshot(vector: dict[str, Any]) -> None:
    seal = SEAL if vector["sealed"] else PLAIN
    objects = {name: of_hex(blob) for name, blob in vector["objects"].items()}
    snapshot = snapshot_id(vector["snapshot"])
    blob = objects[manifest_key(workspace_name(vector["workspace"]), snapshot)]
    manifest, root = decode_manifest(blob, seal, "the vector")
    check_manifest(manifest, "the vector")
    assert root == manifest_root(blob, "it") == of_hex(vector["root"])
    packs = [objects[pack_key(manifest.workspace, pack.id)] for pack in manifest.packs]
    plain = []
    for chunk in manifest.chunks:
        stored = packs[chunk.pack][chunk.offset : chunk.offset + chunk.stored]
        plain.append(open_chunk(chunk, manifest.packs[chunk.pack].id, stored, seal))
    for entry, said in zip(manifest.entries, vector["tree"], strict=True):
        content = b"".join(
            bytes(e.length) if e.chunk < 0 else plain[e.chunk][e.offset : e.offset + e.length]
            for e in entry.extents
        )
        assert content == of_hex(said.get("content", ""))
        assert (entry.root, entry.path, entry.kind) == (
            said["root"],
            of_hex(said["path"]),
            said["kind"],
        )
        assert not entry.digest or entry.digest == seal.digest(content)


def _get(objects: dict[str, bytes]) -> Callable[[str, int, int | None], bytes]:
    def get(name: str, offset: int, length: int | None) -> bytes:
        return objects[name][offset:] if length is None else objects[name][offset:][:length]

    return get


def _restored(vector: dict[str, Any], objects: dict[str, bytes], targets: list[bytes]) -> None:
    keys = KEYS if vector["sealed"] else NO_KEYS
    workspace, snapshot = vector["workspace"], vector["snapshot"]
    blob = objects[f"workspaces/{workspace}/snapshots/{snapshot}"]
    manifest = reader.read_manifest(blob, keys, workspace, snapshot)
    reader.restore(manifest, _get(objects), keys, targets)


@snapshots
def test_the_independent_reader_restores_the_snapshot(
    vector: dict[str, Any], tmp_path: Path
) -> None:
    objects = {name: of_hex(blob) for name, blob in vector["objects"].items()}
    targets = [os.fsencode(tmp_path / str(number)) for number in range(2)]
    _restored(vector, objects, targets)
    for said in vector["tree"]:
        path = os.path.join(targets[said["root"]], of_hex(said["path"]))
        st = os.lstat(path)
        assert st.st_mtime_ns == said["mtime_ns"]
        if said["kind"] != SYMLINK:
            assert st.st_mode & 0o7777 == said["mode"]
        if os.geteuid() == 0:
            assert (st.st_uid, st.st_gid) == (said["uid"], said["gid"])
        for name, value in said["xattrs"]:
            assert os.getxattr(path, of_hex(name)) == of_hex(value)
        if said["kind"] == FILE:
            assert Path(os.fsdecode(path)).read_bytes() == of_hex(said["content"])
        elif said["kind"] == DIRECTORY:
            here = {of_hex(e["path"]) for e in vector["tree"] if e["root"] == said["root"]}
            inside = {
                os.path.basename(p) for p in here if os.path.dirname(p) == of_hex(said["path"])
            }
            assert {*os.listdir(path), b""} == {*inside, b""}
        elif said["kind"] == SYMLINK:
            assert os.readlink(path) == of_hex(said["target"])
        elif said["kind"] == HARDLINK:
            target = os.path.join(targets[said["root"]], of_hex(said["target"]))
            assert os.path.samefile(path, target)


@snapshots
def test_the_independent_reader_leaves_nothing_of_what_it_refuses(
    vector: dict[str, Any], tmp_path: Path
) -> None:
    """One bit of each object is flipped in turn: the manifest's root, a chunk of each pack."""
    for name in vector["objects"]:
        objects = {other: bytearray(of_hex(blob)) for other, blob in vector["objects"].items()}
        objects[name][70] ^= 1
        target = partial(os.path.join, os.fsencode(tmp_path))
        with pytest.raises(reader.RefusedError):
            _restored(
                vector, {n: bytes(b) for n, b in objects.items()}, [target(b"a"), target(b"b")]
            )
        assert list(tmp_path.iterdir()) == []
