"""What is asked of git about a folder, and that no program of the folder's repositories runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.shared.errors import InvalidInput
from torpor_cli import git_rules
from torpor_cli.git_rules import ignored, not_ignored


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own settings of git: nothing but the file of names that are always ignored."""
    home = tmp_path / "home"
    (home / ".config" / "git").mkdir(parents=True)
    (home / ".config" / "git" / "ignore").write_text("*.mine\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def repository(folder: Path, *options: str) -> Path:
    """`kept.log` is tracked although it is ignored; `b.log` is ignored."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", *options)
    (folder / ".gitignore").write_text("*.log\n")
    for name in ("a.py", "kept.log"):
        (folder / name).write_text("text")
    git(folder, "add", "--force", ".gitignore", "a.py", "kept.log")
    git(folder, "commit", "--message", "one")
    (folder / "b.log").write_text("text")
    return folder


def names_of(folder: Path) -> tuple[set[str], set[str]]:
    """What is sent of a folder, and which of these names are ignored."""
    skipped: list[str] = []
    sent = set(not_ignored(folder, [], skipped) or [])
    asked = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    unread: set[str] = set()
    found = ignored(folder, [name for name in asked if "/.git/" not in f"/{name}"], unread)
    assert (skipped, unread) == ([], set())
    return sent, found


@pytest.mark.rule(23)
@pytest.mark.parametrize("where", [".", "nested", "nested/deeper"])
def test_no_program_that_a_repository_names_runs(folder: Path, tmp_path: Path, where: str) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 >> {ran}\n")
    program.chmod(0o755)
    for name in {".", "nested", where}:
        repository(folder / name)
    hostile = folder / where / ".git"
    included = tmp_path / "included"
    included.write_text(f"[core]\n\tfsmonitor = {program}\n")
    with (hostile / "config").open("a") as config:
        config.write(
            f"[include]\n\tpath = {included}\n[core]\n\tfsmonitor = {program}\n"
            f"\thooksPath = {tmp_path}\n\tsshCommand = {program}\n\tpager = {program}\n"
            f"[pager]\n\tconfig = {program}\n\trev-parse = {program}\n"
            f"[alias]\n\tls-files = !{program}\n"
            f'[filter "x"]\n\tclean = {program}\n\tsmudge = {program}\n'
        )
    for hook in ("post-index-change", "fsmonitor-watchman"):
        (hostile / "hooks" / hook).write_text(program.read_text())
        (hostile / "hooks" / hook).chmod(0o755)
    (folder / where / ".gitattributes").write_text("* filter=x\n")
    sent, _ = names_of(folder)
    assert str(Path(where) / "kept.log") in sent
    assert not ran.exists()


def split_index(folder: Path) -> None:
    repository(folder)
    git(folder, "update-index", "--split-index")
    (folder / "later.log").write_text("text")
    git(folder, "add", "--force", "later.log")
    git(folder, "rm", "--force", "later.log")


def sparse_index(folder: Path) -> None:
    repository(folder)
    (folder / "out").mkdir()
    (folder / "out" / "x.py").write_text("text")
    git(folder, "add", "out")
    git(folder, "commit", "--message", "two")
    git(folder, "sparse-checkout", "set", "--cone", "--sparse-index", "in")


def without_gitignore(folder: Path) -> None:
    """A sparse checkout that lacks the file that names `b.log`."""
    repository(folder)
    git(folder, "sparse-checkout", "set", "--no-cone", "/a.py", "/kept.log")
    assert not (folder / ".gitignore").exists()


def sha_256(folder: Path) -> None:
    repository(folder, "--object-format=sha256")


def work_tree(folder: Path) -> None:
    main = repository(folder.parent / "main")
    git(main, "worktree", "add", str(folder))
    (folder / "b.log").write_text("text")


def submodule(folder: Path) -> None:
    other = repository(folder.parent / "other")
    outer = folder.parent
    git(outer, "init")
    git(outer, "submodule", "add", str(other), folder.name)
    (folder / "b.log").write_text("text")


@pytest.mark.rule(23)
@pytest.mark.parametrize(
    "make",
    [repository, split_index, sparse_index, without_gitignore, sha_256, work_tree, submodule],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_repository_of_any_kind_tracks_is_sent_and_what_it_ignores_is_not(
    tmp_path: Path, make: Callable[[Path], object], nested: bool
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / ".gitignore").write_text("/main/\n/other/\n/.gitmodules\n")
    make(outer / "inner")
    at = "inner/" if nested else ""
    sent, found = names_of(outer if nested else outer / "inner")
    assert {f"{at}a.py", f"{at}kept.log"} <= sent
    assert f"{at}b.log" not in sent
    assert f"{at}b.log" in found and f"{at}kept.log" not in found


def test_what_the_user_and_the_repository_ignore_beside_gitignore_stays_ignored(
    folder: Path, home: Path
) -> None:
    repository(folder)
    (folder / ".git" / "info" / "exclude").write_text("*.here\n!kept.there\n")
    (home / "there").write_text("*.there\n")
    git(folder, "config", "core.excludesFile", "~/there")
    git(folder, "config", "core.ignoreCase", "true")
    hidden = {"x.mine", "x.here", "x.there", "x.LOG"}
    (folder / "sub").mkdir()
    for name in (*hidden, "kept.there"):
        (folder / "sub" / name).write_text("text")
    sent, found = names_of(folder)
    assert {name for name in sent if name.startswith("sub/")} == {"sub/kept.there"}
    assert found == {"b.log", *(f"sub/{name}" for name in hidden)}
    assert names_of(folder / "sub") == ({"kept.there"}, hidden)


@pytest.mark.rule(23)
def test_a_gitignore_that_is_neither_checked_out_nor_fetched_is_no_empty_one(folder: Path) -> None:
    without_gitignore(folder)
    for one in (folder / ".git" / "objects").glob("??/*"):
        one.unlink()
    with pytest.raises(InvalidInput, match="neither checked out nor fetched"):
        not_ignored(folder, [], [])
    with pytest.raises(InvalidInput, match="neither checked out nor fetched"):
        ignored(folder, ["b.log"], set())


@pytest.mark.rule(23)
@pytest.mark.parametrize("kind", ["gitdir", "onbranch"])
def test_files_that_git_includes_for_a_repository_say_what_is_ignored(
    folder: Path, home: Path, kind: str
) -> None:
    repository(folder, "--initial-branch=mine")
    condition = {"gitdir": f"{folder.parent}/", "onbranch": "mine"}[kind]
    (home / "there").write_text("*.there\n")
    (home / "work").write_text("[core]\n\texcludesFile = ~/there\n")
    (home / ".gitconfig").write_text(f'[includeIf "{kind}:{condition}"]\n\tpath = work\n')
    (folder / ".git" / "more").write_text("[core]\n\texcludesFile = .names\n")
    (folder / ".names").write_text("*.more\n")
    git(folder, "config", "include.path", "more")
    for name in ("x.there", "x.more"):
        (folder / name).write_text("text")
    sent, found = names_of(folder)
    assert sent == {".gitignore", "a.py", "kept.log", ".names"}
    assert found == {"b.log", "x.there", "x.more"}


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A directory that is first in PATH, with a `git` that is this script and then git."""
    real = shutil.which("git")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "git").write_text(f'#!/bin/sh\n{script}\nexec {real} "$@"\n')
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("default", ["sha1", "sha256"])
def test_a_repository_is_read_whatever_hash_git_gives_new_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str
) -> None:
    repository(folder)
    repository(folder / "other", "--object-format=sha256")
    programs(tmp_path / "bin", monkeypatch, f"export GIT_DEFAULT_HASH={default}")
    sent, found = names_of(folder)
    names = {".gitignore", "a.py", "kept.log"}
    assert sent == names | {f"other/{name}" for name in names}
    assert found == {"b.log", "other/b.log"}


@pytest.mark.rule(23)
def test_no_git_of_the_folder_runs_where_path_has_a_relative_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(folder)
    before = os.environ["PATH"]
    programs(folder / "bin", monkeypatch, f"touch {tmp_path}/ran")
    monkeypatch.setenv("PATH", f"bin::./bin:{before}")
    monkeypatch.chdir(folder)
    assert "a.py" in names_of(folder)[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.rule(23)
def test_the_users_own_monitor_of_files_does_not_run(
    folder: Path, home: Path, tmp_path: Path
) -> None:
    repository(folder)
    git(folder, "update-index", "--untracked-cache")
    git(folder, "-c", "core.fsmonitor=true", "update-index", "--fsmonitor")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    (home / ".gitconfig").write_text(f"[core]\n\tfsmonitor = {program}\n")
    names_of(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.rule(23)
@pytest.mark.parametrize("pipe", [".git/HEAD", ".git/commondir", ".git/config", ".gitignore"])
def test_a_pipe_in_the_place_of_a_file_of_git_is_not_waited_for_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pipe: str
) -> None:
    repository(folder)
    (folder / pipe).unlink(missing_ok=True)
    os.mkfifo(folder / pipe)
    monkeypatch.setattr(git_rules, "MOST_S", 0.3)
    with pytest.raises(InvalidInput, match=f"git does not read {folder}: "):
        not_ignored(folder, [], [])


def test_a_repository_that_git_cannot_read_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(InvalidInput, match=r"folder/\.git is no repository"):
        not_ignored(folder, [], [])
    (folder / ".git").unlink()
    repository(folder)
    (folder / ".git" / "index").write_bytes(b"DIRC no index")
    with pytest.raises(InvalidInput, match="git does not read"):
        not_ignored(folder, [], [])
