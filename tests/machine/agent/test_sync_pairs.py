"""Whatever two trees there are, a sync makes the one of the other."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.engine import Engine
from tests.fixtures.generated_trees import CHANGES, TREES, Plant, build, change
from tests.fixtures.stores import Server
from tests.fixtures.trees import differences, facts, let_settle
from torpor.control.store.s3 import S3Store

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def bucket(seaweed: Server) -> str:
    return seaweed.bucket()


@settings(
    max_examples=12,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(one=TREES, other=st.one_of(TREES, st.none()), changes=CHANGES, sealed=st.booleans())
def test_any_tree_becomes_any_other_and_back(
    seaweed: Server,
    bucket: str,
    tmp_path: Path,
    one: list[Plant],
    other: list[Plant] | None,
    changes: list[tuple[str, int, int]],
    sealed: bool,
) -> None:
    """``other`` takes the place of ``one`` (as an rsync would have it), or is ``one`` changed."""
    here = tmp_path / "example"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    prefix = f"p{random.SystemRandom().randrange(1 << 60)}"
    store = S3Store.connect(seaweed.settings(bucket, prefix))
    key = bytes(range(32)) if sealed else None
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
    let_settle()
    second, second_facts = engine.snapshot([root]), facts(root)

    engine.sync(first)
    assert differences(first_facts, facts(root)) == []
    engine.sync(second)
    assert differences(second_facts, facts(root)) == []
    assert _stores_nothing(engine, root)
    stranger = Engine(store, here / "stranger", key)  # knows nothing of what is there
    stranger.sync(first, discard_local=True)
    assert differences(first_facts, facts(root)) == []
    stranger.runs.close()
    engine.runs.close()


def _stores_nothing(engine: Engine, root: Path) -> bool:
    run = engine.begin([root])
    parts = run.scan(1).parts
    new_bytes = sum(run.store_part(1, part).new_bytes for part in parts)
    run.end(committed=False)
    return new_bytes == 0
