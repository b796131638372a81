"""A machine is kept while it holds, or has lost, what the workspace had before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import backup, delete_snapshots
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.lab_saves import killed_backup, save_by_schedule
from tests.fixtures.manifests import PLAIN
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from torpor.control.losses import USER_FILES
from torpor.control.reports import HibernateReport
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.upkeep.autosaves import KEPT, thin
from torpor.control.upkeep.pins import holds
from torpor.control.upkeep.reports import BackupReport
from torpor.shared.errors import UnsavedWork
from torpor.shared.format import missed
from torpor.shared.values import BASE, MachineId, SnapshotId

BOTH = ["~/workspace", "~/data"]


@pytest.fixture
def home(lab: Lab) -> Path:
    """A machine with two directories, of which a snapshot was taken."""
    home = lab.home(lab.rent().id)
    for folder in ("workspace", "data"):
        (home / folder).mkdir()
        for number in range(20):
            (home / folder / f"{number}.txt").write_text(f"{folder} {number}")
    hibernate_plainly(lab.wanting(paths=BOTH), destroy=False)
    return home


@pytest.mark.rule(22)
def test_a_directory_that_the_block_names_no_more_keeps_the_machine(lab: Lab, home: Path) -> None:
    hibernate_plainly(lab.wanting(paths=BOTH))
    # The block is another one now, and the wake of before brings both.
    home = lab.home(MachineId(wake_plainly(lab.wanting(paths=BOTH)).machine))
    (home / "data/new").write_text("work of a week")
    report = hibernate_plainly(lab.opened, destroy=False)  # as each night
    assert any(str(home / "data") in line for line in report.lost)
    with pytest.raises(UnsavedWork, match=str(home / "data")):
        hibernate_plainly(lab.opened)
    assert lab.machines()
    assert hibernate_plainly(lab.opened, accept_lost=["~/data"]).destroyed
    assert lab.machines() == []


@pytest.mark.rule(22)
def test_a_directory_that_lost_most_of_its_files_keeps_the_machine(lab: Lab, home: Path) -> None:
    opened = lab.wanting(paths=BOTH)
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    report = hibernate_plainly(opened, destroy=False)  # a backup does not make it the truth
    assert any("19 more files" in line for line in report.lost)
    with pytest.raises(UnsavedWork, match="19 more files"):
        hibernate_plainly(opened)
    assert lab.machines()
    assert hibernate_plainly(opened, accept_lost=["~/data"]).destroyed


def test_files_that_vanished_while_the_block_got_another_directory_keep_the_machine(
    lab: Lab, home: Path
) -> None:
    (home / "more").mkdir()
    (home / "more/new").write_text("new")
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    (home / "workspace/0.txt").rename(home / "workspace/moved")
    with pytest.raises(UnsavedWork, match=r"data had 19 more files \(124 bytes\) in the snapshot"):
        hibernate_plainly(lab.wanting(paths=["~/more", *BOTH[::-1]]))
    assert lab.machines()


def test_an_idle_machine_that_lost_files_gets_no_further_snapshot_at_each_look(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    opened = lab.wanting(paths=BOTH)
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    before = lab.snapshots()
    with pytest.raises(UnsavedWork, match="19 more files"):
        hibernate_plainly(opened, only_if_idle=True)
    assert lab.snapshots() == before


@pytest.mark.rule(22)
def test_a_disk_that_is_no_longer_mounted_keeps_the_machine(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lab.wanting(paths=BOTH)
    with monkeypatch.context() as before:
        before.setattr("torpor.machine.agent.state.disks", lambda *_: [os.fsencode(home / "nvme")])
        hibernate_plainly(opened, destroy=False)
    with pytest.raises(UnsavedWork, match=f"{home}/nvme was a disk with a part of the workspace"):
        hibernate_plainly(opened)
    assert lab.machines()
    assert hibernate_plainly(opened, accept_lost=["~/nvme"]).destroyed


def test_a_backup_of_what_is_left_deletes_no_older_snapshot(lab: Lab, home: Path) -> None:
    opened = lab.wanting(paths=BOTH)
    (before,) = lab.snapshots()
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    of = {"keep_last": 1, "keep_daily": 0, "keep_weekly": 0, "keep_monthly": 0}
    report = run_plainly(opened, backup, **of)
    assert isinstance(report, BackupReport)
    assert report.deleted == []
    assert before in lab.snapshots()


def test_a_backup_after_a_disk_was_unmounted_and_left_out_deletes_no_older_snapshot(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = lab.snapshots()
    with monkeypatch.context() as mounted:
        mounted.setattr("torpor.machine.agent.state.disks", lambda *_: [os.fsencode(home / "data")])
        hibernate_plainly(lab.wanting(paths=BOTH), destroy=False)
    shutil.rmtree(home / "data")
    of = {"keep_last": 1, "keep_daily": 0, "keep_weekly": 0, "keep_monthly": 0}
    report = run_plainly(lab.opened, backup, **of)
    assert isinstance(report, BackupReport)
    assert report.deleted == []
    assert before in lab.snapshots()


@pytest.mark.rule(22)
def test_the_newest_snapshot_is_compared_where_the_machine_remembers_none(
    lab: Lab, home: Path
) -> None:
    shutil.rmtree(home / ".torpor/workspaces")
    for number in range(1, 20):
        (home / f"workspace/{number}.txt").unlink()
    with pytest.raises(UnsavedWork, match=rf"19 more files.*|{home}/data"):
        hibernate_plainly(lab.opened)
    assert lab.machines()


# -- a directory whose name is a link now


def _move(home: Path, name: str, to: str, *, copied: bool = False) -> None:
    """Move a directory and leave a link to it; ``copied``: to another disk."""
    old, new = home / name, home / to
    new.parent.mkdir(exist_ok=True)
    if copied:
        shutil.copytree(old, new)
        shutil.rmtree(old)
    else:
        old.rename(new)
    old.symlink_to(new)


def _move_twice(home: Path) -> None:
    _move(home, "workspace", "big/work")
    _move(home, "big", "bigger")


def _replace_the_link(home: Path) -> None:
    (home / "link").unlink()
    (home / "disk").rename(home / "link")


def _missed(report: HibernateReport) -> list[str]:
    return [line for line in report.lost if "was a directory" in line or "more files" in line]


_MOVED: dict[str, tuple[list[str], list[str], Callable[[Path], None]]] = {
    "moved": (["~/workspace"], ["~/workspace"], lambda home: _move(home, "workspace", "big/work")),
    "copied": (
        ["~/workspace"],
        ["~/workspace"],
        lambda home: _move(home, "workspace", "big/work", copied=True),
    ),
    "moved twice": (["~/workspace"], ["~/workspace"], _move_twice),
    "its parent": (["~/in/work"], ["~/in/work"], lambda home: _move(home, "in", "big/in")),
    "another name": (
        ["~/workspace"],
        ["~/big/work"],
        lambda home: _move(home, "workspace", "big/work"),
    ),
    "into another": (
        BOTH,
        ["~/data"],
        lambda home: _move(home, "workspace", "data/work", copied=True),
    ),
    "behind a link": (["~/link"], ["~/link"], lambda home: _move(home, "disk", "big/disk")),
    "in place of its link": (["~/link"], ["~/link"], _replace_the_link),
}
"""The block's `paths` before and after, and what a user does in between."""


@pytest.fixture
def linked(lab: Lab) -> Path:
    """A machine with several directories, each of a few files."""
    home = lab.home(lab.rent().id)
    (home / "in").mkdir()
    for folder in ("workspace", "data", "disk", "in/work"):
        _fill(home / folder, 3)
    (home / "link").symlink_to("disk")
    return home


@pytest.mark.parametrize("moved", _MOVED)
@pytest.mark.parametrize("backed_up", [False, True])
def test_a_directory_that_its_user_moved_behind_a_link_of_its_name_keeps_no_machine(
    lab: Lab, linked: Path, moved: str, backed_up: bool
) -> None:
    before, now, move = _MOVED[moved]
    hibernate_plainly(lab.wanting(paths=before), destroy=False)
    move(linked)
    if backed_up:
        assert not _missed(hibernate_plainly(lab.wanting(paths=now), destroy=False))
    beside = lab.wanting(paths=now, accept_lost=[USER_FILES])  # the other directories of this home
    report = hibernate_plainly(beside)
    assert (report.destroyed, _missed(report)) == (True, [])


def _put_away(home: Path, leads_to: str) -> None:
    """Another directory takes the workspace's name, with a file of a name that the workspace has
    too."""
    (home / "workspace").rename(home / "old")
    _fill(home / "new", 1)
    (home / "new/0.txt").write_text("something else")
    (home / "workspace").symlink_to(leads_to)


@pytest.mark.parametrize(
    ("paths", "leads_to"),
    [(["~/workspace"], "new"), (["~/data"], "data"), (["~/data"], "old"), (["~/new"], "new")],
)
def test_a_link_that_does_not_lead_to_what_the_directory_of_its_name_held_keeps_the_machine(
    lab: Lab, linked: Path, paths: list[str], leads_to: str
) -> None:
    hibernate_plainly(lab.opened, destroy=False)
    _put_away(linked, leads_to)
    opened = lab.wanting(paths=paths)
    for _ in range(2):  # the first one's snapshot does not have it either
        with pytest.raises(UnsavedWork, match=rf"{linked}/workspace was a directory"):
            hibernate_plainly(opened)
    assert lab.machines()
    assert hibernate_plainly(opened, accept_lost=["~/workspace", USER_FILES]).destroyed


def test_a_directory_that_was_renamed_beside_a_link_to_its_copy_keeps_the_machine(
    lab: Lab, linked: Path
) -> None:
    """What its user did after the copy is there alone."""
    hibernate_plainly(lab.opened, destroy=False)
    shutil.copytree(linked / "workspace", linked / "copy")
    (linked / "workspace/later.txt").write_text("work of an hour")
    (linked / "workspace").rename(linked / "old")
    (linked / "workspace").symlink_to("copy")
    with pytest.raises(UnsavedWork, match=rf"{linked}/workspace was a directory"):
        hibernate_plainly(lab.opened)
    shutil.rmtree(linked / "old")
    assert hibernate_plainly(lab.opened, accept_lost=[USER_FILES]).destroyed


def test_a_link_that_leads_to_the_old_directory_again_keeps_no_machine(
    lab: Lab, linked: Path
) -> None:
    hibernate_plainly(lab.opened, destroy=False)
    _put_away(linked, "new")
    with pytest.raises(UnsavedWork, match=rf"{linked}/workspace was a directory"):
        hibernate_plainly(lab.opened)
    (linked / "workspace").unlink()
    (linked / "workspace").symlink_to("old")
    shutil.rmtree(linked / "new")
    assert hibernate_plainly(lab.opened, accept_lost=[USER_FILES]).destroyed


# -- what only autosaves hold


def _woken(lab: Lab, files: int = 0) -> Path:
    """The workspace of a woken machine, with so many files and one more in its snapshot."""
    place = lab.home(lab.rent().id) / "workspace"
    place.mkdir()
    _fill(place, files)
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened)
    return lab.home(MachineId(wake_plainly(lab.opened).machine)) / "workspace"


def _fill(folder: Path, files: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"{folder.name} {number}")


def _saved(lab: Lab) -> SnapshotId:
    """An autosave, and what `watch` deletes after it."""
    saved = save_by_schedule(lab)
    assert saved is not None
    thin(lab.store, lab.opened.spec.name, lab.opened.seal)
    return saved


def _holds(lab: Lab, name: str) -> list[SnapshotId]:
    """The snapshots with a file of that name."""
    return [
        snapshot
        for snapshot in snapshot_ids(lab.store, DEMO)
        if any(
            entry.path.endswith(name.encode())
            for entry in open_manifest(lab.store, DEMO, snapshot, PLAIN)[0].entries
        )
    ]


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Where disks seem to be mounted."""
    found = {b"/"}
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fsencode(path) in found)
    monkeypatch.setattr("torpor.machine.agent.state.disks", lambda *_: sorted(found - {b"/"}))
    return found


@pytest.mark.rule(22)
def test_an_unmounted_disk_that_only_autosaves_have_seen_keeps_the_machine_and_its_save(
    lab: Lab, mounted: set[bytes]
) -> None:
    """It has two fifths of the files: less than half of them is otherwise its user's deletion."""
    place = _woken(lab, 60)
    disk = place / "disk"
    mounted.add(os.fsencode(disk))
    _fill(disk, 40)
    holder = _saved(lab)
    (place / "notes").write_text("disk and all")
    holder = _saved(lab)
    mounted.remove(os.fsencode(disk))
    for file in disk.iterdir():
        file.unlink()
    for number in range(KEPT + 2):
        (place / "notes").write_text(f"without the disk {number}")
        _saved(lab)
    assert _holds(lab, "disk/39.txt") == [holder]
    report = hibernate_plainly(lab.opened, destroy=False)
    assert any(holder in line and "holds 40 files" in line for line in report.warnings)
    with pytest.raises(UnsavedWork, match=f"{disk} was a disk with a part of the workspace"):
        hibernate_plainly(lab.opened)
    assert lab.machines()
    assert _holds(lab, "disk/39.txt") == [holder]
    accepted = hibernate_plainly(lab.opened, accept_lost=["~/workspace/disk"])
    assert (accepted.destroyed, len(accepted.warnings)) == (True, 1)
    run_plainly(lab.opened, delete_snapshots, snapshots=[holder])
    assert wake_plainly(lab.opened).warnings == []


def test_a_workspace_with_a_disk_is_stored_for_the_first_time(
    lab: Lab, mounted: set[bytes]
) -> None:
    place = lab.home(lab.rent().id) / "workspace"
    place.mkdir()
    _fill(place / "disk", 3)
    mounted.add(os.fsencode(place / "disk"))
    report = hibernate_plainly(lab.opened)
    assert (report.destroyed, report.lost) == (True, [])


@pytest.mark.rule(22)
@pytest.mark.parametrize("later_saves", [0, KEPT + 2])
def test_a_disk_that_is_mounted_over_what_only_autosaves_hold_keeps_the_machine_and_its_save(
    lab: Lab, mounted: set[bytes], later_saves: int
) -> None:
    place = _woken(lab, 60)
    _fill(place / "data", 40)
    holder = _saved(lab)
    mounted.add(os.fsencode(place / "data"))
    (place / "data").rename(lab.folder / "hidden")
    _fill(place / "data", 1)
    for number in range(later_saves):
        (place / "notes").write_text(f"on another disk {number}")
        _saved(lab)
    assert _holds(lab, "data/39.txt") == [holder]
    with pytest.raises(UnsavedWork, match=f"{place}/data had 39 more files"):
        hibernate_plainly(lab.opened)
    assert lab.machines()
    report = hibernate_plainly(lab.opened, accept_lost=["~/workspace/data"])
    assert report.destroyed
    assert _holds(lab, "data/39.txt") == [holder]


@pytest.mark.rule(22)
def test_a_directory_that_only_autosaves_know_and_paths_do_not_keeps_the_machine_and_its_save(
    lab: Lab,
) -> None:
    """Its user took it out of `paths` while the machine saved itself."""
    place = _woken(lab, 20)
    _fill(place.parent / "data", 5)
    holder = save_by_schedule(lab, lab.wanting(paths=BOTH))
    assert holder is not None
    (place / "notes").write_text("alone")
    with pytest.raises(UnsavedWork, match=str(place.parent / "data")):
        hibernate_plainly(lab.opened)
    assert lab.machines()
    report = hibernate_plainly(lab.opened, accept_lost=["~/data"])
    assert report.destroyed
    assert any(holder in line and "~/data/0.txt" in line for line in report.warnings)
    assert holder in snapshot_ids(lab.store, DEMO)


@pytest.mark.rule(13)
@pytest.mark.parametrize("lost", [False, True])
def test_a_folder_that_only_autosaves_hold_stays_in_the_last_of_them_until_its_user_drops_it(
    lab: Lab, lost: bool
) -> None:
    """Whether the machine is hibernated or lost."""
    place = _woken(lab)
    _fill(place / "data", 350)
    _saved(lab)
    _fill(place / "data", 400)
    holder = _saved(lab)
    shutil.rmtree(place / "data")
    for number in range(KEPT + 2):  # `watch` thins them
        (place / "notes").write_text(f"notes {number}")
        _saved(lab)
    assert _holds(lab, "data/399.txt") == [holder]
    assert _holds(lab, "data/349.txt") == [holder]

    if lost:
        lab.lose_machines()
    else:
        backed_up = hibernate_plainly(lab.opened, destroy=False)
        hibernated = hibernate_plainly(lab.opened)
        assert hibernated.destroyed
        for report in (backed_up, hibernated):
            (words,) = [line for line in report.warnings if holder in line]
            assert "holds 400 files" in words
            assert "~/workspace/data/0.txt" in words
            assert "delete-snapshots" in words
        assert snapshot_ids(lab.store, DEMO)[1:] == [
            holder,
            backed_up.snapshot,
            hibernated.snapshot,
        ]
    again = wake_plainly(lab.opened)
    (words,) = [line for line in again.warnings if holder in line]
    assert "holds 400 files" in words
    place = lab.home(MachineId(again.machine)) / "workspace"
    (place / "notes").write_text("after the wake")
    report = hibernate_plainly(lab.opened)
    assert any(holder in line for line in report.warnings)
    assert _holds(lab, "data/399.txt") == [holder]
    run_plainly(lab.opened, delete_snapshots, snapshots=[holder])
    assert not any(holder in line for line in wake_plainly(lab.opened).warnings)


@pytest.mark.rule(13)
def test_what_a_killed_backup_alone_holds_outlives_retention_and_is_named(lab: Lab) -> None:
    """The next backup verifies it, and its machine has compared nothing with it."""
    place = _woken(lab)
    _fill(place / "data", 40)
    holder = killed_backup(lab)
    shutil.rmtree(place / "data")
    for number in range(2):
        (place / "notes").write_text(f"without the data {number}")
        report = run_plainly(lab.opened, backup, keep_last=1)
        assert isinstance(report, BackupReport)
        assert holder not in report.deleted
        assert report.hibernated is not None
        assert any(holder in line for line in report.hibernated.warnings)
        (verdict,) = [one for one in report.verdicts if one.snapshot == holder]
    assert verdict.reasons[0].startswith("pinned: it alone holds 40 files")
    lab.lose_machines()
    assert any(holder in line for line in wake_plainly(lab.opened).warnings)


@pytest.mark.parametrize(
    ("name", "held"), [("mine", 1), (f"{BASE}{'0' * 32}", 0)], ids=["a user's", "an environment"]
)
def test_an_older_environment_of_a_stack_is_pinned_for_nothing(
    lab: Lab, name: str, held: int
) -> None:
    """The setup makes it again, and a deploy deletes it."""
    of = lab.named(name)
    place = of.home(of.rent().id) / "workspace"
    place.mkdir()
    _fill(place, 40)
    hibernate_plainly(of.opened, destroy=False)
    for number in range(1, 40):
        (place / f"{number}.txt").unlink()
    hibernate_plainly(of.opened, destroy=False)
    assert len(holds(of.store, of.opened.spec.name)) == held


@pytest.mark.rule(13)
def test_a_wake_names_what_the_save_that_it_leaves_aside_misses(lab: Lab) -> None:
    place = _woken(lab)
    (begun,) = snapshot_ids(lab.store, DEMO)
    _fill(place / "data", 40)
    holder = _saved(lab)
    shutil.rmtree(place / "data")
    (place / "notes").write_text("without the data")
    aside = _saved(lab)
    lab.lose_machines()
    other = lab.home(MachineId(wake_plainly(lab.opened, snapshot=begun).machine)) / "workspace"
    (other / "notes").write_text("on from the first snapshot")
    newest = hibernate_plainly(lab.opened).snapshot
    woken = wake_plainly(lab.opened)
    assert woken.snapshot == newest
    assert any(f"snapshot {newest} lacks the work in {aside}" in line for line in woken.warnings)
    (words,) = [line for line in woken.warnings if holder in line]
    assert "holds 40 files (270 bytes) that a later snapshot missed" in words


def test_what_its_user_brought_back_is_superseded_like_any_other_save(lab: Lab) -> None:
    place = _woken(lab)
    _fill(place / "data", 40)
    holder = _saved(lab)
    (place / "data").rename(lab.folder / "elsewhere")
    (place / "notes").write_text("without the data")
    assert any(holder in line for line in hibernate_plainly(lab.opened).warnings)
    place = lab.home(MachineId(wake_plainly(lab.opened).machine)) / "workspace"
    (lab.folder / "elsewhere").rename(place / "again")
    assert hibernate_plainly(lab.opened).warnings == []
    assert holder not in snapshot_ids(lab.store, DEMO)


@pytest.mark.rule(13)
def test_a_working_day_keeps_no_machine_and_at_most_a_few_saves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root of 500 files: a checkout, an installation, a build that is made and removed, and
    checkpoints that follow each other."""
    monkeypatch.setattr(missed, "FEW_BYTES", 100_000)
    place = _woken(lab, 500)

    def checkpoint(number: int) -> None:
        (place / f"checkpoint-{number}").write_bytes(os.urandom(200_000))
        (place / f"checkpoint-{number - 1}").unlink(missing_ok=True)
        _saved(lab)

    checkpoint(1)
    for number in range(200):  # `git checkout`
        (place / f"{number}.txt").rename(place / f"other-{number}.txt")
    for number in range(200, 300):
        (place / f"{number}.txt").unlink()
    checkpoint(2)
    _fill(place / "site-packages", 1000)  # `pip install`
    checkpoint(3)
    _fill(place / "build", 5000)
    built = _saved(lab)
    checkpoint(4)
    shutil.rmtree(place / "build")
    for number in range(5, 9):
        checkpoint(number)
    saves = snapshot_ids(lab.store, DEMO)[1:]
    assert len(saves) <= KEPT + 2
    assert built not in saves  # a later one holds the build
    report = hibernate_plainly(lab.opened)
    assert (report.destroyed, report.lost) == (True, [])
    assert len(lab.snapshots()) == 3
    (words,) = report.warnings
    assert "holds 5,001 files" in words  # with the checkpoint that was there then
    assert "~/workspace/build/0.txt" in words


def test_a_wake_names_the_snapshot_before_one_whose_machine_missed_most_of_a_directory(
    lab: Lab, home: Path
) -> None:
    (before,) = lab.snapshots()
    shutil.rmtree(home / "workspace")
    (home / "workspace").mkdir()
    (home / "workspace/notes").write_text("what is left")
    assert run_plainly(lab.wanting(paths=BOTH), backup).snapshot != before.snapshot
    lab.market.alive.clear()
    warnings = wake_plainly(lab.wanting(paths=BOTH)).warnings
    assert any(f"name {before.snapshot} as `snapshot` of wake" in words for words in warnings)


@pytest.mark.rule(13)
def test_a_wake_names_a_snapshot_that_exists_and_holds_what_the_machine_missed(
    lab: Lab, home: Path
) -> None:
    """The machine was backed up again without the files, and their newest snapshot was deleted."""
    opened = lab.wanting(paths=BOTH)
    (holder,) = lab.snapshots()
    (home / "data/0.txt").write_text("one more line")
    deleted = run_plainly(opened, backup).snapshot
    for number in range(1, 20):
        (home / f"data/{number}.txt").unlink()
    for number in range(2):
        (home / "workspace/0.txt").write_text(f"without the data {number}")
        run_plainly(opened, backup)

    for name in (deleted, holder.snapshot):
        lab.lose_machines()
        missed_there, words = wake_plainly(opened).warnings
        assert "data (19 files)" in missed_there
        assert f"name {name} as `snapshot` of wake" in words
        run_plainly(opened, delete_snapshots, snapshots=[name])
    lab.lose_machines()
    (missed_there,) = wake_plainly(opened).warnings
    assert "data (19 files)" in missed_there
