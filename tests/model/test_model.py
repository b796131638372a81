"""A short run of the model; the long one is ``python -m tests.model --actions 2000``."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from tests.fixtures.stores import Server
from tests.model.__main__ import run
from torpor.control.store.object_store import ObjectStore
from torpor.control.upkeep.prune import PackShare, Pruned, PrunePlan, carry_out


@pytest.mark.rule(13)
def test_random_actions_lose_nothing(seaweed: Server, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 32)
    found = run(seaweed.store(), tmp_path, 80, seed)
    assert found.violations == [], seed
    assert sum(found.report.values()) == 80


def _lying(store: ObjectStore, plan: PrunePlan) -> Pruned:
    freed = PackShare(plan.stored.packs, plan.stored.bytes)
    return msgspec.structs.replace(carry_out(store, plan), freed=freed)


def _no_pin(*_: object, **__: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("broken", "by", "says"),
    [
        ("tests.model.model.carry_out", _lying, "and reports"),
        ("torpor.control.upkeep.deletion.is_pinned", _no_pin, "is pinned, and was deleted"),
    ],
)
def test_the_model_sees_what_is_broken(
    broken: str, by: Callable[..., object], says: str, seaweed: Server, tmp_path: Path
) -> None:
    with patch(broken, by):
        found = run(seaweed.store(), tmp_path, 400, 5)
    (violation,) = found.violations
    assert says in violation
    assert found.repeat[0].startswith("--actions ")
