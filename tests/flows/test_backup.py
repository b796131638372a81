"""Backups with retention, and the life of snapshots, by the real flows without a Prefect server."""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import backup, delete_snapshots, watch
from flows.procedures.each_workspace import NOT_RENTED
from tasks.phases import phases_told_to
from tasks.retention import look_at_newest
from tests.fixtures.errors import raises
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.plain_flows import Shows, plain, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over
from torpor.control.rental.records import Rental
from torpor.control.reports import ALL
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import find_snapshot, read_manifest, snapshot_ids
from torpor.control.store.receipts import receipts_prefix
from torpor.control.upkeep.pins import pin, unpin
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import (
    InvalidInput,
    SnapshotDamaged,
    SnapshotKept,
    SnapshotMissing,
    StoreUnavailable,
    WorkspaceInvalid,
)
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key, packs_prefix
from torpor.shared.values import ObjectKey, SnapshotId, new_snapshot_id

Told = deque[dict[str, Any]]


def _named(events: Told, name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def _ids(lab: Lab) -> list[SnapshotId]:
    return snapshot_ids(lab.store, WORKSPACE)


def _backup(lab: Lab, **options: Any) -> Any:
    return run_plainly(lab.opened, backup, **options)


def _only(lab: Lab, *kept: SnapshotId) -> None:
    gone = [manifest_key(WORKSPACE, snapshot) for snapshot in _ids(lab) if snapshot not in kept]
    lab.store.delete(gone)


def _aged(lab: Lab, *days: float) -> list[SnapshotId]:
    """Verified snapshots like the newest one, made so many days ago."""
    (machine,) = lab.machines()
    newest = read_manifest(lab.store, lab.snapshots()[0], lab.seal)
    made = []
    for age in days:
        snapshot = new_snapshot_id(datetime.now(timezone.utc) - timedelta(days=age))
        blob, _ = encode_manifest(msgspec.structs.replace(newest, snapshot=snapshot), lab.seal)
        lab.store.put(manifest_key(WORKSPACE, snapshot), blob)
        stored = find_snapshot(lab.store, WORKSPACE, snapshot)
        verify_snapshot(lab.store, stored, lab.seal, machine=machine.id)
        made.append(snapshot)
    return made


def _fail_the_check(lab: Lab) -> None:
    """Take a backup whose packs are gone when it is verified."""

    def packs() -> set[ObjectKey]:
        return {found.key for found in lab.store.list(packs_prefix(WORKSPACE))}

    before = packs()

    def vanish(phase: str) -> None:
        if phase == "verify":
            lab.store.delete(packs() - before)

    with phases_told_to(vanish), pytest.raises(SnapshotDamaged):
        _backup(lab, keep_last=1)


def test_a_backup_keeps_the_machine_and_lets_old_snapshots_go(
    standing: Lab, home: Path, events: Told
) -> None:
    first = _backup(standing)
    assert [verdict.reasons for verdict in first.verdicts] == [["newest", "no retention is set"]]
    assert first.hibernated.destroyed is False
    assert len(standing.machines()) == 1
    fresh, week, pinned, old = _aged(standing, 1, 8, 30, 300)
    pin(standing.store, WORKSPACE, pinned, "the paper")
    before = _ids(standing)

    plan = _backup(standing, keep_daily=2, dry_run=True)
    assert (plan.dry_run, plan.deleted, _ids(standing)) == (True, [], before)
    assert [row["kept"] for row in plan.rows()] == [
        "yes",  # the one that would be taken
        "no: it would be deleted",  # of today too, and older
        "yes",
        "no: it would be deleted",
        "yes",
        "no: it would be deleted",
    ]
    assert plan.rows()[4]["because"] == "pinned: the paper"

    (home / "notes" / "a.txt").write_text("second, longer\n")
    events.clear()
    report = _backup(standing, keep_daily=2)
    assert sorted(report.deleted) == [old, week, first.snapshot]
    assert _ids(standing) == [pinned, fresh, report.snapshot]
    assert standing.verify_listed() == 3
    assert [row["kept"] for row in report.rows()] == [
        "yes", "deleted", "yes", "deleted", "yes", "deleted",
    ]  # fmt: skip
    assert [event["event"] for event in events] == [
        "torpor.snapshot.committed",
        "torpor.snapshot.verified",
        *["torpor.snapshot.deleted"] * 3,
        "torpor.backup.finished",
    ]
    (finished,) = _named(events, "torpor.backup.finished")
    assert finished["resource"]["prefect.resource.id"] == "torpor.workspace.demo"
    assert finished["payload"] == {
        "workspace": "demo",
        "snapshot": report.snapshot,
        "deleted": report.deleted,
    }
    unpin(standing.store, WORKSPACE, pinned)


def test_all_workspaces_are_backed_up_also_after_one_fails() -> None:
    """What a schedule runs: Prefect leaves it no parameters."""
    with make_lab() as standing:
        home = standing.workspace(standing.rent().id)
        home.mkdir()
        (home / "a.txt").write_text("a\n")
        first = _backup(standing)
        off = standing.named("asleep").opened
        broken = standing.named("broken").wanting(paths=["~/nowhere"])
        handed_over(broken)
        shows = Shows(standing.opened, off, broken, retries=0)
        with shows, raises(WorkspaceInvalid, "nowhere"):
            backup.fn(ALL, keep_last=1)
        said = {row["workspace block"]: row["result"] for row in shows.rows}
        assert said == {
            "demo": "this run for its backup",
            "asleep": NOT_RENTED,
            "broken": said["broken"],
        }
        assert said["broken"].startswith("failed: ")
        (newest,) = _ids(standing)
        assert newest > first.snapshot  # taken, and `keep_last` reached it

        twice = Shows(standing.opened, retries=0)
        twice.workspaces = lambda: ["demo", "demo-2"]  # type: ignore[method-assign]
        twice.open = lambda _: standing.opened  # type: ignore[method-assign]
        with twice, raises(InvalidInput, "2 blocks are for workspace demo"):
            backup.fn(ALL)
        assert _ids(standing) == [newest]
        with Shows(standing.opened), raises(InvalidInput, "or name its workspace"):
            backup.fn(ALL, machine="m-1")


@pytest.mark.rule(11)
def test_a_backup_that_fails_deletes_nothing_and_says_so(
    standing: Lab, home: Path, events: Told
) -> None:
    _backup(standing)
    _aged(standing, 10, 20)
    before = _ids(standing)
    nowhere = standing.wanting(paths=["~/nowhere"])
    with raises(WorkspaceInvalid, "nowhere"):
        run_plainly(nowhere, backup, keep_last=1)
    (failed,) = _named(events, "torpor.backup.failed")
    assert failed["payload"]["error"] == "WorkspaceInvalid"
    assert "nowhere" in failed["payload"]["message"]
    assert _ids(standing) == before


@pytest.mark.rule(11)
def test_a_snapshot_that_does_not_verify_deletes_nothing(
    standing: Lab, home: Path, events: Told
) -> None:
    _backup(standing)
    _aged(standing, 10)
    before = _ids(standing)
    (home / "new.bin").write_bytes(os.urandom(50_000))
    _fail_the_check(standing)
    assert set(before) <= set(_ids(standing))
    assert _named(events, "torpor.verification.failed")
    assert _named(events, "torpor.backup.failed")
    assert not _named(events, "torpor.snapshot.deleted")
    _only(standing, *before)
    _backup(standing)


@pytest.mark.rule(11)
def test_the_backups_of_one_machine_delete_none_of_another_machines_work() -> None:
    with make_lab() as two:
        machines = [two.rent(), two.rent()]
        for number, machine in enumerate(machines):
            two.workspace(machine.id).mkdir()
            (two.workspace(machine.id) / "a.txt").write_text(f"only on machine {number}\n")
        ours, theirs = (str(machine.id) for machine in machines)
        older = [_backup(two, machine=ours).snapshot for _ in range(2)]
        first = _backup(two, machine=theirs, keep_last=1)
        assert first.deleted == older[:1]
        plan = _backup(two, machine=theirs, keep_last=1, dry_run=True)
        assert [verdict.snapshot for verdict in plan.verdicts if not verdict.kept] == [
            first.snapshot
        ]
        for _ in range(2):
            report = _backup(two, machine=theirs, keep_last=1)
        assert _ids(two) == [older[1], report.snapshot]
        (kept,) = [verdict for verdict in report.verdicts if verdict.snapshot == older[1]]
        assert kept.reasons == [f"newest of machine {ours}", f"last of machine {ours}"]


@pytest.mark.rule(11)
def test_a_backup_that_failed_its_check_counts_as_none() -> None:
    with make_lab() as lab:
        machine = lab.rent()
        home = lab.workspace(machine.id)
        home.mkdir()
        (home / "a.txt").write_text("first\n")
        good = _backup(lab).snapshot
        (home / "new.bin").write_bytes(os.urandom(50_000))
        _fail_the_check(lab)
        (bad,) = set(_ids(lab)) - {good}
        with plain(lab.opened):
            assert look_at_newest(lab.opened, 26.0) == good

        verdicts = _backup(lab, keep_last=1, dry_run=True).verdicts
        reasons = {verdict.snapshot: verdict.reasons for verdict in verdicts}
        assert reasons[good] == []  # the next is verified
        with raises(SnapshotKept, good, "newest verified"):
            run_plainly(lab.opened, delete_snapshots, [good])

        lab.lose_machines()
        lab.forget_rentals()
        with raises(SnapshotDamaged, bad, "nothing was rented", f"newest whole one is {good}"):
            wake_plainly(lab.opened)
        assert lab.opened.rentals.open() == lab.opened.rentals.history() == []
        assert wake_plainly(lab.opened, snapshot=good).snapshot == good


@pytest.mark.parametrize(
    ("options", "words"),
    [({"keep_daily": -1}, "keep_daily is -1"), ({"timezone": "Nowhere"}, "is not a time zone")],
)
def test_an_invalid_retention_is_refused_before_anything_is_stored(
    standing: Lab, options: dict[str, Any], words: str
) -> None:
    before = _ids(standing)
    with pytest.raises(InvalidInput, match=words):
        _backup(standing, **options)
    assert _ids(standing) == before


def test_a_missed_backup_is_found_and_reported(standing: Lab, home: Path, events: Told) -> None:
    newest = _backup(standing).snapshot
    events.clear()
    (rental,) = standing.opened.rentals.open()
    _rented_days_ago(standing, rental, 0)
    (old,) = _aged(standing, 2)
    _only(standing, old)
    assert not _watched(standing, 26).missed  # its machine is young
    _rented_days_ago(standing, rental, 3)
    assert not _watched(standing, 0).missed
    assert not _watched(standing, 49).missed
    seen = _watched(standing, 26)
    (row,) = [row for row in seen.rows() if row["verdict"] == "backup missed"]
    for words in (old, "48.0 hours old", "limit is 26", "worker runs"):
        assert words in row["reason"]
    assert "workspace demo has missed its backup" in seen.alerts
    _only(standing)
    assert "has no snapshot at all" in _watched(standing, 26).missed[WORKSPACE]
    _backup(standing)
    assert not _watched(standing, 26).missed
    assert newest != old


def test_a_store_that_does_not_answer_is_no_missed_backup(
    standing: Lab, home: Path, events: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rental,) = standing.opened.rentals.open()
    _rented_days_ago(standing, rental, 3)

    def fails(*_: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr("tasks.retention.newest_that_counts", fails)
    seen = _watched(standing, 26)
    assert not seen.missed
    assert ("unknown", "no answer") in {(row.kind, row.reason) for row in seen.watched}


def _watched(lab: Lab, hours: float) -> WatchReport:
    with plain(lab.opened, 0):
        return watch.fn(workspaces=[lab.opened.spec.name], backup_hours=hours)


def _rented_days_ago(lab: Lab, rental: Rental, days: float) -> None:
    lab.opened.rentals.change(rental, created_unix=time.time() - days * 24 * 3600)


def test_a_snapshot_that_is_deleted_while_it_is_compared_is_not_verified(
    standing: Lab, events: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _backup(standing).snapshot
    _only(standing, first)
    shown = [found.key for found in standing.store.list(receipts_prefix(WORKSPACE))]
    compared, read = manifest_key(WORKSPACE, first), standing.store.get

    def get(key: ObjectKey, *, max_bytes: int) -> bytes:
        if key == compared:
            _only(standing, first)
        return read(key, max_bytes=max_bytes)

    monkeypatch.setattr(standing.store, "get", get)
    events.clear()
    with raises(SnapshotMissing, "is gone: it was deleted meanwhile"):
        _backup(standing)
    assert not _named(events, "torpor.snapshot.verified")
    receipts = [found.key for found in standing.store.list(receipts_prefix(WORKSPACE))]
    assert receipts == shown
