"""A week of ordinary use: one workspace, many machines, and programs that are not torpor's judge
what comes back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flows
from tasks.retention import look_at_newest
from tasks.workspace import OpenWorkspace
from tests.fixtures.desk import DATABASE, HOOKS, Desk, Look, whole_rows
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.sshd import Sshd
from tests.fixtures.stores import Server as StoreServer
from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import until
from tests.fixtures.world import World, make_world
from torpor.shared.values import MachineId


class Week:
    """The days of a workspace whose database is always in use, and what must come back."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.opened: OpenWorkspace = world.wanting(**HOOKS)
        self.desk = Desk(world.folder / "desk")
        self.machine = MachineId("")

    def flow(self, flow: Any, **options: Any) -> Any:
        return run_plainly(self.opened, flow, **options)

    def begin(self) -> None:
        """A first machine, and all that a person makes on it."""
        self.machine = self.flow(flows.create).id
        self.desk.sit(self.world.home(self.machine))
        self.desk.set_up()
        self.desk.start_writer(self.machine)

    def look(self) -> Look:
        let_settle()
        return self.desk.look()

    def sleep(self) -> Look:
        """The machine is gone, with the program that wrote until then."""
        looked = self.look()
        report = hibernate_plainly(self.opened)
        assert report.destroyed and report.changed == report.warnings == []
        assert self.world.machines() == []
        return looked

    def wake(self, was: Look) -> None:
        """All is as it was; the program goes on where it was paused."""
        self.rise()
        self.is_as(was)
        self.desk.start_writer(self.machine)

    def rise(self) -> None:
        report = wake_plainly(self.opened)
        assert report.machine != self.machine
        self.machine = MachineId(report.machine)
        self.desk.sit(self.world.home(self.machine))

    def is_as(self, was: Look) -> None:
        assert was.differs(self.desk.look()) == []
        assert self.whole_rows(self.desk.place / DATABASE) == self.desk.rows_at_pause()

    def backup(self, **options: Any) -> Any:
        """The program wrote before, and writes again."""
        report = self.flow(flows.backup, **options)
        paused = self.desk.rows_at_pause()
        until(lambda: self.desk.rows() > paused, "the program goes on")
        return report

    def whole_rows(self, database: Path) -> int:
        return whole_rows(database, self.world.folder / "looked-at")


@pytest.fixture
def week(seaweed: StoreServer) -> Iterator[Week]:
    with make_world(seaweed, sealed=True) as world:
        made = Week(world)
        yield made
    made.desk.reap_writer()


def test_a_week_of_work_comes_back_each_morning(week: Week, sshd: Sshd) -> None:
    desk, place = week.desk, week.desk.place

    # Monday: set up, back up while the database is in use, go home.
    week.begin()
    monday = week.backup().snapshot
    was = week.sleep()
    assert week.desk.rows_at_pause() > 0

    # Tuesday: on another machine. A file is deleted by mistake and comes back from Monday.
    week.wake(was)
    (place / "data/7/107.txt").unlink()
    kept = desk.home / "recovered"
    week.flow(flows.restore_path, path="data/7/107.txt", into=str(kept.resolve()), snapshot=monday)
    assert (kept / "107.txt").read_text() == "sample 107\n"
    week.flow(flows.restore_path, path="db", into=str(kept.resolve()), snapshot=monday)
    assert 0 < week.whole_rows(kept / "db/rows.db") < desk.rows_at_pause()
    (kept / "107.txt").rename(place / "data/7/107.txt")
    desk.commit("Finish what was staged")
    desk.write("data/7/new.txt", "new\n")
    desk.try_to("setfacl", "-x", "u:1234", "shared/paper.txt")
    shutil.rmtree(kept)  # it lies beside the workspace
    was = week.sleep()

    # Wednesday: a colleague's machine gets the workspace, and then what changed.
    week.wake(was)
    colleague = _of_a_colleague(sshd, week.world)
    week.flow(flows.replicate, count=0, machines=[colleague])
    desk.sit(sshd.home)
    assert was.differs(desk.look()) == []
    desk.sit(week.world.home(week.machine))
    desk.write("src/model.py", "print('best')\n")
    desk.commit("Improve it once more")
    (place / "data/8/108.txt").unlink()
    was = week.look()
    assert not hibernate_plainly(week.opened, destroy=False, machine=week.machine).destroyed
    week.flow(flows.sync, machine=colleague)
    desk.sit(sshd.home)
    week.is_as(was)
    desk.sit(week.world.home(week.machine))
    week.sleep()

    # Thursday: a job rents a machine for itself.
    script = "venv/bin/python -c 'import hello; hello.main()' >>src/model.py && git commit -qam Job"
    done = week.flow(flows.job, command=["sh", "-c", script])
    assert done.job.state == "succeeded" and week.world.machines() == []

    # Friday: what is old goes, what is kept is whole.
    week.rise()
    assert desk.git("show", "--format=%s", "--numstat").split() == ["Job", "1", "0", "src/model.py"]
    desk.git("fsck", "--full", "--strict")
    desk.start_writer(week.machine)
    week.backup()
    desk.write("data/9/more.txt", "more\n")
    assert week.backup(keep_last=1).deleted
    week.flow(flows.prune, dry_run=False)
    with plain(week.opened):
        assert look_at_newest(week.opened, 26.0)
    was = week.sleep()
    assert week.flow(flows.verify, snapshot="all").damaged_count == 0
    week.flow(flows.verify, depth="drill")
    week.wake(was)


def _of_a_colleague(sshd: Sshd, world: World) -> str:
    """A machine with OpenSSH that torpor did not rent."""
    with (sshd.folder / "authorized_keys").open("a") as keys:
        keys.write(f"{world.access.public_key}\n")
    at = sshd.endpoint
    return f"{at.user}@{at.host}:{at.port}"
