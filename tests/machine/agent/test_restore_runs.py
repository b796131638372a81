"""Restores step by step: targets, interruptions, symlink tricks, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.snapshots import begin_from, put_manifest
from tests.fixtures.stores import Server
from tests.fixtures.trees import content, differences, facts, kept, let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.remote.restore import RemoteRestore
from torpor.control.store.s3 import S3Store
from torpor.machine.agent.call import Call
from torpor.shared.errors import (
    AgentLost,
    DiskFull,
    InvalidInput,
    RestoreUnfinished,
    RunCancelled,
    WorkspaceBusy,
    WorkspaceInvalid,
)
from torpor.shared.format.manifest import DIRECTORY, encode_manifest
from torpor.shared.values import MIB, SnapshotId
from torpor.shared.wire.request import Event
from torpor.shared.wire.restore import (
    Checked,
    CheckRestore,
    FetchPart,
    RestorePart,
    RestorePlan,
)

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def store(seaweed: Server) -> S3Store:
    """One bucket for all that only reads; ``engine`` has one of its own."""
    return seaweed.store()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts' worth: big files, small ones, links, a hole, a directory for attributes."""
    wide = tmp_path_factory.mktemp("wide") / "was"
    (wide / "d/deep").mkdir(parents=True)
    for number in range(15):
        (wide / f"d/{number}").write_bytes(content(number, 4 * MIB))
    for number in range(50):
        (wide / f"d/deep/{number}").write_bytes(content(number + 100, 3000))
    (wide / "big").write_bytes(content(200, 13 * MIB))
    (wide / "link").symlink_to("d/deep")
    os.link(wide / "d/0", wide / "same")
    with (wide / "sparse").open("wb") as file:
        file.truncate(30 * MIB)
        os.pwrite(file.fileno(), b"end", 20 * MIB)
    (wide / "d/deep").chmod(0o711)
    (wide / "d").chmod(0o555)
    let_settle()
    return wide


@pytest.fixture(scope="module")
def stored(store: S3Store, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> SnapshotId:
    """The snapshot of ``wide`` in ``store``."""
    engine = Engine(store, tmp_path_factory.mktemp("first") / "home")
    snapshot = engine.snapshot([wide])
    engine.runs.close()
    return snapshot


@pytest.fixture
def woken(store: S3Store, stored: SnapshotId, tmp_path: Path) -> Iterator[Engine]:
    """Another machine over the same store, on which nothing has been restored yet."""
    engine = Engine(store, tmp_path / "woken")
    yield engine
    engine.runs.close()


def _finish(run: RemoteRestore) -> Checked:
    run.finish()
    checked = run.check(full=True)
    run.end()
    return checked


# -- targets


def test_a_target_that_is_not_empty_is_refused(
    woken: Engine, stored: SnapshotId, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    before = facts(tmp_path / "full")
    with pytest.raises(InvalidInput, match=r"is not empty on the machine \(it holds b'mine'\)"):
        woken.begin_restore(stored, [tmp_path / "full"])
    with pytest.raises(InvalidInput, match="is a file on the machine"):
        woken.begin_restore(stored, [tmp_path / "file"])
    assert facts(tmp_path / "full") == before
    assert (tmp_path / "file").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    woken.begin_restore(stored, [tmp_path / "empty"])


def test_targets_must_be_as_many_as_roots_and_apart(engine: Engine, tmp_path: Path) -> None:
    entries = [entry(DIRECTORY, b""), entry(DIRECTORY, b"", root=1)]
    blob, _ = encode_manifest(honest(roots=["~/a", "~/b"], entries=entries), PLAIN)
    put_manifest(engine, blob)
    with pytest.raises(InvalidInput, match=r"has 2 directories .* and 1 targets were named"):
        begin_from(engine, blob, tmp_path / "one")
    for pair in (("t", "t"), ("t", "t/below"), ("t/below", "t"), ("t", "x/../t")):
        with pytest.raises(InvalidInput, match="overlap"):
            begin_from(engine, blob, *(tmp_path / name for name in pair))
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
    begin_from(engine, blob, tmp_path / "t", tmp_path / "tt")


def test_begin_is_idempotent_and_a_second_run_is_refused(
    woken: Engine, stored: SnapshotId, tmp_path: Path
) -> None:
    run, plan = woken.begin_restore(stored, [tmp_path / "back"])
    assert run.begin() == plan
    with pytest.raises(WorkspaceBusy):
        woken.begin_restore(stored, [tmp_path / "other"])
    with pytest.raises(WorkspaceBusy):
        woken.begin([tmp_path])
    for part in plan.parts:
        run.restore_part(part)
    assert _finish(run).differences == []


# -- interruptions


@pytest.mark.parametrize("same_run", [True, False], ids=["same run", "new run"])
@pytest.mark.parametrize(
    "killed_after", ["begin", "first part", "half a part", "parts", "finish", "check"]
)
def test_nothing_is_fetched_twice_when_the_agent_was_killed(
    woken: Engine,
    stored: SnapshotId,
    wide: Path,
    tmp_path: Path,
    killed_after: str,
    same_run: bool,
) -> None:
    back = tmp_path / "back"
    run, whole = woken.begin_restore(stored, [back])
    assert len(whole.parts) == 2
    fetched = 0
    parts = {"begin": 0, "first part": 1, "half a part": 1}.get(killed_after, 2)
    for part in whole.parts[:parts]:
        run.restore_part(part)
        fetched += part.bytes
    if killed_after == "half a part":
        fetched += _half_a_part(woken, run.run, whole.parts[1])
    if killed_after in ("finish", "check"):
        run.finish()
    if killed_after == "check":
        assert run.check(full=True).differences == []
    woken.restart()

    with pytest.raises(AgentLost):
        woken.call(CheckRestore(run.run, full=True))
    run, rest = woken.begin_restore(stored, [back], run.run if same_run else None, resume=True)
    assert _plain_bytes(rest) == _plain_bytes(whole) - fetched
    for part in rest.parts:
        run.restore_part(part)
        fetched += part.bytes
    assert fetched == _plain_bytes(whole)
    assert _finish(run).differences == []
    assert differences(kept(wide), facts(back)) == []


def _plain_bytes(plan: RestorePlan) -> int:
    return sum(part.bytes for part in plan.parts)


def _half_a_part(engine: Engine, run: str, part: RestorePart) -> int:
    """Fetch a few chunks of a part and then no more; returns their plain bytes."""
    packs = [engine.grant("GET", key) for key in part.packs]
    seen: list[int] = []
    calls: list[Call] = []

    def on_event(event: Event) -> None:
        seen.append(event.bytes)
        calls[0].cancel()

    calls.append(Call("id", engine.home, on_event))
    with pytest.raises(RunCancelled):
        engine.table.serve(FetchPart(run, packs), calls[0])
    assert 0 < seen[-1] < part.bytes
    return seen[-1]


def test_a_check_by_a_new_agent_finishes_first(
    woken: Engine, stored: SnapshotId, wide: Path, tmp_path: Path
) -> None:
    """Beginning again opens modes; a control side that only asks for the check is right too."""
    back = tmp_path / "back"
    run = woken.fetched_restore(stored, [back])
    run.finish()
    woken.restart()
    run, _ = woken.begin_restore(stored, [back], run.run)
    assert run.check(full=True).differences == []
    run.end()
    assert differences(kept(wide), facts(back)) == []


def test_finish_wants_every_part(woken: Engine, stored: SnapshotId, tmp_path: Path) -> None:
    run, plan = woken.begin_restore(stored, [tmp_path / "back"])
    with pytest.raises(InvalidInput, match=r"still lacks .* chunks: restore all parts"):
        run.finish()
    for part in plan.parts[1:]:
        run.restore_part(part)
    with pytest.raises(InvalidInput, match="still lacks"):
        run.check(full=True)


def test_a_restore_that_was_removed_by_hand_starts_again(
    woken: Engine, stored: SnapshotId, wide: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    run, plan = woken.begin_restore(stored, [back])
    run.restore_part(plan.parts[0])
    woken.restart()
    subprocess.run(["rm", "-rf", back], check=True)
    woken.restore(stored, [back])
    assert differences(kept(wide), facts(back)) == []


def test_a_restore_that_was_meddled_with_is_not_called_right_and_can_be_repeated(
    woken: Engine, stored: SnapshotId, wide: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    run = woken.fetched_restore(stored, [back])
    fd = os.open(back / "big", os.O_WRONLY)
    os.pwrite(fd, b"!", 9 * MIB)
    os.close(fd)
    (back / "d/3").unlink()
    checked = _finish(run)
    assert {line.split(":")[0] for line in checked.differences} == {
        str(back / "big"),
        str(back / "d/3"),
    }
    with pytest.raises(WorkspaceInvalid, match="never finished"):
        woken.begin([back])  # what is not right must not become the newest snapshot
    woken.restore(stored, [back])
    assert differences(kept(wide), facts(back)) == []


def test_what_an_earlier_run_restored_and_compared_is_not_written_again(
    woken: Engine, stored: SnapshotId, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    run = woken.fetched_restore(stored, [back])
    assert _finish(run).difference_count == 0
    (back / "small").write_bytes(b"work done since")  # the user need not wait
    woken.restart()
    run, plan = woken.begin_restore(stored, [back], resume=True)
    assert plan.complete
    assert plan.parts == []
    run.finish()
    run.check(full=True)
    run.end()
    assert (back / "small").read_bytes() == b"work done since"


def test_a_restore_of_another_snapshot_does_not_continue_this_one(
    engine: Engine, tmp_path: Path
) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    was.mkdir()
    (was / "file").write_bytes(content(1, 2 * MIB))
    let_settle()
    first = engine.snapshot([was])
    (was / "file").write_bytes(content(2, 2 * MIB))
    let_settle()
    second = engine.snapshot([was])
    run, plan = engine.begin_restore(first, [back])
    run.restore_part(plan.parts[0])
    engine.restart()
    with pytest.raises(InvalidInput, match="is not empty"):
        engine.begin_restore(second, [back])
    with pytest.raises(RestoreUnfinished, match="and nothing else"):
        engine.begin_restore(second, [back], resume=True)
    run, plan = engine.begin_restore(first, [back])
    assert plan.parts == []
    assert _finish(run).differences == []
    with pytest.raises(InvalidInput, match="the user may work there"):
        engine.begin_restore(second, [back], resume=True)
    assert (back / "file").read_bytes() == content(1, 2 * MIB)


# -- something else writes into the target


@pytest.mark.parametrize("swapped", ["d", "d/deep", "target", "big", "sparse"])
@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "going on"])
def test_nothing_is_written_through_a_symlink(
    woken: Engine, stored: SnapshotId, wide: Path, tmp_path: Path, swapped: str, resumed: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["cp", "-a", wide, elsewhere], check=True)
    for file in (elsewhere / "big", elsewhere / "sparse", *(elsewhere / "d/deep").iterdir()):
        file.write_text("somebody else's")
    before = facts(elsewhere)
    back = tmp_path / "back"
    run, plan = woken.begin_restore(stored, [back])
    run.restore_part(plan.parts[0])
    victim = back if swapped == "target" else back / swapped
    if victim.exists():
        victim.rename(tmp_path / "moved-away")
    victim.symlink_to(elsewhere if swapped == "target" else elsewhere / swapped)
    with pytest.raises(InvalidInput, match=r"target|moved|directory"):
        if resumed:
            woken.restart()
            run, plan = woken.begin_restore(stored, [back], run.run)
        for part in plan.parts:
            run.restore_part(part)
        run.finish()
    assert differences(before, facts(elsewhere)) == []


# -- full disks


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many MiB."""
    mounts = []

    def mount(size_mib: int) -> Path:
        place = tmp_path / f"little-{size_mib}"
        place.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(place)]
        subprocess.run(argv, check=True)
        mounts.append(place)
        return place

    yield mount
    for place in mounts:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_said_before_a_byte_is_written(
    woken: Engine, stored: SnapshotId, little: Callable[[int], Path]
) -> None:
    place = little(50)
    with pytest.raises(DiskFull, match=r"bytes free and the snapshot needs .* nothing was written"):
        woken.begin_restore(stored, [place / "back"])
    assert list(place.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_said_and_then_it_goes_on(
    woken: Engine, stored: SnapshotId, wide: Path, little: Callable[[int], Path]
) -> None:
    place = little(160)
    back = place / "back"
    run, whole = woken.begin_restore(stored, [back])
    with (place / "hog").open("wb") as hog:
        os.posix_fallocate(hog.fileno(), 0, 140 * MIB)
    with pytest.raises(DiskFull, match=r"the machine's disk is full .* the snapshot in the store"):
        for part in whole.parts:
            run.restore_part(part)
    woken.restart()
    (place / "hog").unlink()
    run, plan = woken.begin_restore(stored, [back])
    assert 0 < _plain_bytes(plan) < _plain_bytes(whole)
    for part in plan.parts:
        run.restore_part(part)
    assert _finish(run).differences == []
    contents = {path: fact.content for path, fact in kept(wide).items()}
    assert contents == {path: fact.content for path, fact in facts(back).items()}


# -- as an ordinary user

_AS_NOBODY = """
import encodings.ascii, encodings.idna, json, os, sys
from pathlib import Path
from tests.fixtures.engine import Engine
from torpor.control.store.s3 import S3Settings, S3Store
order = json.load(sys.stdin)
engine = Engine(S3Store.connect(S3Settings(**order["settings"])), Path(order["home"]))
engine.snapshots()  # what is imported late is imported now: Python itself may be root's alone
os.setgroups([]); os.setgid(65534); os.setuid(65534)
back = [Path(order["back"])]
run, plan = engine.begin_restore(order["snapshot"], back, first=order["first"])
for part in plan.parts:
    run.restore_part(part)
if order["first"]:
    run.finish_first()
run.finish()
engine.restart()  # everything is in place and read-only now: that must not keep us out
finished = engine.restore(order["snapshot"], back, first=order["first"])
json.dump(finished.warnings, sys.stdout)
"""


@pytest.mark.parametrize("first", [[], ["closed/small", "empty"]], ids=["together", "in order"])
def test_an_ordinary_user_has_all_but_the_owners(
    seaweed: Server, tmp_path: Path, first: list[str]
) -> None:
    settings = seaweed.settings(seaweed.bucket())
    engine = Engine(S3Store.connect(settings), tmp_path / "home")
    was = tmp_path / "was"
    (was / "closed").mkdir(parents=True)
    (was / "closed/big").write_bytes(content(1, 9 * MIB))
    (was / "closed/small").write_bytes(b"x")
    (was / "empty").write_bytes(b"")
    os.setxattr(was / "empty", "user.x", b"y")
    os.setxattr(was / "empty", "trusted.x", b"only root sets it")
    os.chown(was / "empty", 12, 34)
    for name in ("closed/big", "closed/small", "empty"):
        (was / name).chmod(0o400)
    (was / "closed").chmod(0o500)
    was.chmod(0o500)
    before = kept(was)
    let_settle()
    snapshot = engine.snapshot([was])
    engine.runs.close()

    nobodys = tmp_path / "nobodys"
    nobodys.mkdir()
    os.chown(nobodys, 65534, 65534)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o111)
    order = {
        "settings": {
            name: getattr(settings, name)
            for name in ("bucket", "prefix", "access_key", "secret_key", "endpoint_url")
        },
        "home": str(nobodys / "home"),
        "back": str(nobodys / "back"),
        "snapshot": snapshot,
        "first": first,
    }
    (nobodys / "home").mkdir()
    os.chown(nobodys / "home", 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)
    assert any("owners are not restored" in warning for warning in warnings)
    assert any("trusted.x is not restored" in warning for warning in warnings)
    expected = {
        path: fact._replace(
            owner=(65534, 65534), xattrs=tuple(x for x in fact.xattrs if x[0] != "trusted.x")
        )
        for path, fact in before.items()
    }
    assert differences(expected, facts(nobodys / "back")) == []
