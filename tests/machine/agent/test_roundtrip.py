"""A workspace comes back as it was: every kind of entry, with and without a key."""

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
    max_examples=10,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plants=TREES, changes=CHANGES, sealed=st.booleans())
def test_any_tree_and_any_change_comes_back(
    seaweed: Server,
    bucket: str,
    tmp_path: Path,
    plants: list[Plant],
    changes: list[tuple[str, int, int]],
    sealed: bool,
) -> None:
    here = tmp_path / "example"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    prefix = f"p{random.SystemRandom().randrange(1 << 60)}"
    store = S3Store.connect(seaweed.settings(bucket, prefix))
    key = KEY if sealed else None
    was = here / "was"
    build(was, plants)
    first_facts = facts(was)
    engine = Engine(store, here / "home", key)
    let_settle()
    first = engine.snapshot([was])

    for one in changes:
        change(was, *one)
    second_facts = facts(was)
    let_settle()
    second = engine.snapshot([was])
    assert differences(second_facts, facts(was)) == []

    other = Engine(store, here / "other", key)
    other.restore(first, [here / "first"])
    assert differences(first_facts, facts(here / "first")) == []
    other.restore(second, [here / "second"])
    assert differences(second_facts, facts(here / "second")) == []
    assert reads_nothing(other, here / "second")
