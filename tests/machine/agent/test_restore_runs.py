"""Restores step by step: targets, interruptions, symlink tricks, full disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.kill_points import as_nobody
from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Waking, begin_from, put_manifest
from tests.fixtures.trees import content, differences, facts, kept, let_settle
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
from torpor.shared.wire.restore import CheckRestore, FetchPart, RestorePart, RestorePlan

PART_BYTES = 12 * MIB


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts' worth: big files, small ones, links, a hole, a directory for attributes."""
    wide = tmp_path_factory.mktemp("wide") / "was"
    (wide / "d/deep").mkdir(parents=True)
    for number in range(15):
        (wide / f"d/{number}").write_bytes(content(number, MIB))
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
def stored(wide: Path) -> Iterator[tuple[MemoryStore, SnapshotId]]:
    """The snapshot of ``wide``, in a store for all that only reads."""
    store = MemoryStore()
    engine = Engine(store, wide.with_name("home"), part_bytes=PART_BYTES)
    yield store, engine.snapshot([wide])
    engine.runs.close()
    store.close()


@pytest.fixture
def waking(
    machines: Machines, stored: tuple[MemoryStore, SnapshotId], wide: Path, tmp_path: Path
) -> Waking:
    """Another machine over that store, on which nothing has been restored yet."""
    engine = machines(stored[0], tmp_path / "woken")
    engine.part_bytes = PART_BYTES
    return Waking(engine, stored[1], wide, tmp_path / "back")


# -- targets


@pytest.mark.rule(7)
def test_a_target_that_is_not_empty_is_refused(waking: Waking, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    before = facts(tmp_path / "full")
    for name, says in (
        ("full", r"is not empty on the machine \(it holds b'mine'\)"),
        ("file", "is a file on the machine"),
    ):
        with pytest.raises(InvalidInput, match=says):
            waking.engine.begin_restore(waking.snapshot, [tmp_path / name])
    assert facts(tmp_path / "full") == before
    assert (tmp_path / "file").read_text() == "precious"
    waking.back.mkdir()
    waking.begin()


def test_a_fresh_disk_is_empty_although_it_has_a_lost_and_found(waking: Waking) -> None:
    (waking.back / "lost+found").mkdir(parents=True)
    engine = waking.engine
    engine.restore(waking.snapshot, [waking.back])
    assert (waking.back / "lost+found").is_dir()


def test_what_an_image_left_in_a_target_is_moved_aside_where_that_is_wanted(
    waking: Waking,
) -> None:
    engine, image = waking.engine, {"notes": "the image's"}
    waking.back.mkdir()
    (waking.back / "notes").write_text(image["notes"])
    waking.run = engine.remote_restore(waking.snapshot, [waking.back], aside=True)
    with pytest.raises(InvalidInput, match="is not empty"):
        waking.run.begin(resume=True, rented=True)  # a killed run left it: somebody may work there
    with pytest.raises(InvalidInput, match="is not empty"):
        waking.run.begin()  # the user's own machine
    waking.plan = waking.run.begin(rented=True)
    aside = Path(f"{waking.back}.before-{waking.snapshot}")
    assert waking.plan.moved_aside == [str(aside)]
    waking.fetch()
    waking.complete()
    assert {path.name: path.read_text() for path in aside.iterdir()} == image
    (waking.back / "mine").write_text("work")  # from now on the workspace is there
    with pytest.raises(InvalidInput, match="is not empty"):
        engine.remote_restore(waking.snapshot, [waking.back], aside=True).begin(rented=True)
    assert (waking.back / "mine").read_text() == "work"


def test_the_directory_of_the_agent_is_not_moved_aside(waking: Waking, tmp_path: Path) -> None:
    home = tmp_path / "woken"
    run = waking.engine.remote_restore(waking.snapshot, [home], aside=True)
    with pytest.raises(InvalidInput, match="is not empty"):
        run.begin(rented=True)
    assert home.exists() and not [*tmp_path.glob("*.before-*")]


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


def test_begin_is_idempotent_and_a_second_run_is_refused(waking: Waking, tmp_path: Path) -> None:
    plan = waking.begin()
    assert waking.run.begin() == plan
    with pytest.raises(WorkspaceBusy):
        waking.engine.begin_restore(waking.snapshot, [tmp_path / "other"])
    with pytest.raises(WorkspaceBusy):
        waking.engine.begin([tmp_path])
    for early in (waking.run.finish, lambda: waking.run.check(full=True)):
        with pytest.raises(InvalidInput, match=r"still lacks .* chunks: restore all parts"):
            early()
        waking.fetch(plan.parts[1:])
    waking.fetch()
    waking.complete()


# -- interruptions


@pytest.mark.parametrize("same_run", [True, False], ids=["same run", "new run"])
@pytest.mark.parametrize(
    "killed_after", ["begin", "first part", "half a part", "parts", "finish", "check"]
)
def test_nothing_is_fetched_twice_when_the_agent_was_killed(
    waking: Waking, killed_after: str, same_run: bool
) -> None:
    whole = waking.begin()
    assert len(whole.parts) == 2
    parts = {"begin": 0, "first part": 1, "half a part": 1}.get(killed_after, 2)
    waking.fetch(whole.parts[:parts])
    fetched = sum(part.bytes for part in whole.parts[:parts])
    if killed_after == "half a part":
        fetched += _half_a_part(waking.engine, waking.run.run, whole.parts[1])
    if killed_after in ("finish", "check"):
        waking.run.finish()
    if killed_after == "check":
        assert waking.run.check(full=True).differences == []
        (waking.back / "small").write_bytes(b"work done since")  # the user need not wait
    waking.engine.restart()
    with pytest.raises(AgentLost):
        waking.engine.call(CheckRestore(waking.run.run, full=True))
    rest = waking.begin(run=waking.run.run if same_run else None, resume=True)
    assert rest.complete is (killed_after == "check")
    assert _plain_bytes(rest) == _plain_bytes(whole) - fetched
    waking.fetch()
    if not same_run:  # who asks for the check alone is right too
        waking.run.finish()
    assert waking.run.check(full=True).differences == []
    waking.run.end()
    if killed_after == "check":
        assert (waking.back / "small").read_bytes() == b"work done since"
    else:
        waking.is_back()


def _plain_bytes(plan: RestorePlan) -> int:
    return sum(part.bytes for part in plan.parts)


def _half_a_part(engine: Engine, run: str, part: RestorePart) -> int:
    """Fetch a few chunks of a part and then no more; returns their plain bytes."""
    packs = [engine.grant("GET", key) for key in part.packs]
    seen: list[int] = []

    def on_event(event: Event) -> None:
        seen.append(event.bytes)
        call.cancel()

    call = Call("id", engine.home, on_event)
    with pytest.raises(RunCancelled):
        engine.table.serve(FetchPart(run, packs), call)
    assert 0 < seen[-1] < part.bytes
    return seen[-1]


def test_a_restore_that_was_meddled_with_is_not_called_right_and_can_be_repeated(
    waking: Waking,
) -> None:
    waking.begin()
    waking.fetch()
    with (waking.back / "big").open("r+b") as file:
        os.pwrite(file.fileno(), b"!", 9 * MIB)
    (waking.back / "d/3").unlink()
    waking.run.finish()
    differing = {line.split(":")[0] for line in waking.run.check(full=True).differences}
    assert differing == {str(waking.back / "big"), str(waking.back / "d/3")}
    waking.run.end()
    with pytest.raises(WorkspaceInvalid, match="never finished"):
        waking.engine.begin([waking.back])  # what is not right must not become the newest snapshot
    waking.engine.restore(waking.snapshot, [waking.back])
    waking.is_back()


def test_a_restore_of_another_snapshot_does_not_continue_this_one(
    engine: Engine, was: Path, tmp_path: Path
) -> None:
    first = engine.snapshot([was])
    (was / "small").write_bytes(content(9, 2 * MIB))
    let_settle()
    waking = Waking(engine, engine.snapshot([was]), was, tmp_path / "back")
    waking.begin()
    waking.fetch(waking.plan.parts[:1])
    engine.restart()
    with pytest.raises(InvalidInput, match="is not empty"):
        engine.begin_restore(first, [waking.back])
    with pytest.raises(RestoreUnfinished, match="and nothing else"):
        engine.begin_restore(first, [waking.back], resume=True)
    waking.begin()
    waking.fetch()
    waking.complete()
    with pytest.raises(InvalidInput, match="the user may work there"):
        engine.begin_restore(first, [waking.back], resume=True)
    waking.is_back()


# -- something else writes into the target


@pytest.mark.rule(7)
@pytest.mark.parametrize("swapped", ["d", "d/deep", "target", "big", "sparse"])
@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "going on"])
def test_nothing_is_written_through_a_symlink(
    waking: Waking, tmp_path: Path, swapped: str, resumed: bool
) -> None:
    elsewhere, back = tmp_path / "elsewhere", waking.back
    subprocess.run(["cp", "-a", waking.was, elsewhere], check=True)
    for file in (elsewhere / "big", elsewhere / "sparse", *(elsewhere / "d/deep").iterdir()):
        file.write_text("somebody else's")
    before = facts(elsewhere)
    waking.begin()
    waking.fetch(waking.plan.parts[:1])
    victim = back if swapped == "target" else back / swapped
    if victim.exists():
        victim.rename(tmp_path / "moved-away")
    victim.symlink_to(elsewhere if swapped == "target" else elsewhere / swapped)
    with pytest.raises(InvalidInput, match=r"target|moved|directory"):
        if resumed:
            waking.engine.restart()
            waking.begin(run=waking.run.run)
        waking.fetch()
        waking.run.finish()
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
    waking: Waking, little: Callable[[int], Path]
) -> None:
    waking.back = little(50) / "back"
    with pytest.raises(DiskFull, match=r"bytes free and the snapshot needs .* nothing was written"):
        waking.begin()
    assert list(waking.back.parent.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_said_and_then_it_goes_on(
    waking: Waking, little: Callable[[int], Path]
) -> None:
    place = little(160)
    waking.back = place / "back"
    whole = waking.begin()
    with (place / "hog").open("wb") as hog:
        os.posix_fallocate(hog.fileno(), 0, 140 * MIB)
    with pytest.raises(DiskFull, match=r"the machine's disk is full .* the snapshot in the store"):
        waking.fetch()
    waking.engine.restart()
    (place / "hog").unlink()
    assert 0 < _plain_bytes(waking.begin()) < _plain_bytes(whole)
    waking.fetch()
    waking.run.finish()
    assert waking.run.check(full=True).differences == []


# -- as an ordinary user


@pytest.mark.parametrize("first", [[], ["closed/small", "empty"]], ids=["together", "in order"])
def test_an_ordinary_user_has_all_but_the_owners(
    engine: Engine, tmp_path: Path, first: list[str]
) -> None:
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
    snapshot, nobodys = engine.snapshot([was]), tmp_path / "nobodys"
    nobodys.mkdir()
    os.chown(nobodys, 65534, 65534)

    def restore() -> None:
        woken = Engine(engine.store, nobodys / "home")
        run, plan = woken.begin_restore(snapshot, [nobodys / "back"], first=first)
        for part in plan.parts:
            run.restore_part(part)
        if first:
            run.finish_first()
        run.finish()
        woken.restart()  # everything is in place and read-only now: that must not keep us out
        warnings = woken.restore(snapshot, [nobodys / "back"], first=first).warnings
        assert any("owners are not restored" in warning for warning in warnings)
        assert any("trusted.x is not restored" in warning for warning in warnings)

    as_nobody(tmp_path, restore)
    expected = {
        path: fact._replace(
            owner=(65534, 65534), xattrs=tuple(x for x in fact.xattrs if x[0] != "trusted.x")
        )
        for path, fact in before.items()
    }
    assert differences(expected, facts(nobodys / "back")) == []
