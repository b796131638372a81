"""A short run of the rules against the judge, and what the judge catches where a rule is wrong."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import pytest

from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.saves.rules import DEMO, Rules, run
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import find_snapshot, snapshot_ids, snapshot_times
from torpor.control.upkeep.autosaves import KEPT
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.shared.errors import SnapshotKept
from torpor.shared.format.lineage import Lineage
from torpor.shared.values import SnapshotId


def test_no_work_is_lost_and_none_goes_unnamed() -> None:
    seed = secrets.randbelow(1 << 32)
    assert run(seed, 2000).violations == [], f"--seed {seed} --actions 2000"


class ByName(Rules):
    def newest(self, store: MemoryStore) -> tuple[SnapshotId, set[SnapshotId]] | None:
        ids = snapshot_ids(store, DEMO)
        return (ids[-1], set()) if ids else None


class ByTime(Rules):
    def newest(self, store: MemoryStore) -> tuple[SnapshotId, set[SnapshotId]] | None:
        times = snapshot_times(store, DEMO)
        return (max(times, key=times.__getitem__), set()) if times else None


class ThinsByCount(Rules):
    def thin(self, store: MemoryStore) -> None:
        for snapshot in snapshot_ids(store, DEMO)[:-KEPT]:
            _delete(store, snapshot)


class UnknownClaimsAll(Rules):
    def line(
        self,
        before: Lineage | None,
        snapshot: SnapshotId,
        there: list[SnapshotId],
        *,
        equal: bool,
        autosave: bool,
    ) -> Lineage:
        if before is None:
            return Lineage(snapshot, snapshot, there[::-1], autosave=autosave)
        return super().line(before, snapshot, there, equal=equal, autosave=autosave)


class ComparesNothing(Rules):
    def backed_up(self, store: MemoryStore, snapshot: SnapshotId, keep_last: int) -> None:
        verify_snapshot(store, find_snapshot(store, DEMO, snapshot), PLAIN, machine="m")
        for one in snapshot_ids(store, DEMO)[:-keep_last] if keep_last else ():
            _delete(store, one)


class NamesNothingAtAWake(Rules):
    def named(self, store: MemoryStore, newest: SnapshotId, aside: Iterable[SnapshotId]) -> None:
        """Nothing is compared there."""


def _delete(store: MemoryStore, snapshot: SnapshotId) -> None:
    try:
        delete_snapshot(store, DEMO, snapshot)
    except SnapshotKept:
        return


@pytest.mark.parametrize(
    "wrong",
    [
        ByName,
        ByTime,
        ThinsByCount,
        UnknownClaimsAll,
        ComparesNothing,
        NamesNothingAtAWake,
    ],
)
def test_a_wrong_rule_is_caught(wrong: type[Rules]) -> None:
    assert run(7, 2000, wrong(), most=1).violations
