"""The flows verify and prune as they run, but for Prefect."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import flows
from flows.procedures.drill_machine import LEFT_AFTER_S, drill_machine
from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly
from tests.fixtures.rentals import standing
from tests.fixtures.trees import fill
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.store.receipts import newest_verified
from torpor.control.store.records import Records
from torpor.control.upkeep.verify_report import VerifyReport
from torpor.shared.errors import (
    GrantExpired,
    InvalidInput,
    SnapshotDamaged,
    SnapshotMissing,
    StoreUnavailable,
)
from torpor.shared.format.names import manifest_key
from torpor.shared.values import WorkspaceName


@pytest.fixture(scope="module")
def kept() -> Iterator[Lab]:
    """A workspace with two snapshots, on its machine; the last test of this module ends that."""
    with make_lab() as lab:
        machine = lab.rent()
        workspace = lab.workspace(machine.id)
        fill(workspace, random.Random(3), big=1, big_bytes=1_500_000)
        hibernate_plainly(lab.opened, destroy=False)
        (workspace / "later").write_bytes(random.Random(4).randbytes(50_000))
        hibernate_plainly(lab.opened, destroy=False)
        yield lab


def verify(lab: Lab, **options: Any) -> VerifyReport:
    found: VerifyReport = run_plainly(lab.opened, flows.verify, **options)
    return found


def test_every_depth_says_that_whole_snapshots_are_whole(kept: Lab) -> None:
    newest, older = (stored.snapshot for stored in kept.snapshots())
    quick = verify(kept, snapshot="all")
    assert quick.whole == quick.restorable == [newest, older]
    assert not quick.failed
    full = verify(kept, snapshot="all", depth="full")
    assert full.whole == [newest, older]
    drill = verify(kept, depth="drill")
    assert drill.whole == [newest]
    assert len(kept.machines()) == 1  # the drill's went
    left = [found.key for found in kept.store.list("workspaces/drill--demo/")]
    assert left and all("/rentals/ended/" in key for key in left)
    assert "restore" in drill.seconds


@pytest.mark.rule(5)
@pytest.mark.parametrize("depth", ["quick", "drill"])
def test_what_a_killed_drill_left_goes_a_day_later_and_not_before(kept: Lab, depth: str) -> None:
    opened = kept.opened.under(WorkspaceName("drill--demo"))
    machine, rental = standing(opened)
    left = machine.id
    verify(kept, depth=depth)
    assert left in [machine.id for machine in kept.machines()]
    old = time.time() - LEFT_AFTER_S - 1
    opened.rentals.change(rental, created_unix=old)
    verify(kept, depth=depth)
    assert left not in [machine.id for machine in kept.machines()]
    assert opened.rentals.open() == []


def test_a_drill_s_machine_goes_also_when_the_store_is_away(
    kept: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Records, *_: object) -> None:
        raise StoreUnavailable("the store is away")

    before = kept.machines()
    with ExitStack() as stack:
        stack.enter_context(plain(kept.opened))
        stack.enter_context(pytest.raises(StoreUnavailable))
        stack.enter_context(drill_machine(kept.opened))
        assert len(kept.machines()) == len(before) + 1
        monkeypatch.setattr(Records, "read", away)
    monkeypatch.undo()
    assert kept.machines() == before
    kept.store.delete([found.key for found in kept.store.list("workspaces/drill--demo/")])


@pytest.mark.rule(14)
def test_a_rotten_pack_fails_each_depth_and_the_files_are_named(kept: Lab) -> None:
    newest, older = (stored.snapshot for stored in kept.snapshots())
    key = min(kept.store.list("workspaces/demo/packs/"), key=lambda found: found.bytes).key
    whole = kept.store.get(key, max_bytes=1 << 30)
    kept.store.put(key, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    for depth in ("quick", "full", "drill"):
        with pytest.raises(SnapshotDamaged, match=r"1 of [12]") as failed:
            verify(kept, snapshot="newest" if depth == "drill" else "all", depth=depth)
        assert newest in str(failed.value)
        if depth != "drill":
            assert f"can be restored whole is {older}" in str(failed.value)
        assert newest_verified(kept.store, WorkspaceName("demo")) == older
    kept.store.delete([key])
    with pytest.raises(SnapshotDamaged, match="files are lost"):
        verify(kept, depth="full")
    kept.store.put(key, whole)
    assert not verify(kept, snapshot="all").failed
    assert newest_verified(kept.store, WorkspaceName("demo")) == newest
    assert len(kept.machines()) == 1


def test_full_reads_on_the_workspace_s_machine_beside_work_and_leaves_nothing(
    kept: Lab,
) -> None:
    def files() -> list[Path]:
        home = kept.home(kept.machines()[0].id)
        return sorted(path for path in home.rglob("*") if "torpor" not in str(path))

    before = files()
    assert verify(kept, depth="full").whole
    assert files() == before


def test_a_dry_prune_frees_nothing_and_says_what_it_would(kept: Lab) -> None:
    before = list(kept.store.list("workspaces/demo/packs/"))
    report = run_plainly(kept.opened, flows.prune)
    assert report.dry_run
    assert report.stored.packs == len(before)
    assert report.to_free.packs == report.to_mark.packs == 0
    done = run_plainly(kept.opened, flows.prune, dry_run=False)
    assert (done.freed.packs, done.freed.bytes) == (0, 0)
    assert list(kept.store.list("workspaces/demo/packs/")) == before
    assert any("dry run" in row["value"] for row in report.rows())


def test_a_control_side_that_slept_before_its_commit_goes_round_once_more(kept: Lab) -> None:
    commit, late = RemoteSnapshot.commit, iter([True])

    def first_too_late(self: RemoteSnapshot, statistics: dict[str, int]) -> Any:
        if next(late, False):
            raise GrantExpired("the grant's time is over")
        return commit(self, statistics)

    with patch.object(RemoteSnapshot, "commit", first_too_late):
        report = hibernate_plainly(kept.opened, destroy=False)
    assert next(late, None) is None
    assert kept.snapshots()[0].snapshot == report.snapshot


def test_full_rents_a_machine_where_the_workspace_has_none(kept: Lab) -> None:
    hibernate_plainly(kept.opened)
    assert kept.machines() == []
    again = verify(kept, depth="full")
    assert again.whole == [kept.snapshots()[0].snapshot]
    assert kept.machines() == []


def test_what_cannot_be_verified_says_so(kept: Lab) -> None:
    names = [stored.snapshot for stored in kept.snapshots()]
    with pytest.raises(InvalidInput, match="takes no machine"):
        verify(kept, machine="somebody@127.0.0.1")
    with pytest.raises(InvalidInput, match="not a snapshot id"):
        verify(kept, snapshot="yesterday")
    older = names.pop()
    kept.store.delete([manifest_key(kept.opened.spec.name, older)])
    with pytest.raises(SnapshotDamaged, match="is gone"):
        verify(kept, snapshot=older)
    assert verify(kept, snapshot="all").whole == names
    kept.store.delete([manifest_key(kept.opened.spec.name, name) for name in names])
    for snapshot in ("all", "newest"):
        with pytest.raises(SnapshotMissing, match="no snapshot"):
            verify(kept, snapshot=snapshot)
