"""Where a login to a machine begins, and where everything else does."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from torpor.machine.agent.brought import (
    made_again,
    make_paths,
    new_directories,
    note_made_again,
    own_profile,
)
from torpor.machine.agent.call import Call
from torpor.shared.wire.brought import MakePaths, NoteMadeAgain

PATHS = ["~/my work/deep", "~/second"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / ".torpor").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def _made(home: Path, monkeypatch: pytest.MonkeyPatch, shell: str, *paths: str) -> str:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_shell=f"/bin/{shell}"))
    call = Call("1", home / ".torpor", lambda event: None)
    return make_paths(MakePaths(list(paths) or PATHS), call).fault


def _pwd(home: Path, *argv: str, at: Path | None = None) -> str:
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [*argv, "-c", "pwd"]
    done = subprocess.run(
        command, cwd=at or home, env=environment, capture_output=True, text=True, check=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("shell", "before", "profile"),
    [
        ("bash", [], ".profile"),
        ("bash", [".profile"], ".profile"),
        ("bash", [".profile", ".bash_profile"], ".bash_profile"),
        ("dash", [".bash_profile"], ".profile"),
    ],
)
def test_only_an_interactive_login_begins_in_the_first_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: str, before: list[str], profile: str
) -> None:
    for name in before:
        (home / name).write_text(f"export {name.strip('.').upper()}=1")  # without a line's end
    for _ in range(2):
        assert _made(home, monkeypatch, shell) == ""
    assert (home / "second").is_dir()
    text = (home / profile).read_text()
    assert text.count("begins in the workspace") == 1
    program = shutil.which(shell)
    assert program is not None
    first = str(home / "my work/deep")
    assert _pwd(home, program, "-l", "-i") == first
    elsewhere = [_pwd(home, program), _pwd(home, program, "-l"), _pwd(home, program, "-i")]
    assert elsewhere == [str(home)] * 3
    assert _pwd(home, program, "-l", "-i", at=home / "second") == str(home / "second")
    shutil.rmtree(home / "my work")
    assert _pwd(home, program, "-l", "-i") == str(home)


def test_torpors_line_is_no_change_of_the_users_until_the_user_changes_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_profile(home / ".torpor") == []
    _made(home, monkeypatch, "bash")
    assert own_profile(home / ".torpor") == [str(home / ".profile")]
    with open(home / ".profile", "a") as file:
        file.write("alias ll=ls\n")
    assert own_profile(home / ".torpor") == []


def test_what_a_deploy_fills_and_what_was_empty_is_remembered(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call("1", home / ".torpor", lambda event: None)
    note_made_again(NoteMadeAgain(["~/torpor-vllm"]), call)
    (home / "second").mkdir()
    (home / "second/a").write_text("x")
    _made(home, monkeypatch, "bash")
    assert made_again(home / ".torpor") == [str(home / "torpor-vllm")]
    first = os.fsencode(home / "my work/deep")
    assert new_directories(home / ".torpor") == {first}
    (home / "my work").rename(home / "moved")
    assert new_directories(home / ".torpor") == set()


def test_a_profile_of_the_users_own_files_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "dotfiles").mkdir()
    (home / "dotfiles/profile").write_text("alias ll=ls\n")
    (home / ".profile").symlink_to("dotfiles/profile")
    assert "is a link to a file of the user's" in _made(home, monkeypatch, "bash")
    assert (home / "dotfiles/profile").read_text() == "alias ll=ls\n"
    assert "no profile of the login shell fish" in _made(home, monkeypatch, "fish")
