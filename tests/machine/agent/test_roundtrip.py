"""A workspace comes back as it was, and becomes any other: every entry, sealed and not."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.engine import Engine
from tests.fixtures.generated_trees import CHANGES, TREES, Plant, build, change
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, manifest_of, reads_nothing
from tests.fixtures.trees import content, differences, facts, kept, let_settle, plant_every_kind
from torpor.machine.pipeline import upload
from torpor.machine.tree import batch

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("key", "native"),
    [(None, True), (KEY, True), (None, False)],
    ids=["plain", "sealed", "without our library"],
)
def test_every_kind_of_entry_comes_back_and_goes(
    machines: Machines,
    memory_store: MemoryStore,
    tmp_path: Path,
    built_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: bytes | None,
    native: bool,
) -> None:
    if not native:
        monkeypatch.setattr(batch, "disk_library", lambda: None)
    was, back = tmp_path / "was", tmp_path / "back"
    engine, other = (machines(memory_store, tmp_path / name, key) for name in ("one", "other"))
    (was / "old/directory").mkdir(parents=True)
    (was / "old/file").write_bytes(b"goes")
    let_settle()
    little, before = engine.snapshot([was]), kept(was)
    shutil.rmtree(was)
    plant_every_kind(was)
    everything = kept(was)
    let_settle()
    snapshot = engine.snapshot([was])
    assert differences(everything, kept(was)) == []  # being read leaves no trace
    skipped = {(name.path, name.kind) for name in manifest_of(other, snapshot).skipped}
    assert skipped == {(b"fifo", "fifo"), (b"socket", "socket")}

    finished = other.restore(snapshot, [back])
    assert differences(everything, facts(back)) == []
    assert finished.warnings == []
    assert reads_nothing(other, back)

    for path in (b"fifo", b"socket"):
        (was / path.decode()).unlink()
    everything[b""] = kept(was)[b""]  # its time
    snapshot = engine.snapshot([was])
    for wanted, expected in ((little, before), (snapshot, everything)):
        done = engine.sync(wanted)
        assert differences(expected, facts(was)) == []
        assert done.warnings == []
        assert reads_nothing(engine, was)
    for root in (was, back):
        shutil.rmtree(root)


def test_the_files_of_a_first_snapshot_are_not_taken_one_by_one(
    engine: Engine, tmp_path: Path, built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    for number in range(300):
        (was / str(number % 7)).mkdir(parents=True, exist_ok=True)
        (was / str(number % 7) / str(number)).write_bytes(content(number, 1 + number * 50))
    let_settle()
    monkeypatch.delattr(upload, "read_whole")
    engine.restore(engine.snapshot([was]), [back])
    assert differences(kept(was), facts(back)) == []


def test_two_roots_come_back_apart(engine: Engine, tmp_path: Path) -> None:
    roots, backs = [[tmp_path / side / name for name in "ab"] for side in ("was", "back")]
    for number, root in enumerate(roots):
        root.mkdir(parents=True)
        (root / "same-name").write_bytes(content(number, 5000))
        (root / "only" / f"in-{number}").mkdir(parents=True)
    let_settle()
    engine.restore(engine.snapshot(roots), backs)
    for was, back in zip(roots, backs, strict=True):
        assert differences(kept(was), facts(back)) == []


def test_an_excluded_name_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    for name in ("kept/a.py", "kept/a.pyc", "cache/b", "deep/cache/c", "only/this/d", "this/e"):
        (was / name).parent.mkdir(parents=True, exist_ok=True)
        (was / name).write_text(name)
    let_settle()
    engine.restore(engine.snapshot([was], ["*.pyc", "cache", "only/this"]), [back])
    files = {path for path, fact in facts(back).items() if fact.kind == "file"}
    assert files == {b"kept/a.py", b"this/e"}


def test_hard_links_between_two_directories_are_named(engine: Engine, tmp_path: Path) -> None:
    """They come back as two files, and the user hears it."""
    roots = one, two = tmp_path / "one", tmp_path / "two"
    for folder in roots:
        (folder / "d").mkdir(parents=True)
        (folder / "d/within").write_text("a file of two names in one directory")
        (folder / "same").hardlink_to(folder / "d/within")
    (two / "d/name").hardlink_to(one / "d/within")
    (two / "other").hardlink_to(one / "same")
    let_settle()
    for _ in range(2):  # also while nothing is new
        report = engine.hibernate([*roots])
        assert sorted(report.parted) == [f"{two}/d/name", f"{two}/other"]
    assert [row["value"] for row in report.rows() if "separate" in row["value"]] == [
        f"2 names, {', '.join(report.parted)}: they come back as separate files"
    ]
    assert engine.hibernate([one]).parted == []


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    tree=TREES, other=st.one_of(TREES, st.none()), changes=CHANGES, key=st.sampled_from([None, KEY])
)
def test_any_tree_comes_back_and_becomes_any_other(
    tmp_path: Path,
    tree: list[Plant],
    other: list[Plant] | None,
    changes: list[tuple[str, int, int]],
    key: bytes | None,
) -> None:
    """``other`` takes the place of ``tree`` (as after an rsync), or is ``tree`` changed."""
    here = tmp_path / "example"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    root = here / "root"
    build(root, tree)
    let_settle()
    with closing(MemoryStore()) as store:
        engine = Engine(store, here / "home", key)
        first, first_facts = engine.snapshot([root]), facts(root)
        if other is not None:
            shutil.rmtree(root)
            build(root, other)
        for drawn in changes:
            change(root, *drawn)
        second_facts = facts(root)
        let_settle()
        second = engine.snapshot([root])
        states = {first: first_facts, second: second_facts}

        woken = Engine(store, here / "woken", key)
        for snapshot, was in states.items():
            woken.restore(snapshot, [here / snapshot])
            assert differences(was, facts(here / snapshot)) == []
        assert reads_nothing(woken, here / second)

        for snapshot, was in states.items():
            engine.sync(snapshot)
            assert differences(was, facts(root)) == []
        assert engine.hibernate([root]).new_bytes == 0
        stranger = Engine(store, here / "stranger", key)  # knows nothing of what is there
        stranger.sync(first, discard_local=True)
        assert differences(first_facts, facts(root)) == []
