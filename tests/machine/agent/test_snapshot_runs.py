"""Snapshots step by step: one at a time, agents that are killed, packs that go."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.manifests import honest
from tests.fixtures.snapshots import Machines, comes_back, manifest_of, packs_of, store_parts
from tests.fixtures.trees import content, let_settle
from torpor.machine.agent.call import Call
from torpor.shared.errors import (
    AgentLost,
    GrantExpired,
    InvalidInput,
    ManifestInvalid,
    RunCancelled,
    SnapshotDamaged,
    WorkspaceBusy,
    WorkspaceInvalid,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Pack, decode_manifest, encode_manifest
from torpor.shared.format.names import manifest_key, new_pack_key, pack_key
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.snapshot import StorePart

KEY = bytes(range(32))
WIDE_FILES = 20
"""Of 4 MiB: two parts, two packs."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of two parts, which nobody changes."""
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
    (part,) = engine.scan(run, 1)["parts"]
    keys = [new_pack_key(WORKSPACE) for _ in range(part["packs"])]
    grants = [engine.grant("PUT", key) for key in keys]
    args: dict[str, Any] = {"run": run, "pass": 1, "part": part["part"], "packs": grants}
    engine.call("snapshot.part", **args)
    first = engine.store.get(keys[0], max_bytes=64 * MIB)
    (was / "small").write_bytes(content(9, 3000))  # what is new has to go into some pack
    engine.call("snapshot.part", **args)
    assert engine.store.get(keys[0], max_bytes=64 * MIB) == first
    assert engine.store.head(keys[1]) is not None
    with pytest.raises(GrantExpired, match="more packs than it has grants for"):
        (was / "small").write_bytes(content(10, 3000))
        engine.call("snapshot.part", **args)
    engine.call("snapshot.end", run=run, committed=False)


# -- one run at a time


def test_a_second_run_is_refused_until_the_first_has_ended(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    with pytest.raises(WorkspaceBusy, match=f"run {run} works on workspace demo"):
        engine.begin([was])
    engine.call("snapshot.end", run=run, committed=False)
    engine.begin([was])


def test_a_second_agent_is_refused_until_the_first_has_gone(engine: Engine, was: Path) -> None:
    engine.begin([was])
    other = Engine(engine.store, engine.home)
    with pytest.raises(WorkspaceBusy, match="another agent on this machine"):
        other.begin([was])
    engine.restart()
    other.begin([was])


def test_another_workspace_is_another_matter(engine: Engine, was: Path) -> None:
    engine.begin([was])
    args = {"roots": [str(was)], "exclude": [], "key": None, "known": []}
    engine.call("snapshot.begin", run="other", workspace="other", **args)


def test_begin_is_idempotent(engine: Engine, was: Path) -> None:
    args: dict[str, Any] = {
        "run": "r",
        "workspace": WORKSPACE,
        "roots": [str(was)],
        "exclude": [],
        "key": None,
        "known": [],
    }
    first = engine.call("snapshot.begin", **args)
    assert engine.call("snapshot.begin", **args) == first


@pytest.mark.parametrize("bad", ["missing", "empty", "file"])
def test_a_begin_that_fails_gives_the_workspace_back(engine: Engine, was: Path, bad: str) -> None:
    (was.parent / "empty").mkdir()
    (was.parent / "file").write_text("x")
    with pytest.raises(WorkspaceInvalid, match=str(was.parent / bad)):
        engine.begin([was.parent / bad])
    assert not engine.runs.active()
    engine.begin([was])


def test_an_ended_run_does_no_more_work(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    engine.runs.abandon(run, "its control side is gone")
    with pytest.raises(AgentLost, match="does not hold run"):
        engine.scan(run, 1)
    assert not engine.runs.active()


def test_a_request_that_does_not_fit_the_protocol_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match="does not fit the agent's protocol"):
        engine.call("snapshot.begin", run="r")
    with pytest.raises(InvalidInput, match="not an object name"):
        grant = engine.grant("GET", new_pack_key(WORKSPACE)) | {"key": "../../etc/passwd"}
        engine.call(
            "snapshot.begin",
            run="r",
            workspace=WORKSPACE,
            roots=["/x"],
            exclude=[],
            key=None,
            known=[{"root": "00" * 32, "bytes": 1, "grant": grant}],
        )


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
        scan = engine.scan(run, 1)
        assert len(scan["parts"]) == 2
        parts = {"scan": 0, "first part": 1}.get(killed_after, 2)
        stored = sum(engine.part(run, 1, part)["new_bytes"] for part in scan["parts"][:parts])
    if killed_after in ("packs", "commit"):
        engine.call("snapshot.packs", run=run)
    if killed_after == "commit":
        engine.commit(run)
    packs = packs_of(engine)
    engine.restart()

    with pytest.raises(AgentLost):
        engine.scan(run, 2)
    run = _begin_again(engine, wide, run) if same_run else engine.begin([wide])
    if killed_after != "begin":
        with pytest.raises(AgentLost):
            engine.call("snapshot.packs", run=run)
        assert engine.part(run, 1, {"part": 0, "packs": 1})["new_bytes"] == 0
    scan = engine.scan(run, 2)
    reports = store_parts(engine, run, 2, scan)
    assert engine.scan(run, 3)["read_files"] == 0
    snapshot, _ = engine.commit(run)
    engine.call("snapshot.end", run=run, committed=True)

    assert stored + sum(report["new_bytes"] for report in reports) == WIDE_FILES * 4 * MIB
    assert packs <= packs_of(engine)
    assert len(packs_of(engine)) == 2
    named = {pack_key(WORKSPACE, pack.id) for pack in manifest_of(engine, snapshot).packs}
    assert named == packs_of(engine)


def _begin_again(engine: Engine, root: Path, run: str) -> str:
    """The control side asks the new agent for the run that it had."""
    engine.begun = engine.call(
        "snapshot.begin",
        run=run,
        workspace=WORKSPACE,
        roots=[str(root)],
        exclude=[],
        key=engine.key,
        known=engine.known(),
    )
    return run


def test_a_part_that_was_cancelled_midway_is_taken_up(engine: Engine, was: Path) -> None:
    for number in range(20):
        (was / f"more-{number}").write_bytes(random.Random(number + 50).randbytes(MIB))
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    part = scan["parts"][0]["part"]
    keys = [new_pack_key(WORKSPACE) for _ in range(3)]
    grants = [engine.store.grant("PUT", key, expires_s=3600) for key in keys]
    calls: list[Call] = []
    calls.append(Call("id", engine.home, lambda event: calls[0].cancel()))
    with pytest.raises(RunCancelled):
        engine.table.serve(StorePart(run, 1, part, grants), calls[0])
    assert packs_of(engine) == set()
    let_settle()
    store_parts(engine, run, 1, scan)
    store_parts(engine, run, 2, engine.scan(run, 2))
    assert engine.scan(run, 3)["read_files"] == 0
    snapshot, _ = engine.commit(run)
    comes_back(engine, snapshot, was)


def test_a_part_without_enough_grants_says_so_and_is_repeated(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    with pytest.raises(GrantExpired, match="more packs than it has grants for"):
        engine.part(run, 1, scan["parts"][0] | {"packs": 0})
    store_parts(engine, run, 1, scan)
    assert engine.scan(run, 2)["read_files"] == 0
    comes_back(engine, engine.commit(run)[0], was)


def test_a_repeated_part_stores_nothing_again(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    store_parts(engine, run, 1, scan)
    packs = packs_of(engine)
    (report,) = store_parts(engine, run, 1, scan)
    assert report == {"new_bytes": 0, "stored_bytes": 0}
    assert packs_of(engine) == packs


def test_a_torn_journal_costs_one_pack(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    store_parts(engine, run, 1, engine.scan(run, 1))
    journal = engine.home / "workspaces" / WORKSPACE / "journal"
    os.truncate(journal, journal.stat().st_size - 3)
    engine.restart()
    run = engine.begin([wide])
    assert len(engine.begun["resumable"]) == 1
    before = packs_of(engine)
    store_parts(engine, run, 2, engine.scan(run, 2))
    assert len(packs_of(engine) - before) == 1
    assert engine.scan(run, 3)["read_files"] == 0


def test_a_journaled_pack_that_is_gone_is_not_resumed(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    store_parts(engine, run, 1, engine.scan(run, 1))
    engine.restart()
    run = engine.begin([wide])
    gone, *there = [pack["key"] for pack in engine.begun["resumable"]]
    engine.store.delete([gone])
    before = packs_of(engine)
    store_parts(engine, run, 2, engine.scan(run, 2, resumed=there))
    assert len(packs_of(engine) - before) == 1
    engine.scan(run, 3)
    snapshot, _ = engine.commit(run)
    named = {pack_key(WORKSPACE, pack.id) for pack in manifest_of(engine, snapshot).packs}
    assert gone not in named
    assert named == packs_of(engine)


def test_a_commit_that_comes_again_writes_the_same_bytes(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    store_parts(engine, run, 1, engine.scan(run, 1))
    args: dict[str, Any] = {
        "run": run,
        "snapshot": "20261120T234913Z-00000001",
        "parent": None,
        "created_unix": 1,
        "statistics": {"passes": 7},
        "accepted": [],
    }
    key = manifest_key(WORKSPACE, SnapshotId("20261120T234913Z-00000001"))
    first = engine.call("snapshot.commit", **args, grant=engine.grant("PUT", key))
    blob = engine.store.get(key, max_bytes=MIB)
    assert engine.call("snapshot.commit", **args, grant=engine.grant("PUT", key)) == first
    assert engine.store.get(key, max_bytes=MIB) == blob
    manifest = decode_manifest(blob, engine.seal, "it")[0]
    assert manifest.statistics["passes"] == 7
    assert manifest.statistics["files"] == 3
    assert manifest.statistics["stored_bytes"] == sum(c.stored for c in manifest.chunks)


# -- packs that go


def test_a_pack_lost_between_passes_is_stored_anew(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    store_parts(engine, run, 1, engine.scan(run, 1))
    lost, *rest = engine.call("snapshot.packs", run=run)["packs"]
    engine.store.delete([lost["key"]])
    scan = engine.scan(run, 2, lost=[lost["key"]])
    assert 0 < scan["read_files"] < WIDE_FILES
    reports = store_parts(engine, run, 2, scan)
    assert sum(report["new_bytes"] for report in reports) == sum(
        part["bytes"] for part in scan["parts"]
    )
    assert engine.scan(run, 3)["read_files"] == 0
    claimed = {pack["key"] for pack in engine.call("snapshot.packs", run=run)["packs"]}
    assert lost["key"] not in claimed
    assert {pack["key"] for pack in rest} < claimed == packs_of(engine)
    comes_back(engine, engine.commit(run)[0], wide)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_lost_pack_of_the_parent_is_stored_anew(
    engine: Engine, wide: Path, with_index: bool, machines: Machines
) -> None:
    engine.snapshot([wide])
    if not with_index:
        engine = machines(engine.store, engine.home.with_name("other-home"))
    run = engine.begin([wide])
    scan = engine.scan(run, 1)
    assert (scan["read_files"] == 0) is with_index
    assert sum(report["new_bytes"] for report in store_parts(engine, run, 1, scan)) == 0
    lost = engine.call("snapshot.packs", run=run)["packs"][1]["key"]
    engine.store.delete([lost])
    scan = engine.scan(run, 2, lost=[lost])
    assert 0 < scan["read_files"] < WIDE_FILES
    store_parts(engine, run, 2, scan)
    assert engine.scan(run, 3)["read_files"] == 0
    assert len(engine.call("snapshot.packs", run=run)["packs"]) == 2
    snapshot, _ = engine.commit(run)
    named = {pack_key(WORKSPACE, pack.id) for pack in manifest_of(engine, snapshot).packs}
    assert lost not in named
    assert named == packs_of(engine)


def test_packs_that_are_not_as_written_are_found_by_reading(engine: Engine, wide: Path) -> None:
    run = engine.begin([wide])
    store_parts(engine, run, 1, engine.scan(run, 1))
    packs = [pack["key"] for pack in engine.call("snapshot.packs", run=run)["packs"]]
    grants = [engine.grant("GET", key) for key in packs]
    assert engine.call("snapshot.reread", run=run, packs=grants) == {"wrong": []}
    flipped = bytearray(engine.store.get(packs[1], max_bytes=1 << 30))
    flipped[-1] ^= 1
    engine.store.put(packs[1], bytes(flipped))
    assert engine.call("snapshot.reread", run=run, packs=grants) == {"wrong": [packs[1]]}


# -- what earlier snapshots say


def test_what_an_earlier_snapshot_holds_is_not_stored_again(
    engine: Engine, was: Path, machines: Machines
) -> None:
    engine.snapshot([was])
    packs = packs_of(engine)
    (was / "copy-of-big").write_bytes((was / "big").read_bytes())
    let_settle()
    engine.snapshot([was])
    assert sum(report["new_bytes"] for report in engine.reports) == 0
    stranger = machines(engine.store, engine.home.with_name("other-home"))
    stranger.snapshot([was])
    assert sum(report["new_bytes"] for report in stranger.reports) == 0
    assert packs_of(engine) == packs


@pytest.mark.parametrize("damage", ["seen", "manifest", "torn", "forgotten"])
def test_a_damaged_index_is_not_believed(engine: Engine, was: Path, damage: str) -> None:
    engine.snapshot([was])
    folder = engine.home / "workspaces" / WORKSPACE
    if damage == "forgotten":
        (folder / "seen").unlink()
    elif damage == "torn":
        os.truncate(folder / "seen", (folder / "seen").stat().st_size // 2)
    else:
        blob = bytearray((folder / damage).read_bytes())
        blob[len(blob) // 2] ^= 0xFF
        (folder / damage).write_bytes(blob)
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    if damage != "seen" or scan["read_files"]:
        assert scan["read_files"] == 3
    store_parts(engine, run, 1, scan)
    engine.scan(run, 2)
    comes_back(engine, engine.commit(run)[0], was)


def test_the_index_is_not_believed_for_other_roots(engine: Engine, was: Path) -> None:
    engine.snapshot([was])
    moved = was.rename(was.with_name("moved"))  # the very same inodes
    run = engine.begin([moved])
    assert engine.scan(run, 1)["read_files"] == 3
    engine.call("snapshot.end", run=run, committed=False)
    moved.rename(was)
    run = engine.begin([was])
    assert engine.scan(run, 1)["read_files"] == 0


def test_the_index_is_not_believed_when_its_snapshot_is_gone(engine: Engine, was: Path) -> None:
    snapshot = engine.snapshot([was])
    engine.store.delete([manifest_key(WORKSPACE, snapshot)])
    run = engine.begin([was])
    scan = engine.scan(run, 1)
    assert scan["read_files"] == 3
    reports = store_parts(engine, run, 1, scan)
    assert sum(report["new_bytes"] for report in reports) == sum(
        part["bytes"] for part in scan["parts"]
    )


def test_the_index_is_not_believed_when_it_was_not_committed(engine: Engine, was: Path) -> None:
    run = engine.begin([was])
    store_parts(engine, run, 1, engine.scan(run, 1))
    engine.commit(run)
    engine.call("snapshot.end", run=run, committed=False)
    run = engine.begin([was])
    assert engine.scan(run, 1)["read_files"] == 3


@pytest.mark.parametrize(("first", "then"), [(KEY, None), (None, KEY), (KEY, b"o" * 32)])
def test_another_key_is_said_at_once(
    engine: Engine, was: Path, first: bytes | None, then: bytes | None
) -> None:
    engine.store_key = first
    engine.snapshot([was])
    engine.store_key = then
    run = engine.begin([was])
    with pytest.raises(WrongKey, match="store block"):
        engine.scan(run, 1)


def test_a_known_manifest_that_lies_is_refused(engine: Engine, was: Path) -> None:
    lie = honest(chunks=[msgspec.structs.replace(honest().chunks[0], pack=-1)])
    engine.store.put(manifest_key(WORKSPACE, lie.snapshot), encode_manifest(lie, Seal(None))[0])
    run = engine.begin([was])
    with pytest.raises(ManifestInvalid, match="in pack -1, which is not there"):
        engine.scan(run, 1)


def test_a_known_manifest_that_was_replaced_is_refused(engine: Engine, was: Path) -> None:
    key = manifest_key(WORKSPACE, honest().snapshot)
    engine.store.put(key, encode_manifest(honest(run="aaa"), Seal(None))[0])
    run = engine.begin([was])
    engine.store.put(key, encode_manifest(honest(run="bbb"), Seal(None))[0])
    with pytest.raises(SnapshotDamaged, match="is not the snapshot that the control side read"):
        engine.scan(run, 1)


def test_a_sealed_store_shows_nothing_of_the_workspace(engine: Engine, was: Path) -> None:
    engine.store_key = KEY
    (was / "secret-name").write_bytes(b"secret content " * 1000)
    let_settle()
    engine.snapshot([was])
    for found in engine.store.list(""):
        blob = engine.store.get(found.key, max_bytes=1 << 30)
        assert b"secret" not in blob
    packs = [p for s in engine.snapshots() for p in manifest_of(engine, s).packs]
    assert all(isinstance(pack, Pack) for pack in packs)


# -- as an ordinary user

_AS_NOBODY = """
import json, os, sys
from pathlib import Path
from torpor.machine.agent.operations import operations
from torpor.machine.agent.call import Call
from torpor.machine.agent.runs import RunRegistry
from torpor.shared.errors import TorporError
home, root = Path(sys.argv[1]), sys.argv[2]
table = operations(RunRegistry(home))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def call(op, **args):
    return table.serve(table.parse(op, args), Call("id", home, lambda event: None))
try:
    call("snapshot.begin", run="r", workspace="demo", roots=[root], exclude=[], key=None, known=[])
    scan = call("snapshot.scan", run="r", **{"pass": 1}, max_parts=1, part_bytes=1 << 20,
                resumed=[], lost=[], accepted=[])
    call("snapshot.part", run="r", **{"pass": 1}, part=0, packs=[])
except TorporError as error:
    json.dump(error.to_wire(), sys.stdout)
"""


@pytest.mark.parametrize("unreadable", ["", "d", "small", "big"])
def test_what_cannot_be_read_is_named(tmp_path: Path, was: Path, unreadable: str) -> None:
    if unreadable != "big":
        (was / "big").unlink()  # it is read, and would be stored, first
    (was / unreadable).chmod(0)
    home = tmp_path / "home"
    home.mkdir()
    for folder in (home, *tmp_path.parents[:3], tmp_path):
        folder.chmod(0o777 if folder == home else 0o755)
    argv = [sys.executable, "-c", _AS_NOBODY, str(home), str(was)]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60, text=True)
    assert done.returncode == 0, done.stderr
    error = json.loads(done.stdout)
    assert error["type"] == "WorkspaceInvalid"
    assert str(was / unreadable) in error["message"]
    assert "cannot be read: Permission denied; log in as its owner or as root" in error["message"]
