"""A workspace comes back as it was, and becomes any other: every entry, sealed and not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.engine import Engine
from tests.fixtures.generated_trees import CHANGES, TREES, Plant, build, change
from tests.fixtures.snapshots import manifest_of, reads_nothing
from tests.fixtures.stores import Server
from tests.fixtures.trees import (
    content,
    differences,
    facts,
    kept,
    let_settle,
    plant_every_kind,
)
from torpor.control.store.s3 import S3Store

KEY = bytes(range(32))
sealed_or_not = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])


@sealed_or_not
def test_every_kind_of_entry_comes_back(seaweed: Server, tmp_path: Path, key: bytes | None) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    plant_every_kind(was)
    before = kept(was)
    store = seaweed.store()
    let_settle()
    one = Engine(store, tmp_path / "one", key)
    snapshot = one.snapshot([was])
    assert differences(before, kept(was)) == []  # being read leaves no trace

    other = Engine(store, tmp_path / "other", key)
    finished = other.restore(snapshot, [back])
    assert differences(before, facts(back)) == []
    assert finished.warnings == []

    assert {(s.path, s.kind) for s in manifest_of(other, snapshot).skipped} == {
        (b"fifo", "fifo"),
        (b"socket", "socket"),
    }
    assert reads_nothing(other, back)
    shutil.rmtree(was)
    shutil.rmtree(back)


def test_two_roots_come_back_apart(seaweed: Server, tmp_path: Path) -> None:
    roots, backs = [[tmp_path / side / name for name in "ab"] for side in ("was", "back")]
    for number, root in enumerate(roots):
        root.mkdir(parents=True)
        (root / "same-name").write_bytes(content(number, 5000))
        (root / "only" / f"in-{number}").mkdir(parents=True)
    before = [kept(root) for root in roots]
    let_settle()
    engine = Engine(seaweed.store(), tmp_path / "home")
    engine.restore(engine.snapshot(roots), backs)
    for was, back in zip(before, backs, strict=True):
        assert differences(was, facts(back)) == []


def test_an_excluded_name_is_not_kept(seaweed: Server, tmp_path: Path) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    for name in ("kept/a.py", "kept/a.pyc", "cache/b", "deep/cache/c", "only/this/d", "this/e"):
        (was / name).parent.mkdir(parents=True, exist_ok=True)
        (was / name).write_text(name)
    let_settle()
    engine = Engine(seaweed.store(), tmp_path / "home")
    engine.restore(engine.snapshot([was], ["*.pyc", "cache", "only/this"]), [back])
    files = {p for p, f in facts(back).items() if f.kind == "file"}
    assert files == {b"kept/a.py", b"this/e"}


# -- generated trees


@pytest.fixture(scope="module")
def bucket(seaweed: Server) -> str:
    return seaweed.bucket()


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(one=TREES, other=st.one_of(TREES, st.none()), changes=CHANGES, sealed=st.booleans())
def test_any_tree_comes_back_and_becomes_any_other(
    seaweed: Server,
    bucket: str,
    tmp_path: Path,
    one: list[Plant],
    other: list[Plant] | None,
    changes: list[tuple[str, int, int]],
    sealed: bool,
) -> None:
    """``other`` takes the place of ``one`` (as after an rsync), or is ``one`` changed."""
    here = tmp_path / "example"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    prefix = f"p{random.SystemRandom().randrange(1 << 60)}"
    store = S3Store.connect(seaweed.settings(bucket, prefix))
    key = KEY if sealed else None
    root = here / "root"
    build(root, one)
    let_settle()
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

    woken = Engine(store, here / "woken", key)
    for snapshot, was in ((first, first_facts), (second, second_facts)):
        woken.restore(snapshot, [here / snapshot])
        assert differences(was, facts(here / snapshot)) == []
    assert reads_nothing(woken, here / second)

    for snapshot, was in ((first, first_facts), (second, second_facts)):
        engine.sync(snapshot)
        assert differences(was, facts(root)) == []
    assert engine.hibernate([root]).new_bytes == 0
    stranger = Engine(store, here / "stranger", key)  # knows nothing of what is there
    stranger.sync(first, discard_local=True)
    assert differences(first_facts, facts(root)) == []
