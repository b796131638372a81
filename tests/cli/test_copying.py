"""`torpor cp`, `push` and `pull`, with a shell of this host in the machine's place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from torpor.control.upkeep.differences import ListedEntry
from torpor.control.upkeep.reports import BackupReport
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineUnreachable,
    RunCancelled,
    TorporError,
    WorkspaceAsleep,
    WorkspaceAwake,
    WorkspaceBusy,
)
from torpor.shared.values import SnapshotId
from torpor_cli import copying
from torpor_cli.copying import Side, begin_argv, cp, look_at, pull, push, send


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands are given."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(copying, "connected", nullcontext)
    return here


STORED = BackupReport("mywork", SnapshotId("S1"), None, [], [])  # type: ignore[arg-type]


@dataclass
class Kept:
    """What stands in the way of a push, and the snapshots that were taken before one. ``excluded``:
    names that no snapshot has. ``meanwhile``: what somebody does on the machine after a snapshot
    was taken."""

    there: Path
    jobs: list[Any] = field(default_factory=list)
    snapshots: list[set[str]] = field(default_factory=list)
    entries: list[ListedEntry] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    meanwhile: Callable[[], object] = lambda: None
    report: Any = STORED

    def backup(self, workspace: str, machine: str) -> Any:
        assert workspace == "mywork"
        self.snapshots.append(names_in(self.there))
        paths = [path for path in self.there.rglob("*") if not self.excluded & {*path.parts}]
        self.entries = [listed(path) for path in paths]
        self.meanwhile()
        return self.report

    def list_entries(self, workspace: str, snapshot: str) -> list[ListedEntry]:
        assert (workspace, snapshot) == ("mywork", "S1")
        return self.entries


def listed(path: Path) -> ListedEntry:
    """What a snapshot has of it: of a file called ``same``, another name of here/old/z."""
    info = path.lstat()
    if path.name == "same":
        return ListedEntry(
            str(path), "hard link", 0, "", 0, 0, info.st_mtime_ns, "here/old/z", False
        )
    kind: Any = "symlink" if path.is_symlink() else "directory" if path.is_dir() else "file"
    target = os.readlink(path) if path.is_symlink() else ""
    return ListedEntry(str(path), kind, info.st_size, "", 0, 0, info.st_mtime_ns, target, False)


def job_on(machine: str) -> SimpleNamespace:
    attempt = SimpleNamespace(machine=machine) if machine else None
    return SimpleNamespace(
        id="3f2a9c81d04e", state="running", attempt=attempt, others=[], driven=False
    )


@pytest.fixture(autouse=True)
def kept(there: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    kept = Kept(there)
    opened = SimpleNamespace(jobs=SimpleNamespace(open=lambda: kept.jobs))
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
    monkeypatch.setattr("flows.backup", kept.backup)
    monkeypatch.setattr("flows.procedures.listing.list_entries", kept.list_entries)
    return kept


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace's directory on its machine."""
    there = tmp_path / "there"
    there.mkdir()
    answers(monkeypatch, lambda: Side("mywork", begin_argv(), [str(there)]))
    return there


def answers(monkeypatch: pytest.MonkeyPatch, side: Callable[[], Side]) -> None:
    monkeypatch.setattr(copying, "machine_side", lambda workspace, machine, mark="": side())


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch, there: Path) -> Path:
    """The workspace is asleep: its files are those of its newest snapshot."""

    def nowhere() -> Side:
        raise WorkspaceAsleep("workspace mywork is asleep: `torpor wake mywork`")

    def restored(
        workspace: str, path: str, into: str, machine: str, leave_git: bool
    ) -> SimpleNamespace:
        assert (workspace, machine, leave_git) == ("mywork", "here", True)
        found = Path(into) / Path(path).name
        found.parent.mkdir()
        subprocess.run(["cp", "-a", there / path, found], check=True)
        warnings = ["here/.git was left out"] if path == "here" else []
        return SimpleNamespace(restored_to=str(found), warnings=warnings)

    answers(monkeypatch, nowhere)
    no_jobs = SimpleNamespace(open=list)
    opened = SimpleNamespace(spec=SimpleNamespace(paths=["~/workspace"]), jobs=no_jobs)
    monkeypatch.setattr("tasks.workspace_blocks.open_stored", lambda workspace: opened)
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
    monkeypatch.setattr("tasks.sleep.check_not_asleep", lambda opened: None)
    monkeypatch.setattr("flows.restore_path", restored, raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    return there


def written(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def repository(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", folder], check=True)


def in_index(folder: Path, name: str) -> None:
    """Make it a submodule of the repository, whose commit may be away."""
    entry = f"160000,{'1' * 40},{name}"
    argv = ["git", "update-index", "--add", "--cacheinfo", entry]
    subprocess.run(argv, cwd=folder, check=True)


def test_cp_takes_the_name_of_a_target_that_is_not_there_and_goes_into_a_directory_that_is(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "data" / "a.txt")
    assert cp("data", "mywork:first") == 0
    assert cp("data", "mywork:first/") == 0
    assert cp("data", "mywork:") == 0
    assert names_in(there) == {"first/a.txt", "first/data/a.txt", "data/a.txt"}
    assert f"copied 1 file, 4 bytes, to mywork:{there}/first\n" in capsys.readouterr().out
    assert cp("mywork:first", "back") == 0
    assert cp("mywork:data/a.txt", "mywork:first/data", ".") == 0
    assert names_in(here) == {
        "data/a.txt",
        "back/a.txt",
        "back/data/a.txt",
        "a.txt",
    }


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["a"], "name a source and a target"),
        (["a", "b"], "from this host to a workspace"),
        (["mywork:a", "mywork:b"], "from this host to a workspace"),
        (["mywork:a", "other:b", "."], "from this host to a workspace"),
        (["mywork:a", "b", "."], "from this host to a workspace"),
        (["nothing", "mywork:a"], "nothing is not there"),
        (["/", "mywork:a"], "name a directory"),
    ],
)
def test_cp_says_what_it_does_not_understand(paths: list[str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        cp(*paths)


def test_a_directory_that_no_snapshot_has_is_refused_unless_it_is_wished(
    here: Path, tmp_path: Path
) -> None:
    written(here / "a")
    outside = tmp_path / "outside"
    with pytest.raises(MachineError, match="no snapshot would have it"):
        cp("a", f"mywork:{outside}")
    with pytest.raises(MachineError, match="no snapshot would have it"):
        cp("a", "mywork:../outside")
    assert not outside.exists()
    assert cp("a", f"mywork:{outside}", outside=True) == 0
    assert outside.read_text() == "text"


def test_what_is_not_on_the_machine_is_named(there: Path) -> None:
    with pytest.raises(MachineError, match=f"mywork: {there}/nothing is not there"):
        cp("mywork:nothing", ".")


def test_what_is_newer_stays_and_the_exit_code_says_so(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(written(here / "a"), ns=(1, 1))
    written(there / "a", "edited there")
    assert cp("a", "mywork:a") == 3
    assert "kept, as it is newer at the target: a. --overwrite" in capsys.readouterr().err
    assert (there / "a").read_text() == "edited there"
    assert cp("a", "mywork:a", overwrite=True) == 0
    assert (there / "a").read_text() == "text"


def test_push_leaves_what_gitignore_names_and_delete_leaves_it_there(
    here: Path, there: Path
) -> None:
    repository(here)
    written(here / ".gitignore", "/outputs/\n*.log\n")
    written(here / "src" / "train.py")
    written(here / "old.py")
    written(here / "x.log")
    assert push("mywork") == 0
    assert names_in(there) == {"here/.gitignore", "here/src/train.py", "here/old.py"}
    written(there / "here" / "outputs" / "model")
    (here / "old.py").unlink()
    assert push("mywork", delete=True, dry_run=True) == 0
    assert (there / "here" / "old.py").exists()
    assert push("mywork", delete=True) == 0
    assert names_in(there / "here") == {".gitignore", "src/train.py", "outputs/model"}
    assert push("mywork", to="all", everything=True) == 0
    assert "x.log" in names_in(there / "all")
    assert not (there / "all" / ".git").exists()


def test_push_stores_what_is_there_before_it_replaces_or_deletes_any_of_it(
    here: Path, there: Path, kept: Kept
) -> None:
    written(here / "a")
    assert push("mywork") == 0
    assert kept.snapshots == [], "a plain push replaces nothing that is newer there"
    written(there / "here" / "mine")
    assert push("mywork", delete=True, dry_run=True) == 0
    assert kept.snapshots == []
    assert push("mywork", overwrite=True) == 0
    assert push("mywork", delete=True) == 0
    assert kept.snapshots == [{"here/a", "here/mine"}] * 2
    assert names_in(there) == {"here/a"}
    written(there / "here" / "mine")
    kept.report = "it is asleep"
    with pytest.raises(WorkspaceAwake, match="has ended meanwhile"):
        push("mywork", delete=True)
    assert names_in(there) == {"here/a", "here/mine"}


@pytest.mark.rule(23)
@pytest.mark.parametrize("wish", [{}, {"delete": True}, {"overwrite": True}])
def test_push_changes_no_files_under_a_job(
    here: Path, there: Path, kept: Kept, wish: dict[str, bool]
) -> None:
    written(here / "a")
    kept.jobs = [job_on("m-1")]
    with pytest.raises(WorkspaceBusy, match="3f2a9c81d04e of workspace mywork is running"):
        push("mywork", **wish)  # type: ignore[arg-type]
    assert names_in(there) == set()
    assert push("mywork", dry_run=True) == 0


def test_a_job_on_another_machine_keeps_no_push_from_this_one(
    here: Path, there: Path, kept: Kept
) -> None:
    written(here / "a")
    kept.jobs = [job_on("m-1")]
    assert push("mywork", machine="m-2", delete=True) == 0
    kept.jobs[0].others = [SimpleNamespace(machine="m-3")]
    for machine in ("m-1", "m-3"):
        with pytest.raises(WorkspaceBusy):
            push("mywork", machine=machine)
    kept.jobs = [job_on("")]
    with pytest.raises(WorkspaceBusy):
        push("mywork", machine="m-2")


@pytest.mark.rule(23)
def test_cp_replaces_no_file_under_a_job_and_brings_new_ones(
    here: Path, there: Path, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(written(there / "data" / "a", "read by the job"), ns=(1, 1))
    written(here / "data" / "a")
    written(here / "data" / "new")
    kept.jobs = [job_on("m-1")]
    assert cp("data", "mywork:", overwrite=True) == 3
    assert (there / "data" / "a").read_text() == "read by the job"
    assert (there / "data" / "new").read_text() == "text"
    said = capsys.readouterr().err
    assert "neither replaced nor deleted: data/a (it is there)" in said
    assert "job 3f2a9c81d04e of workspace mywork is running, and `torpor cp` replaces no" in said
    assert cp("data", "mywork:", machine="m-2") == 0
    assert (there / "data" / "a").read_text() == "text"


@pytest.mark.rule(23)
@pytest.mark.parametrize(("driven", "code"), [(True, 3), (False, 0)])
def test_cp_replaces_files_while_a_job_only_waits_for_its_run(
    here: Path, there: Path, kept: Kept, driven: bool, code: int
) -> None:
    os.utime(written(there / "a", "there"), ns=(1, 1))
    written(here / "a")
    kept.jobs = [job_on("")]
    kept.jobs[0].driven = driven
    assert cp("a", "mywork:a", overwrite=True) == code
    with pytest.raises(WorkspaceBusy):
        push("mywork")


@pytest.mark.rule(23)
@pytest.mark.parametrize("wish", ["delete", "overwrite"])
def test_push_changes_nothing_where_a_job_has_begun_while_the_snapshot_was_taken(
    here: Path, there: Path, kept: Kept, wish: str
) -> None:
    written(there / "here" / "mine")
    os.utime(written(here / "a"), ns=(1, 1))
    written(there / "here" / "a", "there")
    kept.meanwhile = lambda: kept.jobs.append(job_on("m-1"))
    with pytest.raises(WorkspaceBusy):
        push("mywork", **{wish: True})  # type: ignore[arg-type]
    assert (there / "here" / "a").read_text() == "there"
    assert (there / "here" / "mine").exists()


@pytest.mark.rule(23)
@pytest.mark.parametrize("wish", ["delete", "overwrite"])
def test_push_changes_nothing_where_the_folder_has_become_another_one_meanwhile(
    here: Path, there: Path, kept: Kept, wish: str
) -> None:
    os.utime(written(here / "a"), ns=(1, 1))
    written(there / "here" / "a", "there")
    written(there / "other" / "a", "there, too")

    def meanwhile() -> None:
        (there / "here").rename(there / "before")
        (there / "here").symlink_to("other")

    kept.meanwhile = meanwhile
    with pytest.raises(MachineError, match=r"has become .*other: nothing was copied"):
        push("mywork", **{wish: True})  # type: ignore[arg-type]
    assert (there / "other" / "a").read_text() == "there, too"


@pytest.mark.rule(23)
def test_push_delete_leaves_what_changed_while_the_snapshot_read_it(
    here: Path, there: Path, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "a")
    written(there / "here" / "log")
    written(there / "here" / "same")  # of a file that the list of the snapshot lacks

    def meanwhile() -> None:
        kept.entries = [
            msgspec.structs.replace(one, changed_while_read=True) for one in kept.entries
        ]

    kept.meanwhile = meanwhile
    assert push("mywork", delete=True) == 3
    assert names_in(there / "here") == {"a", "log", "same"}
    assert "has another version of it: log, same" in capsys.readouterr().err


@pytest.mark.rule(23)
def test_push_delete_leaves_what_the_snapshot_before_it_lacks_and_names_it(
    here: Path, there: Path, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "a")
    assert push("mywork") == 0
    folder = there / "here"
    for name in ("cache/x", "cache/deep/y", "old/z", "run.log", "read", "link/to"):
        written(folder / name)
    os.link(folder / "old" / "z", folder / "same")
    (folder / "symlink").symlink_to("read")
    kept.excluded = {"cache"}
    assert push("mywork", delete=True, dry_run=True) == 0
    assert "deep" in capsys.readouterr().out, "as no snapshot was taken"
    assert push("mywork", delete=True) == 0
    assert names_in(folder) == {"a", "cache/x", "cache/deep/y"}
    said = capsys.readouterr().err
    assert "kept, as snapshot S1, which was taken before, does not have it" in said
    assert said.rstrip().endswith("is new: cache")

    for name in ("run.log", "read", "gone"):
        written(folder / name)

    def meanwhile() -> None:
        written(folder / "new" / "result")
        before = (folder / "run.log").stat()
        (folder / "run.log").write_text("more")
        os.utime(folder / "run.log", ns=(before.st_atime_ns, before.st_mtime_ns))
        written(folder / "read", "longer text")

    kept.meanwhile = meanwhile
    assert push("mywork", delete=True) == 3
    assert names_in(folder) == {"a", "cache/x", "cache/deep/y", "new/result", "run.log", "read"}
    said = capsys.readouterr().err
    assert "run.log (somebody has changed it meanwhile)" in said, "though its time was set back"
    assert "has another version of it: read" in said
    assert "is new: cache, new\n" in said


@pytest.mark.rule(23)
def test_push_overwrite_leaves_newer_files_that_the_snapshot_before_it_lacks(
    here: Path, there: Path, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = there / "here"
    for name in ("a", "best.pt", "late"):
        os.utime(written(here / name), ns=(1, 1))
        written(folder / name, "there")
    kept.excluded = {"best.pt"}
    kept.meanwhile = lambda: written(folder / "late", "later")
    assert push("mywork", overwrite=True) == 3
    found = {name: (folder / name).read_text() for name in ("a", "best.pt", "late")}
    assert found == {"a": "text", "best.pt": "there", "late": "later"}
    said = capsys.readouterr().err
    assert "is new: best.pt\n" in said
    assert "late (somebody has changed it meanwhile)" in said


@pytest.mark.rule(23)
def test_delete_is_refused_where_no_snapshot_has_what_it_deletes(
    here: Path, tmp_path: Path, kept: Kept
) -> None:
    written(here / "a")
    outside = written(tmp_path / "outside" / "b")
    for dry_run in (False, True):
        with pytest.raises(MachineError, match="so no snapshot has what --delete would delete"):
            push("mywork", to=str(outside.parent), outside=True, delete=True, dry_run=dry_run)
    assert (outside.exists(), kept.snapshots) == (True, [])


def test_gitignore_counts_also_in_a_folder_without_a_repository(here: Path) -> None:
    written(here / ".gitignore", "*.log\n")
    written(here / "a" / ".gitignore", "secret\n")
    written(here / "a" / "secret")
    written(here / "a" / "x.py")
    written(here / "x.log")
    assert look_at(here, ["/b"]).names == (".gitignore", "a/.gitignore", "a/x.py")
    assert (look_at(here).files, look_at(here).bytes) == (3, 6 + 7 + 4)


def test_gitignore_of_a_repository_in_the_folder_counts_below_it(here: Path, there: Path) -> None:
    repository(here)
    written(here / ".gitignore", "/other/\n")
    for name in ("vendored", "other", "vendored/deeper"):
        repository(here / name)
        written(here / name / "a.py")
        written(here / name / ".gitignore", ".env\n")
        written(here / name / ".env", "secret")
    submodule = here / "sub"
    repository(submodule)
    written(submodule / ".gitignore", ".env\n")
    written(submodule / ".env", "secret")
    in_index(here, "sub")
    assert push("mywork") == 0
    sent = {
        f"here/{name}"
        for name in (
            ".gitignore",
            "sub/.gitignore",
            *(f"vendored/{one}" for one in (".gitignore", "a.py")),
            *(f"vendored/deeper/{one}" for one in (".gitignore", "a.py")),
        )
    }
    assert names_in(there) == sent
    of_the_machine = {
        f"here/{name}" for name in ("vendored/deeper/.env", "other/result", "sub/.env")
    }
    for name in of_the_machine:
        written(there / name)
    written(there / "here" / "vendored" / "old.py")
    assert push("mywork", delete=True) == 0
    assert names_in(there) == sent | of_the_machine
    assert (pull("mywork"), (here / "sub" / ".env").read_text()) == (0, "secret")


def test_what_git_does_not_look_into_is_left_out_and_named(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(here)
    written(here / "real" / "a")
    (here / "data").symlink_to("real")
    in_index(here, "sub")
    written(here / "sub" / "mine")
    written(there / "here" / "data" / "a", "there")
    written(there / "here" / "sub" / "a", "there")
    written(there / "here" / "new.py")
    before = names_in(here)
    assert pull("mywork") == 0
    assert names_in(here) == before | {"new.py"}
    assert "left out: what the machine has below data, sub: here" in capsys.readouterr().err
    (here / "data").unlink()
    (here / "real" / "a").rename(here / "b")
    (there / "here" / "data" / "a").unlink()
    written(there / "here" / "old.py")
    assert push("mywork", delete=True) == 0
    assert names_in(there / "here") == {"b", "new.py", "sub/a"}
    assert "left out: sub (a submodule that git has not fetched)" in capsys.readouterr().err


def test_a_host_without_git_is_told_of_the_file_that_needs_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    written(here / "a" / "x.py")
    assert look_at(here).names == ("a/x.py",)
    written(here / "a" / ".gitignore", "x.py")
    with pytest.raises(InvalidInput, match="this host has no `git`, which reads it"):
        look_at(here)


@pytest.mark.rule(23)
def test_pull_takes_no_repository_of_a_machine_nor_what_is_ignored_here(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(here)
    before = names_in(here)
    written(here / ".gitignore", "/outputs/\n")
    written(there / "here" / "new.py")
    written(there / "here" / ".git" / "hooks" / "post-checkout")
    written(there / "here" / "sub" / ".GIT" / "config")
    written(there / "here" / "sub" / "git~1" / "config")
    written(there / "here" / ".g\u200cit")
    written(there / "here" / "outputs" / "model")
    (there / "here" / "passwd").symlink_to("/etc/passwd")
    assert pull("mywork") == 1, "the link leads out of the folder"
    assert names_in(here) == before | {".gitignore", "new.py"}
    assert not (here / "outputs").exists() and not (here / "sub").exists()
    said = capsys.readouterr().err
    assert "left out: .git, .g\u200cit, sub/.GIT, sub/git~1. What a machine" in said
    (there / "here" / "passwd").unlink()
    written(here / "mine.py")
    assert pull("mywork", delete=True, yes=True) == 0
    assert names_in(here) == before | {"new.py"}, "as .gitignore, mine.py is not there"
    assert capsys.readouterr().err.count("left out") == 1, "and not what is here alone"


def test_pull_deletes_nothing_here_where_gitignore_names_all_that_is_there(
    here: Path, there: Path
) -> None:
    written(here / ".gitignore", "/outputs/\n")
    written(here / "train.py")
    written(there / "here" / "outputs" / "best.pt")
    (there / "here" / "empty").mkdir()
    with pytest.raises(TorporError, match="--delete would delete all"):
        pull("mywork", delete=True, yes=True)
    assert names_in(here) == {".gitignore", "train.py"}


def test_pull_asks_with_their_number_before_it_deletes_files_here(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "src" / "m.py")
    written(here / "train.py")
    written(there / "here" / "new.py")
    asked = r"Delete 2 files in .*/here that mywork does not have: train\.py, src/m\.py\?"
    with pytest.raises(InvalidInput, match=rf"{asked} .* add --yes"):
        pull("mywork", delete=True)
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: "n\n")
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(RunCancelled, match="nothing was copied or deleted"):
        pull("mywork", delete=True)
    assert names_in(here) == {"src/m.py", "train.py"}
    assert re.search(asked, capsys.readouterr().err)
    assert pull("mywork", delete=True, dry_run=True) == 0
    terminal.readline = lambda: "y\n"
    assert pull("mywork", delete=True) == 0
    assert names_in(here) == {"new.py"}


def test_a_connection_that_breaks_is_made_again_and_the_copy_goes_on(
    here: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("torpor_cli.copying.sleep", pauses.append)
    content = os.urandom(8_000_000)
    (here / "big").write_bytes(content)
    count = tmp_path / "count"
    whole = f'echo >> {count}; test "$(wc -l < {count})" -gt 2 && exec "$@"; '
    away = f'test "$(wc -l < {count})" -gt 1 && exit 255; '
    broken = f'{whole} {away} dd bs=65536 count=60 2>/dev/null | "$@"'
    argv = ["/bin/sh", "-c", broken, "sh", *begin_argv()]
    answers(monkeypatch, lambda: Side("mywork", argv, [str(there)]))
    assert cp("big", "mywork:big") == 0
    assert (there / "big").read_bytes() == content
    assert names_in(there) == {"big"}
    assert pauses == [2.0, 4.0]
    assert count.read_text() == "\n" * 3


def test_a_machine_that_runs_no_program_is_named_with_its_words(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(here / "a")
    argv = ["/bin/sh", "-c", "echo Please log in as ubuntu >&2; exit 142"]
    answers(monkeypatch, lambda: Side("mywork", argv, [str(there)]))
    with pytest.raises(MachineUnreachable, match=r"^mywork: Please log in as ubuntu$"):
        cp("a", "mywork:a")


def test_of_a_machine_that_says_a_lot_the_last_words_are_kept(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(here / "a")
    script = "head -c 100000000 /dev/zero | tr '\\0' x >&2; echo ' the last words' >&2; exit 255"
    answers(monkeypatch, lambda: Side("mywork", ["/bin/sh", "-c", script], [str(there)]))
    with pytest.raises(MachineUnreachable, match=r"^mywork: x{285} the last words$"):
        cp("a", "mywork:a")


def test_what_a_login_prints_and_reads_is_no_part_of_the_copy(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(here / "a")
    argv = ["/bin/sh", "-c", 'echo Welcome; read line; exec "$@"', "sh", *begin_argv()]
    answers(monkeypatch, lambda: Side("mywork", argv, [str(there)]))
    assert cp("a", "mywork:a") == 0
    assert (there / "a").read_text() == "text"


def test_nothing_is_written_into_a_sleeping_workspace(here: Path, asleep: Path) -> None:
    written(here / "a")
    with pytest.raises(WorkspaceAsleep, match="nothing is written into a sleeping"):
        cp("a", "mywork:a")
    with pytest.raises(WorkspaceAsleep):
        push("mywork")
    assert names_in(asleep) == set()


def test_a_sleeping_workspace_is_waked_where_a_person_says_yes(
    here: Path, there: Path, asleep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wake(workspace: str) -> None:
        answers(monkeypatch, lambda: Side("mywork", begin_argv(), [str(there)]))

    written(here / "a")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("torpor_cli.machines.wake", wake)
    assert cp("a", "mywork:a") == 0
    assert (there / "a").read_text() == "text"


def test_a_sleeping_workspace_is_read_out_of_its_newest_snapshot(
    here: Path, asleep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(asleep / "here" / "a.py", "stored")
    written(asleep / "outputs" / "model")
    assert cp("mywork:outputs", "mine") == 0
    assert pull("mywork") == 0
    assert names_in(here) == {"mine/model", "a.py"}
    said = capsys.readouterr()
    assert "workspace mywork is asleep: its newest snapshot is read" in said.err
    assert said.err.count("torpor: warning: here/.git was left out") == 1
    assert pull("mywork", delete=True, yes=True) == 0
    assert names_in(here) == {"a.py"}
    assert "deleted mine/model, mine\n" in capsys.readouterr().out, "and nothing of its own"


def test_a_machine_that_may_still_exist_is_not_taken_for_asleep(
    here: Path, asleep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(opened: object) -> None:
        raise InvalidInput("the machine may still exist")

    monkeypatch.setattr("tasks.sleep.check_not_asleep", unknown)
    with pytest.raises(InvalidInput, match="may still exist"):
        cp("mywork:a", ".")


def test_send_brings_what_look_at_saw_and_deletes_nothing(here: Path, there: Path) -> None:
    written(here / "a.py")
    written(there / "mine")
    os.utime(written(here / "b.py"), ns=(1, 1))
    written(there / "b.py", "younger")
    seen = look_at(here)
    written(here / "later.py")
    copied = send(seen, "mywork", str(there))
    assert (copied.files, copied.bytes, copied.unchanged) == (1, 4, 0)
    assert (copied.newer, copied.newer_count) == (("b.py",), 1)
    assert names_in(there) == {"a.py", "b.py", "mine"}


def test_look_at_refuses_what_would_be_something_else_on_a_machine(here: Path) -> None:
    (here / "data").symlink_to("/mnt/data")
    with pytest.raises(InvalidInput, match=r"data is a symlink that leads out of .*, to /mnt/data"):
        look_at(here)
    (here / "data").unlink()
    (here / os.fsdecode(b"caf\xe9")).write_text("x")
    with pytest.raises(InvalidInput, match="a name that is no UTF-8: rename it"):
        look_at(here)


@pytest.mark.parametrize("to", [".", "..", "here/.."])
def test_delete_takes_no_whole_workspace_for_the_folder_s_copy(
    here: Path, there: Path, to: str
) -> None:
    written(here / "a")
    written(there / "results" / "model")
    with pytest.raises(MachineError, match="--delete would delete all of it"):
        push("mywork", to=to, delete=True, outside=True)
    assert names_in(there) == {"results/model"}
    assert push("mywork", to=".") == 0 and (there / "a").exists()


@pytest.mark.parametrize("copy", [push, pull])
def test_a_home_is_neither_sent_to_a_machine_nor_written_by_one(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch, copy: Callable[..., int]
) -> None:
    written(there / "here" / ".bashrc", "hostile")
    written(there / "here" / ".ssh" / "authorized_keys", "hostile")
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(InvalidInput, match="is your home"):
        copy("mywork")
    for folder in (here.parent, Path("/"), Path("/etc")):
        with pytest.raises(InvalidInput, match="is no folder of a project"):
            copy("mywork", folder)
    assert names_in(here) == set()


def hostile_side(there: Path, line: str, instead: str) -> Side:
    """A machine that runs another program than the one that it is sent."""
    program = (
        "import sys; print('torpor-begins', flush=True); "
        "script = next(filter(bytes.strip, sys.stdin.buffer)).decode(); "
        "exec(bytes.fromhex(script).decode().replace(*sys.argv[1:]))"
    )
    assert line in Path(copying.tree_copy.__file__).read_text()
    return Side("mywork", [sys.executable, "-c", program, line, instead], [str(there)])


def test_a_hostile_machine_writes_nothing_beside_what_cp_asked_for(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(there / "model.pt", "hostile")
    line = "    name = os.path.basename(path.rstrip("
    side = hostile_side(there, line, f"    return '.bashrc'\n{line}")
    answers(monkeypatch, lambda: side)
    with pytest.raises(MachineError, match=r"what was not asked for: '\.bashrc'"):
        cp("mywork:model.pt", ".")
    with pytest.raises(MachineError, match="what was not asked for"):
        cp("mywork:model.pt", "mine.pt")
    with pytest.raises(MachineError, match="what was not asked for"):
        cp("mywork:model.pt", "mywork:./", ".")
    assert names_in(here) == set()


def test_nothing_of_a_machine_can_be_written_by_everybody_here(here: Path, there: Path) -> None:
    written(there / "here" / "a").chmod(0o777)
    (there / "here").chmod(0o777)
    mask = os.umask(0o022)
    try:
        assert pull("mywork") == 0
        assert cp("mywork:here", "mine") == 0
    finally:
        os.umask(mask)
    for path in (here / "a", here / "mine", here / "mine" / "a"):
        assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.rule(23)
def test_cp_brings_no_repository_that_was_not_named_and_says_so(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(there / "proj" / "a.py")
    written(there / "proj" / ".git" / "hooks" / "post-checkout")
    written(there / "proj" / ".git" / "HEAD")
    assert cp("mywork:proj", "mine") == 0
    assert names_in(here) == {"mine/a.py"}
    assert "left out: mine/.git. What a machine" in capsys.readouterr().err
    named = {f"mine/.git/{name}" for name in ("HEAD", "hooks/post-checkout", "config")}
    assert cp("mywork:proj/.git", "mine") == 0
    written(there / "proj" / ".git" / "config")
    assert cp("mywork:proj/.git", "mine") == 0
    assert names_in(here) == {"mine/a.py", *named}


BARE = ("HEAD", "config", "objects/x", "refs/x")
"""Of a directory that git takes for a repository."""


@pytest.mark.rule(23)
@pytest.mark.parametrize("head", ["HEAD", "head", "H\u200cEAD", "HEAD. "])
def test_a_copy_from_a_machine_makes_no_directory_here_that_git_takes_for_a_repository(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str], head: str
) -> None:
    for name in (*BARE[1:], head, "commondir"):
        written(there / "here" / "ckpt" / name)
    written(there / "here" / "model" / "head" / "weights")
    left = {name for name in names_in(there / "here") if name != f"ckpt/{head}"}
    assert cp("mywork:here", "mine") == 0
    assert names_in(here / "mine") == left
    assert f"left out: mine/ckpt/{head}. What a machine" in capsys.readouterr().err


@pytest.mark.rule(23)
def test_pull_brings_no_head_and_writes_into_no_directory_that_has_one(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in BARE:
        written(there / "here" / "ckpt" / name)
        written(there / "here" / "mine" / name)
    written(here / "mine" / "HEAD", "mine")
    assert pull("mywork") == 0
    assert names_in(here) == {"mine/HEAD", *(f"ckpt/{name}" for name in BARE[1:])}
    said = capsys.readouterr().err
    assert "left out: ckpt/HEAD, mine/HEAD, mine/config, mine/objects, mine/refs. What" in said
    assert cp("mywork:here/mine", ".") == 0
    assert names_in(here / "mine") == {"HEAD"}
    assert cp("mywork:here/mine/HEAD", "ckpt", overwrite=True) == 0
    assert (here / "ckpt" / "HEAD").read_text() == "text", "as it was named"


@pytest.mark.rule(23)
def test_a_git_directory_of_any_name_is_neither_sent_nor_written_nor_deleted(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", "--separate-git-dir", ".bare", "."], check=True)
    (here / ".bare" / "worktrees" / "x").mkdir(parents=True)
    for name in ("HEAD", "commondir"):
        written(here / "tree" / name)
    written(here / "a.py")
    written(here / "model" / "HEAD")
    assert push("mywork") == 0
    assert names_in(there) == {"here/a.py", "here/model/HEAD"}
    said = capsys.readouterr().err
    assert "left out: .bare (a git directory)" in said
    assert "left out: tree (a git directory)" in said
    before = names_in(here)
    written(there / "here" / ".bare" / "hooks" / "post-checkout")
    written(there / "here" / "b.py")
    assert pull("mywork", delete=True, yes=True) == 0
    assert names_in(here) == before | {"b.py"}
    assert "left out: .bare/hooks" in capsys.readouterr().err
    (here / "b.py").unlink()
    assert push("mywork", delete=True) == 0
    assert names_in(there / "here") == {"a.py", "model/HEAD", ".bare/hooks/post-checkout"}


def test_a_place_that_only_the_machine_can_name_needs_a_name_here(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(there / "a")
    monkeypatch.setenv("HOME", str(there))
    with pytest.raises(InvalidInput, match="~ has no name of its own: name its copy here"):
        cp("mywork:~", ".")
    assert cp("mywork:~", "home") == 0
    assert cp("mywork:", ".") == 0
    assert names_in(here) == {"home/a", "there/a"}


def test_what_cannot_be_written_here_is_an_error_of_this_host(here: Path, there: Path) -> None:
    written(there / "a")
    written(here / "file")
    with pytest.raises(TorporError, match=r"this host: .*file"):
        cp("mywork:a", "file/a")


def test_a_pipe_reads_what_is_compared_and_how_much_is_copied(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "a", "x" * 2_000_000)
    assert cp("a", "mywork:a") == 0
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["copying to mywork: comparing", "copying to mywork: 2.0 MB"]
