"""Names that git takes for its own directory on some file system."""

from __future__ import annotations

import pytest

from torpor.shared.format.git_names import is_head, is_of_git


@pytest.mark.rule(23)
@pytest.mark.parametrize(
    "path",
    [
        ".git",
        "a/.GIT/hooks",
        ".g\u200cit",
        "\ufeff.git",
        "sub/git~1",
        "GIT~1/config",
        ".git. .",
        ".git::$INDEX_ALLOCATION",
        "a\\.git\\config",
    ],
)
def test_what_git_may_take_for_its_directory_is_known(path: str) -> None:
    assert is_of_git(path)


@pytest.mark.parametrize("path", [".gitignore", ".github/x", "git", "a.git", "git~10", ".git-x"])
def test_other_names_are_not(path: str) -> None:
    assert not is_of_git(path)


@pytest.mark.rule(23)
@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("HEAD", True),
        ("a/head", True),
        ("a\\HEAD", True),
        ("HE\u200dAD", True),
        ("HEAD .", True),
        ("HEAD:$DATA", True),
        ("HEAD/a", False),
        ("HEAD.pt", False),
        ("FETCH_HEAD", False),
    ],
)
def test_the_file_without_which_git_takes_no_directory_for_a_repository_is_known(
    path: str, is_one: bool
) -> None:
    assert is_head(path) is is_one
