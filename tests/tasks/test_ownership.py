"""Who owns a workspace, as flows ask it: before they begin, and before a machine ends or is
rented."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier, Event
from typing import Any

import httpx
import msgspec
import pytest

from flows import (
    adopt,
    backup,
    create,
    delete_snapshots,
    hibernate,
    job,
    prune,
    reconcile,
    replicate,
    sync,
    wake,
    watch,
)  # fmt: skip
from flows.procedures.job import driver
from tasks import prune as prune_steps
from tasks.machines import renter
from tasks.ownership import check_owner, check_still_owner
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried, left_job
from tests.fixtures.lab import Lab
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rentals import handed_over
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.jobs import driven_job, records
from torpor.control.store.records import Unread
from torpor.control.store.workspace_records import (
    MOST_BYTES,
    Settings,
    WorkspaceRecord,
    WorkspaceRecords,
)
from torpor.shared.errors import (
    Recovered,
    StoreArchived,
    StoreCorrupt,
    StoreDenied,
    StoreUnavailable,
    TorporError,
)
from torpor.shared.format.names import settings_key
from torpor.shared.values import Machine, WorkspaceName

pytestmark = pytest.mark.rule(24)

DEMO = WorkspaceName("demo")
ONE, TWO = "11111111", "22222222"
KEY = settings_key(DEMO)


class Side:
    """A control side and its Workspace block."""

    def __init__(self, lab: Lab, name: str, **fields: object) -> None:
        self._lab, self.name = lab, name
        self.fields: dict[str, object] = {"name": DEMO, **fields}

    def settings(self) -> Settings:
        return Settings(block=DEMO, blocks={f"workspace/{DEMO}": self.fields})

    @contextmanager
    def runs(self, settings: Callable[[], Settings | None] | None = None) -> Iterator[Any]:
        opened = replace(
            self._lab.opened,
            side=self.name,
            settings=settings or self.settings,
            store_block="main",
        )
        with PlainRunner(opened, wait_factor=0.0) as runner:
            yield runner.open(DEMO)

    def takes(self) -> None:
        """What `torpor recover` does at its end."""
        WorkspaceRecords(self._lab.store, None).take(DEMO, self.name, f"host-{self.name}")

    def keeps(self) -> None:
        with self.runs() as opened:
            check_owner(opened)


def _record(lab: Lab) -> WorkspaceRecord:
    found = WorkspaceRecords(lab.store, None).read(DEMO)
    assert found is not None
    return found


@pytest.fixture
def machine(lab: Lab) -> Machine:
    made, _ = handed_over(lab.opened)
    (lab.home(made.id) / "workspace").mkdir()
    (lab.home(made.id) / "workspace" / "work").write_bytes(b"mine")
    return made


def _flows(lab: Lab, machine: Machine | None) -> dict[str, Callable[[], object]]:
    at = "" if machine is None else str(machine.id)
    return {
        "hibernate": lambda: hibernate.fn(DEMO),
        "wake": lambda: wake.fn(DEMO),
        "create": lambda: create.fn(DEMO),
        "replicate": lambda: replicate.fn(DEMO, 1),
        "sync": lambda: sync.fn(DEMO),
        "job": lambda: job.fn(DEMO, ["train"]),
        "prune": lambda: prune.fn(DEMO, dry_run=False),
        "delete": lambda: delete_snapshots.fn(DEMO, [lab.snapshots()[0].snapshot]),
        "reconcile": lambda: reconcile.fn(DEMO, left=[at]),
        "adopt": lambda: adopt.fn(DEMO, machine=f"vast:{at}", dry_run=False),
    }


def test_only_the_owner_ends_rents_syncs_and_deletes(lab: Lab, machine: Machine) -> None:
    one, two = Side(lab, ONE), Side(lab, TWO)
    with one.runs():
        backup.fn(DEMO)
    two.takes()
    before = [*lab.store.list("")]
    for name, flow in _flows(lab, machine).items():
        with one.runs(), pytest.raises(Recovered, match=f"host-{TWO} on .* takes it back") as said:
            flow()
        assert f"torpor recover {DEMO} --store main" in str(said.value), name
    assert [*lab.store.list("")] == before
    assert [found.id for found in lab.machines()] == [machine.id]
    with two.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []


def test_a_side_that_is_not_the_owner_backs_up_and_deletes_no_snapshot(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, ONE)
    with one.runs():
        backup.fn(DEMO)
    Side(lab, TWO).takes()
    did: list[object] = []
    for name in ("delete_autosaves", "start_autosave"):
        monkeypatch.setattr(f"flows.procedures.save.{name}", lambda *of: did.append(of))
    (lab.home(machine.id) / "workspace" / "more").write_bytes(b"new")
    with one.runs():
        report = backup.fn(DEMO, keep_last=1)
    assert (len(lab.snapshots()), report.deleted, did) == (2, [], [])


def test_a_workspace_that_is_recovered_during_a_backup_loses_no_snapshot(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup takes hours, and deletes at its end."""
    one, deleted = Side(lab, ONE), []
    with one.runs():
        backup.fn(DEMO)
    (lab.home(machine.id) / "workspace" / "more").write_bytes(b"new")
    real = lab.store.put

    def put(key: str, *asked: Any, **how: Any) -> Any:
        done = real(key, *asked, **how)  # type: ignore[arg-type]
        if "/verified/" in key:
            monkeypatch.setattr(lab.store, "put", real)
            Side(lab, TWO).takes()
        return done

    monkeypatch.setattr(lab.store, "put", put)
    monkeypatch.setattr("tasks.autosave.delete_superseded", lambda *of: deleted.append(of))
    with one.runs():
        report = backup.fn(DEMO, keep_last=1)
    assert (len(lab.snapshots()), report.deleted, deleted) == (2, [], [])


def test_a_prune_frees_nothing_of_a_workspace_that_is_recovered_while_it_looks(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Side(lab, ONE)
    with one.runs():
        backup.fn(DEMO)
    real = prune_steps.plan_prune

    def plan(*asked: Any) -> Any:
        Side(lab, TWO).takes()
        return real(*asked)

    monkeypatch.setattr(prune_steps, "plan_prune", plan)
    before = [*lab.store.list(f"workspaces/{DEMO}/")]
    with one.runs(), pytest.raises(Recovered):
        prune.fn(DEMO, dry_run=False)
    assert [*lab.store.list(f"workspaces/{DEMO}/")] == before


def test_the_host_that_recovers_last_owns_it(lab: Lab, machine: Machine) -> None:
    one, two = Side(lab, ONE), Side(lab, TWO)
    two.takes()
    one.takes()
    with two.runs(), pytest.raises(Recovered):
        hibernate.fn(DEMO)
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []


def test_a_workspace_that_is_recovered_during_a_hibernation_keeps_its_machine(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Side(lab, ONE), Side(lab, TWO)
    real = lab.store.put

    def put(key: str, *asked: Any, **how: Any) -> Any:
        done = real(key, *asked, **how)  # type: ignore[arg-type]
        if "/verified/" in key:
            monkeypatch.setattr(lab.store, "put", real)
            two.takes()
        return done

    monkeypatch.setattr(lab.store, "put", put)
    with one.runs(), pytest.raises(Recovered):
        hibernate.fn(DEMO)
    assert [found.id for found in lab.machines()] == [machine.id]
    assert len(lab.snapshots()) == 1


def test_a_workspace_that_is_recovered_during_a_wake_gets_no_second_machine(lab: Lab) -> None:
    """Right before the market is asked; also under a reserved name, as the nodes of a job have."""
    one, two = Side(lab, ONE), Side(lab, TWO)
    with one.runs() as opened:
        check_owner(opened)
        two.takes()
        for by in (opened, opened.under(WorkspaceName(f"nodes--{DEMO}"))):
            with pytest.raises(Recovered):
                renter(by).afford(1.0)


def test_a_store_that_does_not_say_who_owns_it_ends_no_machine(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the hibernation begins, and at the last look: unknown is not "no owner". Nor are bytes
    that were damaged on their way here."""
    one, reads = Side(lab, ONE), 0
    one.keeps()
    real = lab.store.read
    for error, good in itertools.product((StoreUnavailable, StoreCorrupt), (0, 1)):
        reads = 0

        def read(key: str, **how: Any) -> Any:
            nonlocal reads
            reads += key == KEY
            if key == KEY and reads > good:  # noqa: B023
                raise error("it is away")  # noqa: B023
            return real(key, **how)  # type: ignore[arg-type]

        monkeypatch.setattr(lab.store, "read", read)
        with one.runs(), pytest.raises(error, match="away"):
            hibernate.fn(DEMO)
        assert [found.id for found in lab.machines()] == [machine.id]
    monkeypatch.setattr(lab.store, "read", real)
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []


def test_a_damaged_record_is_named_and_neither_keeps_a_machine_nor_is_written_over(
    lab: Lab, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can name an owner without the key; and who damages it could delete it."""
    one = Side(lab, ONE)
    one.keeps()
    for junk in (b"junk" * MOST_BYTES, b"junk"):
        lab.store.put(KEY, junk)
        check_still_owner(lab.opened)
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []
    assert f"{KEY} in " in caplog.text
    assert lab.store.get(KEY, max_bytes=100) == b"junk"
    one.takes()
    assert _record(lab).owner is not None


def test_the_settings_are_written_where_they_differ_and_another_side_s_by_the_owner_alone(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be all that is left of a host that burnt down: a flow of the new host, or `torpor
    init` there, comes before anybody has recovered."""
    one, two = Side(lab, ONE, exclude=["a"]), Side(lab, TWO, exclude=["b"])
    two.keeps()
    two.fields["exclude"] = ["c"]
    two.keeps()
    assert _record(lab).settings == two.settings()
    one.keeps()
    assert _record(lab).settings == two.settings()
    assert f"(control side {TWO}) wrote, and they stay: `torpor recover {DEMO}" in caplog.text
    one.takes()
    with pytest.raises(Recovered):
        two.keeps()
    assert _record(lab).settings == two.settings()
    one.keeps()
    assert (_record(lab).settings, _record(lab).side) == (one.settings(), ONE)
    assert _record(lab).owner is not None


def test_settings_that_cannot_be_written_or_loaded_stop_no_hibernation(
    lab: Lab,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A policy that allows no writes there, an `exclude` of thousands of lines, a server that is
    away."""
    real = lab.store.put

    def put(key: str, *asked: Any, **how: Any) -> Any:
        if key == KEY:
            raise StoreDenied("not there")
        return real(key, *asked, **how)  # type: ignore[arg-type]

    def away() -> Settings | None:
        raise httpx.ConnectError("no server")

    long = Side(lab, ONE, exclude=["x" * 400_000])
    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "put", put)
        Side(lab, ONE).keeps()
    long.keeps()
    with long.runs(away):
        hibernate.fn(DEMO)
    assert lab.machines() == []
    for words in ("not there", "too long", "no server"):
        assert words in caplog.text


def test_watch_of_a_side_that_is_not_the_owner_only_reports(lab: Lab, machine: Machine) -> None:
    """An idle machine, a job whose run was lost, and an attempt that failed."""
    one, two = Side(lab, ONE), Side(lab, TWO)
    left_job(lab)
    lab.record(state="abandoned", why="it failed", machine=machine.id)
    two.takes()
    before = lab.states(), lab.opened.jobs.open()
    with one.runs():
        report = watch.fn(dry_run=False)
    assert [found.id for found in lab.machines()] == [machine.id]
    assert (lab.states(), lab.opened.jobs.open()) == before
    assert f"recovered by host-{TWO}" in str([of.next_step for of in report.jobs])


def test_watch_of_a_side_that_is_not_the_owner_leaves_the_machine_s_own_saves_to_the_owner(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block may leave out what the owner's keeps."""
    did: list[str] = []
    lab.opened = replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, save_minutes=30))
    for name in ("give_book", "thin"):
        monkeypatch.setattr(f"tasks.autosave.{name}", lambda *_, of=name, **__: did.append(of))
    Side(lab, TWO).takes()
    with Side(lab, ONE).runs():
        watch.fn(dry_run=False)
    assert did == []
    with Side(lab, TWO).runs():
        watch.fn(dry_run=False)
    assert "give_book" in did


def test_watch_asks_for_the_owners_of_several_workspaces_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is slow must not use up the time of the look."""
    at_once = 8
    all_ask = Barrier(at_once)
    real = lab.store.read

    def read(key: str, **how: Any) -> Any:
        if key.startswith("settings/"):
            all_ask.wait(PATIENCE_S)
        return real(key, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(lab.store, "read", read)
    several = [lab.named(f"work-{number}").opened for number in range(at_once)]
    with PlainRunner(*several, wait_factor=0.0):
        watch.fn()
    assert not all_ask.broken


def test_a_record_that_the_store_keeps_to_itself_is_written_over_by_recover_alone(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the bucket's key can copy it into an archive, or seal it with a key of his."""
    one = Side(lab, ONE)
    one.keeps()
    real = lab.store.read
    for error in (StoreArchived, StoreDenied):

        def read(key: str, **how: Any) -> Any:
            if key == KEY:
                raise error("not given out")  # noqa: B023
            return real(key, **how)  # type: ignore[arg-type]

        unread: Unread = {}
        with monkeypatch.context() as patch:
            patch.setattr(lab.store, "read", read)
            with one.runs(), pytest.raises(error):
                hibernate.fn(DEMO)
            assert WorkspaceRecords(lab.store, None).read_all([DEMO], unread) == {}
            one.takes()
        assert [*unread] == [KEY]
        assert _record(lab).owner is not None
    with one.runs():
        hibernate.fn(DEMO)
    assert lab.machines() == []


def test_watch_of_a_side_that_is_not_the_owner_ends_no_machine_whose_budget_is_spent(
    lab: Lab, machine: Machine
) -> None:
    """And no run fails for it."""
    lab.opened = lab.limited(0.001)
    Side(lab, TWO).takes()
    with Side(lab, ONE).runs():
        report = watch.fn(dry_run=False)
    assert [found.id for found in lab.machines()] == [machine.id]
    (row,) = [one for one in report.watched if one.over]
    assert f"recovered by host-{TWO}" in row.next_step
    assert f"watch of this host does nothing for workspace {DEMO}" in report.alerts


def test_a_job_of_a_side_that_is_not_the_owner_any_more_is_driven_no_further(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record stays as that of any job whose run is silent, which its owner goes on with."""
    one, two = Side(lab, ONE), Side(lab, TWO)
    monkeypatch.setattr(driven_job, "STOP_S", 0.02)
    real = records.Jobs.take
    with hurried(), one.runs():
        monkeypatch.setattr(
            records.Jobs, "take", lambda jobs, *a, **k: (real(jobs, *a, **k), two.takes())[0]
        )
        with pytest.raises(Recovered):
            job.fn(DEMO, ["sleep", "100"])
    (left,) = lab.opened.jobs.open()
    assert not left.ended
    assert [found.id for found in lab.machines()] == [machine.id]


def test_a_record_of_a_newer_torpor_stops_what_ends_or_rents(
    lab: Lab, machine: Machine, memory_store: MemoryStore
) -> None:
    """It may name an owner in words that this one does not know, and nobody else can sign it."""
    newer = msgspec.json.encode({"format": 99, "written_unix": 1.0, "later": True})
    lab.store.put(KEY, lab.store.signer.sign(KEY, newer))
    with Side(lab, ONE).runs(), pytest.raises(TorporError, match="bring it up to date"):
        hibernate.fn(DEMO)
    assert [found.id for found in lab.machines()] == [machine.id]


def test_the_limits_of_a_job_hold_while_nobody_knows_who_owns_its_workspace(
    lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command runs on for days, and its driver goes on with it."""
    looked, record = Event(), left_job(lab)
    real = lab.store.read

    def read(key: str, **how: Any) -> Any:
        if key == KEY:
            raise StoreDenied("not there")
        return real(key, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(lab.store, "read", read)
    monkeypatch.setattr(driven_job, "STOP_S", 0.02)
    monkeypatch.setattr(driven_job, "DRIVEN_S", 0.02)
    monkeypatch.setattr(driver.Limits, "look", lambda *_: looked.set())
    with (
        hurried(),
        Side(lab, ONE).runs() as opened,
        driver.driving(opened, record, lambda of: "") as driven,
    ):
        assert looked.wait(PATIENCE_S)
        moved = False
        with driven.tried_again():
            moved = True
        assert moved
