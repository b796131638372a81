"""Snapshots step by step: one at a time, agents that are killed, packs that go."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
    store_rest,
)
from tests.fixtures.trees import content, let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.agent.call import Call
from torpor.machine.pipeline import upload
from torpor.shared.errors import (
    AgentLost,
    GrantExpired,
    MachineError,
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
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.request import Event
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    EndSnapshot,
    ListPacks,
    StorePasses,
)

KEY = bytes(range(32))
WIDE_FILES = 20
"""Of 4 MiB."""
WIDE_PACKS = 10
"""One of each share, which holds at least 8 MiB."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of several shares, which does not change."""
    wide = tmp_path_factory.mktemp("wide") / "was"
    wide.mkdir()
    for number in range(WIDE_FILES):
        (wide / str(number)).write_bytes(content(number, 4 * MIB))
    let_settle()
    return wide


# -- packs are written once


def test_a_request_that_comes_again_with_the_same_grants_writes_no_pack_twice(
    engine: Engine, was: Path
) -> None:
    run = engine.begin([was])
    keys = [new_pack_key(WORKSPACE) for _ in range(2)]
    store = StorePasses(run.run, 1, [engine.grant("PUT", key) for key in keys], [], [], [], [])
    assert (engine.call(store).passes, engine.store.head(keys[1])) == (1, None)
    first = engine.store.get(keys[0], max_bytes=64 * MIB)
    (was / "small").write_bytes(content(9, 3000))  # what is new has to go into some pack
    engine.call(store)
    assert engine.store.get(keys[0], max_bytes=64 * MIB) == first
    assert engine.store.head(keys[1]) is not None
    (was / "small").write_bytes(content(10, 3000))
    more = engine.call(store)
    assert (more.passes, more.packs, more.stored) == (0, 2, keys[0])
    assert "more packs than it has grants for" in more.why


# -- one run at a time


@pytest.mark.rule(6)
def test_a_second_run_is_refused_until_the_first_has_ended(engine: Engine, was: Path) -> None:
    begin = BeginSnapshot("r", WORKSPACE, "", [str(was)], [], None, [])
    assert engine.call(begin) == engine.call(begin)
    with pytest.raises(WorkspaceBusy, match="run r works on workspace demo"):
        engine.begin([was])
    engine.call(msgspec.structs.replace(begin, run="s", workspace=WorkspaceName("other")))
    engine.call(EndSnapshot("r", committed=False))
    engine.begin([was])


@pytest.mark.rule(6)
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
@pytest.mark.parametrize("killed_after", ["begin", "scan", "first pack", "pass", "packs", "commit"])
def test_nothing_is_stored_twice_when_the_agent_was_killed(
    engine: Engine, wide: Path, killed_after: str, same_run: bool
) -> None:
    run = engine.begin([wide])
    stored = 0
    if killed_after != "begin":
        seen = run.walk()
        if killed_after != "scan":
            packs_given = 1 if killed_after == "first pack" else seen.packs
            stored = store_rest(engine, run, seen, packs_given)
    if killed_after in ("packs", "commit"):
        run.unusable_packs()
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
    assert stored + scan_and_store(run) == WIDE_FILES * 4 * MIB
    snapshot = commit_at_rest(run)
    assert packs <= packs_of(engine) == named(engine, snapshot)
    assert len(packs_of(engine)) == WIDE_PACKS


def named(engine: Engine, snapshot: SnapshotId) -> set[ObjectKey]:
    """The packs of a snapshot."""
    return {pack_key(WORKSPACE, pack.id) for pack in manifest_of(engine, snapshot).packs}


def test_a_pass_that_was_cancelled_midway_is_made_again(engine: Engine, was: Path) -> None:
    for number in range(20):
        (was / f"more-{number}").write_bytes(random.Random(number + 50).randbytes(MIB))
    run = engine.begin([was])
    grants = [engine.grant("PUT", new_pack_key(WORKSPACE)) for _ in range(9)]

    def cancel(event: Event) -> None:
        if event.bytes:
            call.cancel()

    call = Call("id", engine.home, cancel)
    with pytest.raises(RunCancelled):
        engine.table.serve(StorePasses(run.run, 1, grants, [], [], [], []), call)
    assert packs_of(engine) == set()
    let_settle()
    scan_and_store(run)
    comes_back(engine, commit_at_rest(run), was)


def test_a_pass_goes_on_where_its_grants_were_used_up(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    seen = run.walk()
    for packs in (1, 3, 20):
        assert seen.packs
        keys = [new_pack_key(WORKSPACE) for _ in range(packs)]
        grants = [engine.grant("PUT", key) for key in keys]
        before = packs_of(engine)
        seen = engine.call(StorePasses(run.run, 1, grants, [], [], [], []))
        assert (seen.stored in packs_of(engine) - before) is bool(seen.packs)
    assert (seen.passes, seen.new_bytes) == (1, WIDE_FILES * 4 * MIB)
    comes_back(engine, commit_at_rest(run), wide)


def _puts(monkeypatch: pytest.MonkeyPatch, ended: Callable[[int], bool]) -> list[ObjectKey]:
    """The packs that are sent; those whose number has ``ended`` are refused."""
    put, sent = Transfer.put, list[ObjectKey]()

    def late(transfer: Transfer, grant: Grant, *args: Any) -> None:
        sent.append(grant.key)
        if ended(len(sent)):
            raise GrantExpired("an hour is over")
        put(transfer, grant, *args)

    monkeypatch.setattr(Transfer, "put", late)
    return sent


def test_a_grant_that_ends_in_the_middle_of_a_pass_is_replaced(
    engine: Engine, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.begin([wide])
    with monkeypatch.context() as patch:
        sent = _puts(patch, lambda number: number == 3)
        seen = run.store(1)
    assert (seen.passes, seen.new_bytes) == (1, WIDE_FILES * 4 * MIB)
    assert packs_of(engine) == {*sent} - {sent[2]}
    comes_back(engine, commit_at_rest(run), wide)


def test_grants_that_all_have_ended_end_the_passes(
    engine: Engine, was: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.begin([was])
    with monkeypatch.context() as patch:
        sent = _puts(patch, lambda number: True)
        with pytest.raises(GrantExpired, match="has stored none with the last ones: an hour is"):
            run.store(3)
    assert len(sent) == 1
    assert run.store(3).passes == 2


def test_a_pass_waits_for_workers_that_others_have(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    with ThreadPoolExecutor(1) as threads:
        with ExitStack() as busy:
            for _ in range(engine.runs.workers):
                busy.enter_context(engine.runs.worker(lambda: None))
            stored = threads.submit(run.store, 1)
            with pytest.raises(TimeoutError):
                stored.result(0.5)
        assert stored.result(PATIENCE_S).passes == 1


def test_passes_end_when_nothing_is_new_or_when_all_are_made(engine: Engine, was: Path) -> None:
    run, pass_numbers = engine.begin([was]), set[int]()

    def change(event: Event) -> None:
        pass_numbers.add(event.pass_number)
        if event.total:
            with (was / "small").open("ab") as file:
                file.write(b"more")

    changing = run.store(3, on_event=change)
    assert (changing.passes, changing.unaccepted, pass_numbers) == (3, ["small"], {1, 2, 3})
    let_settle()
    calm = run.store(5)
    assert (calm.passes, calm.unaccepted_count) == (2, 0)
    comes_back(engine, commit_at_rest(run), was)


def test_a_share_that_fails_stops_the_others(
    engine: Engine, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise MachineError("the disk is broken")

    run = engine.begin([wide])
    with monkeypatch.context() as broken:
        broken.setattr(upload, "read_at", fail)
        with pytest.raises(MachineError, match="the disk is broken"):
            run.store(1)
    assert packs_of(engine) == set()
    assert scan_and_store(run) == WIDE_FILES * 4 * MIB


@pytest.mark.parametrize("lost", ["the end of the journal", "the pack"])
def test_a_pack_that_cannot_be_resumed_is_stored_again(
    engine: Engine, wide: Path, lost: str
) -> None:
    scan_and_store(engine.begin([wide]))
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
    scan_and_store(run)
    assert len(packs_of(engine) - before) == 1
    there = named(engine, commit_at_rest(run))
    assert len(there) == WIDE_PACKS
    assert there <= packs_of(engine)


def test_a_commit_that_comes_again_writes_the_same_bytes(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan_and_store(run)
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
    seen = run.store(1)
    assert (seen.unaccepted_count == 0) is (knows == "its parent's")
    assert (seen.new_bytes == 0) is (knows != "this run's")
    lost, *rest = sorted(packs_of(engine))
    engine.store.delete([lost])
    assert run.unusable_packs() == [lost]
    before = seen.new_bytes
    seen = run.store(1, [lost])
    assert 0 < seen.unaccepted_count < WIDE_FILES
    assert seen.new_bytes - before == seen.unaccepted_count * 4 * MIB
    snapshot = commit_at_rest(run)
    assert {*rest} < named(engine, snapshot) == packs_of(engine)
    comes_back(engine, snapshot, wide)


def test_packs_that_are_not_as_written_are_found_by_reading(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    scan_and_store(run)
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
    seen = run.store(1)
    # a flipped bit of the index may be of a path, or of one file's signature
    assert seen.unaccepted_count == 3 or (doubt == "seen" and seen.unaccepted_count <= 1)
    if doubt == "its snapshot is gone":
        assert seen.new_bytes == 5 * MIB + 3000 + 2000
    run.store(1)
    comes_back(engine, commit(run)[0], was)


def test_an_index_of_an_earlier_version_is_believed(engine: Engine, was: Path) -> None:
    """Its signatures were lists of numbers."""
    let_settle()
    engine.snapshot([was])
    seen = engine.home / "workspaces" / WORKSPACE / "seen"
    root, roots, packed = msgspec.msgpack.decode(seen.read_bytes())
    signatures = [[*one] if any(one) else None for one in struct.iter_unpack("=Q3q", packed)]
    seen.write_bytes(msgspec.msgpack.encode([root, roots, signatures]))
    assert engine.begin([was]).store(1).unaccepted_count == 0


def test_the_index_is_not_believed_when_it_was_not_committed(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan_and_store(run)
    commit(run)
    run.end(committed=False)
    assert engine.begin([was]).store(1).unaccepted_count == 3


@pytest.mark.parametrize(("first", "then"), [(KEY, None), (None, KEY), (KEY, b"o" * 32)])
def test_another_key_is_reported_at_once(
    engine: Engine, was: Path, first: bytes | None, then: bytes | None
) -> None:
    engine.store_key = first
    engine.snapshot([was])
    engine.store_key = then
    run = engine.begin([was])
    with pytest.raises(WrongKey, match="store block"):
        run.store(1)


def test_a_known_manifest_that_lies_is_refused(engine: Engine, was: Path) -> None:
    lie = honest(chunks=[msgspec.structs.replace(honest().chunks[0], pack=-1)])
    engine.store.put(manifest_key(WORKSPACE, lie.snapshot), encode_manifest(lie, Seal(None))[0])
    run = engine.begin([was])
    with pytest.raises(ManifestInvalid, match="in pack -1, which is not there"):
        run.store(1)


def test_a_known_manifest_that_was_replaced_is_refused(engine: Engine, was: Path) -> None:
    key = manifest_key(WORKSPACE, honest().snapshot)
    engine.store.put(key, encode_manifest(honest(run="aaa"), Seal(None))[0])
    run = engine.begin([was])
    engine.store.put(key, encode_manifest(honest(run="bbb"), Seal(None))[0])
    with pytest.raises(SnapshotDamaged, match="is not the snapshot that the control side read"):
        run.store(1)


def test_a_sealed_store_shows_nothing_of_the_workspace(engine: Engine, was: Path) -> None:
    engine.store_key = KEY
    (was / "secret-name").write_bytes(b"secret content " * 1000)
    let_settle()
    engine.snapshot([was])
    for found in engine.store.list(""):
        blob = engine.store.get(found.key, max_bytes=1 << 30)
        assert b"secret" not in blob


# -- as an ordinary user


@pytest.mark.rule(3)
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
            scan_and_store(run)

    as_nobody(tmp_path, store)
