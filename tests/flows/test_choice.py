"""Which state a wake and a job go on from, where several machines saved, late or by themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import backup, job
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.lab import Lab
from tests.fixtures.lab_saves import killed_backup
from tests.fixtures.plain_flows import (
    hibernate_plainly,
    replicate_plainly,
    run_plainly,
    wake_plainly,
)
from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import PATIENCE_S, background, until
from tests.jobs import training
from torpor.control.jobs.records import Job
from torpor.control.jobs.standby import book_for
from torpor.control.store.marks import COMMIT_S
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MachineId, ObjectKey, SnapshotId, new_snapshot_id
from torpor.shared.wire.autosave import Book, SaveGrant
from torpor.shared.wire.job import OwnSave


@pytest.fixture
def hurried_jobs(needs_server: None, short_agent: None) -> Iterator[None]:
    with hurried():
        yield


def _woken(lab: Lab) -> MachineId:
    """The machine on which the workspace, of one file, is awake."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened)
    return MachineId(wake_plainly(lab.opened).machine)


def _book(lab: Lab, minutes: int = 5) -> Book:
    """What a machine gets to save by itself, with the name of a save that was signed so long
    ago."""
    name = lab.opened.spec.name
    book = book_for(lab.store, lab.opened.spec, lab.opened.key, "", None)
    early = new_snapshot_id(datetime.now(timezone.utc) - timedelta(minutes=minutes))
    grant = lab.store.grant("PUT", manifest_key(name, early), expires_s=COMMIT_S)
    return msgspec.structs.replace(book, saves=[SaveGrant(early, int(time.time()), grant)])


def _write(lab: Lab, machine: MachineId, name: str) -> None:
    (lab.workspace(machine) / name).write_text(name)
    let_settle()


def _own_save(lab: Lab, machine: MachineId, book: Book | None = None) -> OwnSave:
    return lab.market.near[machine].save_by_itself(book or _book(lab))


@pytest.mark.rule(12)
def test_a_wake_takes_what_a_machine_saved_after_a_backup_that_was_killed(lab: Lab) -> None:
    """The names of the machine's saves were signed before that backup."""
    machine = _woken(lab)
    book = _book(lab)
    _write(lab, machine, "before")
    killed = killed_backup(lab)
    _write(lab, machine, "hours-of-work")
    save = _own_save(lab, machine, book)
    assert save.snapshot < killed
    lab.lose_machines()
    woken = wake_plainly(lab.opened)
    assert woken.snapshot == save.snapshot
    assert (lab.workspace(MachineId(woken.machine)) / "hours-of-work").exists()
    assert not any("lacks the work" in words for words in woken.warnings)


@pytest.mark.rule(12)
def test_an_autosave_that_the_store_completes_late_is_not_newer_than_the_hibernation(
    lab: Lab,
) -> None:
    machine = _woken(lab)
    _write(lab, machine, "before")
    save = _own_save(lab, machine)
    key = manifest_key(lab.opened.spec.name, save.snapshot)
    on_its_way = lab.store.get(key, max_bytes=1 << 20)
    lab.store.delete([key])
    _write(lab, machine, "the-latest-file")
    hibernated = hibernate_plainly(lab.opened)
    lab.store.put(key, on_its_way)
    woken = wake_plainly(lab.opened)
    assert (hibernated.destroyed, woken.snapshot) == (True, hibernated.snapshot)
    assert (lab.workspace(MachineId(woken.machine)) / "the-latest-file").exists()


@pytest.mark.rule(12)
def test_a_wake_names_what_each_other_lost_machine_saved_by_itself(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened)
    machines = [MachineId(one.machine) for one in replicate_plainly(lab.opened, count=2).replicas]
    saves = []
    for number, machine in enumerate(machines):
        _write(lab, machine, f"work-of-{machine}")
        saves.append(_own_save(lab, machine, _book(lab, 5 - number)).snapshot)
    lab.lose_machines()
    woken = wake_plainly(lab.opened)
    assert woken.snapshot == saves[1]
    (words,) = [words for words in woken.warnings if "lacks the work in" in words]
    assert f"{saves[0]} of machine " in words
    assert "never verified; new or changed there: 1 file, 10 bytes)" in words
    assert "`torpor wake demo --snapshot ID`" in words
    assert words in [record.getMessage() for record in caplog.records]
    hibernate_plainly(lab.opened)
    named = wake_plainly(lab.opened, snapshot=saves[0])
    there = lab.workspace(MachineId(named.machine))
    assert (there / f"work-of-{machines[0]}").exists()


@pytest.mark.rule(12)
def test_a_job_goes_on_from_its_own_save_beside_a_replica_and_its_backup(
    lab: Lab, tmp_path: Path, hurried_jobs: None
) -> None:
    """The replica stands at step 20, and is backed up after the job has saved step 60."""
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "training.py").write_text(Path(training.__file__).read_text())
    hibernate_plainly(lab.opened)
    command = "; ".join(  # a test that fails does not wait for ever
        f"python3 training.py {steps} 0.02; "
        f"timeout {PATIENCE_S} sh -c 'until test -e {tmp_path}/{steps}; do sleep 0.1; done'"
        for steps in (20, 60, 80)
    )

    def run() -> Any:
        with PlainRunner(lab.opened, wait_factor=0.1):
            return job.fn("demo", ["sh", "-c", command], save_minutes=0.03)

    def now() -> Job | None:
        return next(iter(lab.opened.jobs.open()), None)

    def saved(machine: str, steps: int) -> Job:
        """The job once it has stored that step, and waits there."""
        until(lambda: _step(lab, machine) == steps, f"step {steps}")
        count = lab.opened.jobs.open()[0].saves
        return until(lambda: (at := now()) and at.saves >= count + 2 and at, "it is saved")

    with background(run) as ended:
        first = until(lambda: (at := now()) and at.attempt, "it runs").machine
        saved(first, 20)
        replica = replicate_plainly(lab.opened, count=1).replicas[0].machine
        (tmp_path / "20").touch()
        saved(first, 60)
        _write(lab, MachineId(replica), "a-note")
        other = run_plainly(lab.opened, backup, machine=replica).snapshot
        own = lab.opened.jobs.open()[0].newest
        del lab.market.alive[MachineId(first)]
        lab.market.sweep()
        begun = until(lambda: (at := now()) and len(at.attempts) == 2 and at, "it goes on")
        second = begun.attempts[1].machine
        assert second not in (first, replica)
        assert begun.newest is not None and own is not None
        until(lambda: _step(lab, second) >= 60, "it goes on from step 60")
        assert not (lab.workspace(MachineId(second)) / "a-note").exists()
        for steps in (60, 80):
            (tmp_path / str(steps)).touch()
        report = ended()
    assert report.job.state == "succeeded"
    (aside,) = [row["value"] for row in report.rows() if row["what"] == "not used"]
    assert f"{other} of machine {replica}" in aside
    assert [machine.id for machine in lab.machines()] == [replica]
    assert _step(lab, replica) == 20


def _step(lab: Lab, machine: str) -> int:
    try:
        return int(json.loads((lab.workspace(MachineId(machine)) / "state.json").read_text())["n"])
    except (OSError, ValueError):
        return 0


# -- what the store has lost


@pytest.mark.parametrize("also", ["", "verified", "hidden"])
def test_a_wake_names_a_newer_snapshot_that_the_store_lost(
    lab: Lab, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was ended for it. Before, an older state came back without a word."""
    woken = _woken(lab)
    (older,) = lab.snapshots()
    (lab.workspace(woken) / "notes").write_text("a day of work")
    newest = hibernate_plainly(lab.opened).snapshot
    key = manifest_key(lab.opened.spec.name, newest)
    if also == "hidden":
        plainly = lab.store.list
        monkeypatch.setattr(
            lab.store, "list", lambda prefix: (one for one in plainly(prefix) if one.key != key)
        )
    else:
        lab.store.delete([key, *([] if not also else [_receipt(lab, newest)])])
    report = wake_plainly(lab.opened)
    assert report.snapshot == older.snapshot
    words = "the listing of" if also == "hidden" else "it is gone from"
    assert any(newest in line and words in line for line in report.warnings)


def test_a_wake_says_nothing_of_a_newer_snapshot_that_its_user_deleted(lab: Lab) -> None:
    woken = _woken(lab)
    (lab.workspace(woken) / "notes").write_text("not wanted")
    newest = hibernate_plainly(lab.opened).snapshot
    delete_snapshot(lab.store, lab.opened.spec.name, newest, even_newest=newest)
    assert not [line for line in wake_plainly(lab.opened).warnings if newest in line]


def _receipt(lab: Lab, snapshot: SnapshotId) -> ObjectKey:
    return ObjectKey(f"workspaces/{lab.opened.spec.name}/verified/{snapshot}")
