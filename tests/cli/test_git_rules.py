"""What is asked of git about a folder, and that no program of the folder's repositories runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.shared.errors import InvalidInput
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


@pytest.mark.parametrize(
    "make", [repository, split_index, sparse_index, sha_256, work_tree, submodule]
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
