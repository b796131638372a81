"""Snapshots step by step: one at a time, agents that are killed, packs that go."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.kill_points import as_nobody
from tests.fixtures.manifests import honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import (
    Machines,
    comes_back,
    commit,
    commit_at_rest,
    manifest_of,
    packs_of,
    scan_and_store,
    store_parts,
)
from tests.fixtures.trees import content, let_settle
from torpor.machine.agent.call import Call
from torpor.shared.errors import (
    AgentLost,
    GrantExpired,
    ManifestInvalid,
    RunCancelled,
    SnapshotDamaged,
    WorkspaceBusy,
    WorkspaceInvalid,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import decode_manifest, encode_manifest
from torpor.shared.format.names import manifest_key, new_pack_key, pack_key
from torpor.shared.values import MIB, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    EndSnapshot,
    ListPacks,
    PartPlan,
    PartReport,
    StorePart,
)

KEY = bytes(range(32))
WIDE_FILES = 20
"""Of 4 MiB: two parts, two packs."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of two parts, which does not change."""
    wide = tmp_path_factory.mktemp("wide") / "was"
    wide.mkdir()
    for number in range(WIDE_FILES):
        (wide / str(number)).write_bytes(content(number, 4 * MIB))
    let_settle()
    return wide


# -- packs are written once


def test_a_part_that_is_asked_for_twice_with_the_same_grants_writes_no_pack_twice(
    engine: Engine, was: Path
) -> None:
    run = engine.begin([was])
    (part,) = run.scan(1).parts
    keys = [new_pack_key(WORKSPACE) for _ in range(part.packs)]
    store = StorePart(run.run, 1, part.part, [engine.grant("PUT", key) for key in keys])
    engine.call(store)
    first = engine.store.get(keys[0], max_bytes=64 * MIB)
    (was / "small").write_bytes(content(9, 3000))  # what is new has to go into some pack
    engine.call(store)
    assert engine.store.get(keys[0], max_bytes=64 * MIB) == first
    assert engine.store.head(keys[1]) is not None
    with pytest.raises(GrantExpired, match="more packs than it has grants for"):
        (was / "small").write_bytes(content(10, 3000))
        engine.call(store)


# -- one run at a time


def test_a_second_run_is_refused_until_the_first_has_ended(engine: Engine, was: Path) -> None:
    begin = BeginSnapshot("r", WORKSPACE, "", [str(was)], [], None, [])
    assert engine.call(begin) == engine.call(begin)
    with pytest.raises(WorkspaceBusy, match="run r works on workspace demo"):
        engine.begin([was])
    engine.call(msgspec.structs.replace(begin, run="s", workspace=WorkspaceName("other")))
    engine.call(EndSnapshot("r", committed=False))
    engine.begin([was])


def test_a_second_agent_is_refused_until_the_first_has_gone(
    engine: Engine, was: Path, machines: Machines
) -> None:
    engine.begin([was])
    other = machines(engine.store, engine.home)
    with pytest.raises(WorkspaceBusy, match="another agent on this machine"):
        other.begin([was])
    engine.restart()
    other.begin([was])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("missing", "does not exist on the machine"),
        ("empty", "is empty: there is nothing to keep"),
        ("file", "is a file, not a directory"),
    ],
)
def test_a_begin_that_fails_gives_the_workspace_back(
    engine: Engine, was: Path, bad: str, says: str
) -> None:
    (was.parent / "empty").mkdir()
    (was.parent / "file").write_text("x")
    with pytest.raises(WorkspaceInvalid, match=f"{was.parent / bad} .*{says}"):
        engine.begin([was.parent / bad])
    assert not engine.runs.active()
    engine.begin([was])


def test_an_ended_run_does_no_more_work(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    engine.runs.abandon(run.run, "its control side is gone")
    with pytest.raises(AgentLost, match="does not hold run"):
        engine.call(ListPacks(run.run))
    assert not engine.runs.active()


# -- agents that are killed


@pytest.mark.parametrize("same_run", [True, False], ids=["same run", "new run"])
@pytest.mark.parametrize(
    "killed_after", ["begin", "scan", "first part", "parts", "packs", "commit"]
)
def test_nothing_is_stored_twice_when_the_agent_was_killed(
    engine: Engine, wide: Path, killed_after: str, same_run: bool
) -> None:
    run = engine.begin([wide])
    stored = 0
    if killed_after != "begin":
        scan = run.scan(1)
        assert len(scan.parts) == 2
        parts = {"scan": 0, "first part": 1}.get(killed_after, 2)
        stored = sum(run.store_part(1, part).new_bytes for part in scan.parts[:parts])
    if killed_after in ("packs", "commit"):
        run.lost_packs()
    if killed_after == "commit":
        run.commit({})
    packs = packs_of(engine)
    engine.restart()
    with pytest.raises(AgentLost):
        engine.call(ListPacks(run.run))
    if same_run:
        run.begin()  # the control side asks the new agent for the run that it had
    else:
        run = engine.begin([wide])
    if killed_after != "begin":
        with pytest.raises(AgentLost):
            engine.call(ListPacks(run.run))
        assert run.store_part(1, PartPlan(0, 0, 1)).new_bytes == 0
    assert stored + scan_and_store(run, 2) == WIDE_FILES * 4 * MIB
    snapshot = commit_at_rest(run, 3)
    assert packs <= packs_of(engine) == named(engine, snapshot)
    assert len(packs_of(engine)) == 2


def named(engine: Engine, snapshot: SnapshotId) -> set[ObjectKey]:
    """The packs of a snapshot."""
    return {pack_key(WORKSPACE, pack.id) for pack in manifest_of(engine, snapshot).packs}


def test_a_part_that_was_cancelled_midway_is_continued(engine: Engine, was: Path) -> None:
    for number in range(20):
        (was / f"more-{number}").write_bytes(random.Random(number + 50).randbytes(MIB))
    run = engine.begin([was])
    scan = run.scan(1)
    grants = [engine.grant("PUT", new_pack_key(WORKSPACE)) for _ in range(3)]
    call = Call("id", engine.home, lambda event: call.cancel())
    with pytest.raises(RunCancelled):
        engine.table.serve(StorePart(run.run, 1, scan.parts[0].part, grants), call)
    assert packs_of(engine) == set()
    let_settle()
    store_parts(run, 1, scan)
    scan_and_store(run, 2)
    comes_back(engine, commit_at_rest(run, 3), was)


def test_a_repeated_part_stores_nothing_again(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    (part,) = run.scan(1).parts
    run.store_part(1, part)
    packs = packs_of(engine)
    assert run.store_part(1, part) == PartReport(0, 0)
    assert packs_of(engine) == packs


@pytest.mark.parametrize("lost", ["the end of the journal", "the pack"])
def test_a_pack_that_cannot_be_resumed_is_stored_again(
    engine: Engine, wide: Path, lost: str
) -> None:
    scan_and_store(engine.begin([wide]), 1)
    before = packs_of(engine)
    engine.restart()
    if lost == "the pack":
        gone = min(before)
        engine.store.delete([gone])
        before.discard(gone)
    else:
        journal = engine.home / "workspaces" / WORKSPACE / "journal"
        os.truncate(journal, journal.stat().st_size - 3)
    run = engine.begin([wide])
    scan_and_store(run, 2)
    assert len(packs_of(engine) - before) == 1
    there = named(engine, commit_at_rest(run, 3))
    assert len(there) == 2
    assert there <= packs_of(engine)


def test_a_commit_that_comes_again_writes_the_same_bytes(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan_and_store(run, 1)
    snapshot = SnapshotId("20261120T234913Z-00000001")
    key = manifest_key(WORKSPACE, snapshot)
    ask = Commit(run.run, snapshot, 1, {"passes": 7}, [], engine.grant("PUT", key))
    first = engine.call(ask)
    blob = engine.store.get(key, max_bytes=MIB)
    assert engine.call(ask) == first
    assert engine.store.get(key, max_bytes=MIB) == blob
    manifest = decode_manifest(blob, engine.seal, "it")[0]
    assert manifest.statistics["passes"] == 7
    assert manifest.statistics["files"] == 3
    assert manifest.statistics["stored_bytes"] == sum(c.stored for c in manifest.chunks)


# -- packs that go


@pytest.mark.parametrize("knows", ["this run's", "its parent's", "another machine's"])
def test_a_pack_that_is_lost_is_stored_again(
    engine: Engine, wide: Path, knows: str, machines: Machines
) -> None:
    if knows != "this run's":
        engine.snapshot([wide])
    if knows == "another machine's":
        engine = machines(engine.store, engine.home.with_name("other-home"))
    run = engine.begin([wide])
    scan = run.scan(1)
    assert (scan.unaccepted_count == 0) is (knows == "its parent's")
    assert (store_parts(run, 1, scan) == 0) is (knows != "this run's")
    lost, *rest = sorted(packs_of(engine))
    engine.store.delete([lost])
    assert run.lost_packs() == [lost]
    scan = run.scan(2, [lost])
    assert 0 < scan.unaccepted_count < WIDE_FILES
    assert store_parts(run, 2, scan) == sum(part.bytes for part in scan.parts)
    snapshot = commit_at_rest(run, 3)
    assert {*rest} < named(engine, snapshot) == packs_of(engine)
    assert len(packs_of(engine)) == 2
    comes_back(engine, snapshot, wide)


def test_packs_that_are_not_as_written_are_found_by_reading(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    scan_and_store(run, 1)
    packs = sorted(packs_of(engine))
    grants = [engine.grant("GET", key) for key in packs]
    assert run.reread(grants) == []
    flipped = bytearray(engine.store.get(packs[1], max_bytes=1 << 30))
    flipped[-1] ^= 1
    engine.store.put(packs[1], bytes(flipped))
    assert run.reread(grants) == [packs[1]]


# -- what earlier snapshots say


def test_what_an_earlier_snapshot_holds_is_not_stored_again(
    engine: Engine, was: Path, machines: Machines
) -> None:
    engine.snapshot([was])
    packs = packs_of(engine)
    (was / "copy-of-big").write_bytes((was / "big").read_bytes())
    let_settle()
    stranger = machines(engine.store, engine.home.with_name("other-home"))
    for machine in (engine, stranger):
        assert machine.hibernate([was]).new_bytes == 0
    assert packs_of(engine) == packs


@pytest.mark.parametrize(
    "doubt", ["seen", "manifest", "torn", "forgotten", "other roots", "its snapshot is gone"]
)
def test_an_index_that_may_be_wrong_is_not_believed(engine: Engine, was: Path, doubt: str) -> None:
    snapshot = engine.snapshot([was])
    folder = engine.home / "workspaces" / WORKSPACE
    if doubt == "other roots":
        was = was.rename(was.with_name("moved"))  # the very same inodes
    elif doubt == "its snapshot is gone":
        engine.store.delete([manifest_key(WORKSPACE, snapshot)])
    elif doubt == "forgotten":
        (folder / "seen").unlink()
    elif doubt == "torn":
        os.truncate(folder / "seen", (folder / "seen").stat().st_size // 2)
    else:
        blob = bytearray((folder / doubt).read_bytes())
        blob[len(blob) // 2] ^= 0xFF
        (folder / doubt).write_bytes(blob)
    run = engine.begin([was])
    scan = run.scan(1)
    assert scan.unaccepted_count == 3 or (doubt == "seen" and not scan.unaccepted_count)
    new_bytes = store_parts(run, 1, scan)
    if doubt == "its snapshot is gone":
        assert new_bytes == sum(part.bytes for part in scan.parts)
    run.scan(2)
    comes_back(engine, commit(run)[0], was)


def test_an_index_of_an_earlier_version_is_believed(engine: Engine, was: Path) -> None:
    """Its signatures were lists of numbers."""
    let_settle()
    engine.snapshot([was])
    seen = engine.home / "workspaces" / WORKSPACE / "seen"
    root, roots, packed = msgspec.msgpack.decode(seen.read_bytes())
    signatures = [[*one] if any(one) else None for one in struct.iter_unpack("=Q3q", packed)]
    seen.write_bytes(msgspec.msgpack.encode([root, roots, signatures]))
    assert engine.begin([was]).scan(1).unaccepted_count == 0


def test_the_index_is_not_believed_when_it_was_not_committed(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan_and_store(run, 1)
    commit(run)
    run.end(committed=False)
    assert engine.begin([was]).scan(1).unaccepted_count == 3


@pytest.mark.parametrize(("first", "then"), [(KEY, None), (None, KEY), (KEY, b"o" * 32)])
def test_another_key_is_reported_at_once(
    engine: Engine, was: Path, first: bytes | None, then: bytes | None
) -> None:
    engine.store_key = first
    engine.snapshot([was])
    engine.store_key = then
    run = engine.begin([was])
    with pytest.raises(WrongKey, match="store block"):
        run.scan(1)


def test_a_known_manifest_that_lies_is_refused(engine: Engine, was: Path) -> None:
    lie = honest(chunks=[msgspec.structs.replace(honest().chunks[0], pack=-1)])
    engine.store.put(manifest_key(WORKSPACE, lie.snapshot), encode_manifest(lie, Seal(None))[0])
    run = engine.begin([was])
    with pytest.raises(ManifestInvalid, match="in pack -1, which is not there"):
        run.scan(1)


def test_a_known_manifest_that_was_replaced_is_refused(engine: Engine, was: Path) -> None:
    key = manifest_key(WORKSPACE, honest().snapshot)
    engine.store.put(key, encode_manifest(honest(run="aaa"), Seal(None))[0])
    run = engine.begin([was])
    engine.store.put(key, encode_manifest(honest(run="bbb"), Seal(None))[0])
    with pytest.raises(SnapshotDamaged, match="is not the snapshot that the control side read"):
        run.scan(1)


def test_a_sealed_store_shows_nothing_of_the_workspace(engine: Engine, was: Path) -> None:
    engine.store_key = KEY
    (was / "secret-name").write_bytes(b"secret content " * 1000)
    let_settle()
    engine.snapshot([was])
    for found in engine.store.list(""):
        blob = engine.store.get(found.key, max_bytes=1 << 30)
        assert b"secret" not in blob


# -- as an ordinary user


@pytest.mark.parametrize("unreadable", ["", "d", "small", "big"])
def test_what_cannot_be_read_is_named(
    memory_store: MemoryStore, tmp_path: Path, was: Path, unreadable: str
) -> None:
    if unreadable != "big":
        (was / "big").unlink()  # it is read, and would be stored, first
    (was / unreadable).chmod(0)
    (tmp_path / "nobodys").mkdir()
    os.chown(tmp_path / "nobodys", 65534, 65534)

    def store() -> None:
        says = f"{was / unreadable}.* cannot be read: Permission denied; log in as its owner or as "
        with pytest.raises(WorkspaceInvalid, match=says):
            run = Engine(memory_store, tmp_path / "nobodys").begin([was])
            scan_and_store(run, 1)

    as_nobody(tmp_path, store)
