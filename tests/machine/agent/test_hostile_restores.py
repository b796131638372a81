"""Manifests and packs that lie are refused, and nothing of them is written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.manifests import LIES, PLAIN, SNAPSHOT, Lie, entry, honest, object_of
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import begin_from, put_manifest
from tests.fixtures.trees import facts
from torpor.control.remote.paths import RemotePath, SnapshotPath
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.sync import RemoteSync
from torpor.shared.errors import (
    DiskFull,
    InvalidInput,
    ManifestInvalid,
    SnapshotDamaged,
    TorporError,
    WrongKey,
)
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    Chunk,
    Extent,
    Manifest,
    Pack,
    encode_manifest,
)
from torpor.shared.format.names import pack_key, packs_prefix
from torpor.shared.transfer import retries
from torpor.shared.values import MIB, ObjectKey, SnapshotId, StoredSnapshot, WorkspaceSpec

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """A machine on which every lie is tried, and a folder that must stay as it is."""
    folder, store = tmp_path_factory.mktemp("victim"), MemoryStore()
    engine = Engine(store, folder.with_name("victims-home"))
    yield engine, folder
    engine.runs.close()
    store.close()


@pytest.mark.rule(7)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_refused_before_a_byte_is_written(victim: tuple[Engine, Path], lie: Lie) -> None:
    engine, folder = victim
    blob, _ = encode_manifest(lie.make(), PLAIN)
    put_manifest(engine, blob)
    targets = [folder / str(number) for number, _ in enumerate(lie.make().roots)]
    for first in ([], ["*", "d/*", "../x"]):
        with pytest.raises(ManifestInvalid, match="nothing was written") as refused:
            engine.begin_restore(SNAPSHOT, targets, first=first)
        assert lie.says in str(refused.value)
    assert list(folder.iterdir()) == []
    assert not engine.runs.active()


@pytest.mark.parametrize(
    ("blob", "error"),
    [
        (object_of(msgspec.msgpack.encode(honest()))[:-1], ManifestInvalid),
        (b"<html>not found</html>" * 10, ManifestInvalid),
        (encode_manifest(honest(snapshot=SnapshotId("other")), PLAIN)[0], SnapshotDamaged),
        (encode_manifest(honest(workspace="other"), PLAIN)[0], SnapshotDamaged),
    ],
    ids=["cut", "no manifest", "other snapshot", "other workspace"],
)
def test_what_is_not_the_snapshot_is_refused(
    victim: tuple[Engine, Path], blob: bytes, error: type[TorporError]
) -> None:
    engine, folder = victim
    put_manifest(engine, blob)
    with pytest.raises(error):
        begin_from(engine, blob, folder / "t")
    assert list(folder.iterdir()) == []


@pytest.mark.rule(7)
@pytest.mark.parametrize(
    ("roots", "says"),
    [
        (["~/.local/lib"], "names '~/.local/lib', and the workspace's paths are '~/workspace'"),
        (["~/workspace", "/etc/cron.d"], "names '/etc/cron.d'"),
        (["workspace"], "names 'workspace'"),
        (["~/workspace", "~/workspace//"], "overlap"),
    ],
)
@pytest.mark.parametrize("begins", ["restore", "sync", "path"])
def test_a_machine_compares_the_directories_by_itself(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begins: str,
    roots: list[str],
    says: str,
) -> None:
    """Whatever the control side has read before."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    more = [entry(DIRECTORY, b"", root=number) for number in range(1, len(roots))]
    blob, root = encode_manifest(honest(roots=roots, entries=[*honest().entries, *more]), PLAIN)
    put_manifest(engine, blob)
    wanted = StoredSnapshot(WORKSPACE, SNAPSHOT, root.hex(), len(blob), 0.0)
    spec = WorkspaceSpec(WORKSPACE, ["~/workspace"])
    of = (engine, engine.store, wanted)
    run = {
        "restore": lambda: RemoteRestore(*of, None, "r", paths=spec.restorable),
        "sync": lambda: RemoteSync(*of, spec, None, "r"),
        "path": lambda: RemotePath(
            *of, None, "r", SnapshotPath(0, b"d"), into="~/into", aside=False, spec=spec
        ),
    }[begins]()
    with pytest.raises(ManifestInvalid) as refused:
        run.begin()
    assert says in str(refused.value) and "nothing was written" in str(refused.value)
    assert not (tmp_path / "user").exists()


@pytest.mark.rule(7)
def test_two_paths_that_lead_to_one_directory_are_not_synced(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    more = entry(DIRECTORY, b"", root=1)
    blob, _ = encode_manifest(
        honest(roots=["~/a", "~/b"], entries=[*honest().entries, more]), PLAIN
    )
    put_manifest(engine, blob)
    with pytest.raises(InvalidInput, match="overlap on the machine"):
        engine.begin_sync(SNAPSHOT)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_manifest_that_was_replaced_is_refused(victim: tuple[Engine, Path]) -> None:
    engine, folder = victim
    _, listed = encode_manifest(honest(run="listed"), PLAIN)
    forged, _ = encode_manifest(honest(run="forged"), PLAIN)
    put_manifest(engine, forged)
    with pytest.raises(SnapshotDamaged, match="it was changed in the store"):
        begin_from(engine, forged, folder / "t", root=listed.hex())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("written", "read"), [(None, b"o" * 32), (KEY, None), (KEY, b"o" * 32)])
def test_the_wrong_key_writes_nothing(
    engine: Engine, tmp_path: Path, written: bytes | None, read: bytes | None
) -> None:
    engine.store_key = written
    blob, _ = encode_manifest(honest(), engine.seal)
    put_manifest(engine, blob)
    engine.store_key = read
    with pytest.raises(WrongKey):
        begin_from(engine, blob, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_more_than_the_disk_holds_is_refused_before_a_byte_is_written(
    victim: tuple[Engine, Path],
) -> None:
    """Four tebibytes of one chunk, a quarter of a million times over."""
    engine, folder = victim
    chunks = [Chunk(b"a" * 32, 16 * MIB, 2, 0, 0, 1000)]
    packs = [Pack(b"p" * 16, 1000, b"m" * 16)]
    bomb = entry(
        FILE, b"bomb", size=(1 << 18) * 16 * MIB, extents=(Extent(0, 0, 16 * MIB),) * 2**18
    )
    vast = honest(chunks=chunks, packs=packs, entries=[entry(DIRECTORY, b""), bomb])
    blob, _ = encode_manifest(vast, PLAIN)
    put_manifest(engine, blob)
    with pytest.raises(DiskFull, match="larger disk; nothing was written"):
        begin_from(engine, blob, folder / "t")
    assert list(folder.iterdir()) == []


# -- packs that lie


def _chunk_bomb(stored: bytes, encoding: int) -> Manifest:
    chunk = Chunk(PLAIN.name(bytes(100)), 100, encoding, 0, 0, len(stored))
    return honest(
        chunks=[chunk],
        packs=[Pack(b"p" * 16, len(stored), b"m" * 16)],
        entries=[
            entry(DIRECTORY, b""),
            entry(FILE, b"file", size=100, extents=(Extent(0, 0, 100),)),
        ],
    )


@pytest.mark.parametrize("encoding", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "stored",
    [bytes(100) + b"x", b"x" * 100, random.Random(1).randbytes(99)],
    ids=["too long", "another", "noise"],
)
def test_a_chunk_that_is_not_what_it_says_is_never_written(
    engine: Engine, tmp_path: Path, encoding: int, stored: bytes
) -> None:
    blob, _ = encode_manifest(_chunk_bomb(stored, encoding), PLAIN)
    put_manifest(engine, blob)
    engine.store.put(pack_key(WORKSPACE, b"p" * 16), stored)
    run, plan = begin_from(engine, blob, tmp_path / "t")
    with pytest.raises(SnapshotDamaged) as damaged:
        run.restore_part(plan.parts[0])
    assert "it holds file: run verify" in str(damaged.value)
    assert list((tmp_path / "t").iterdir()) == []


def _damage(engine: Engine, how: str) -> ObjectKey:
    key = min(found.key for found in engine.store.list(packs_prefix(WORKSPACE)))
    blob = bytearray(engine.store.get(key, max_bytes=1 << 30))
    if how == "gone":
        engine.store.delete([key])
        return key
    if how == "flipped":
        blob[len(blob) // 2] ^= 4
    kept = {"cut": len(blob) // 2, "empty": 0, "flipped": len(blob)}[how]
    engine.store.put(key, bytes(blob[:kept]))
    return key


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("how", ["gone", "cut", "empty", "flipped"])
def test_a_damaged_pack_is_named_and_its_files_are_not_written(
    engine: Engine,
    was: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    key: bytes | None,
) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    engine.store_key = key
    snapshot, back = engine.snapshot([was]), tmp_path / "back"
    pack = _damage(engine, how)
    run, plan = engine.begin_restore(snapshot, [back])
    (part,) = plan.parts
    with pytest.raises(TorporError) as damaged:
        run.restore_part(part)
    assert pack in str(damaged.value)
    for path, fact in facts(back).items():
        if fact.kind == "file":
            there = (back / path.decode()).read_bytes()
            assert there in (bytes(len(there)), (was / path.decode()).read_bytes())
    with pytest.raises(InvalidInput, match="still lacks"):
        run.finish()
