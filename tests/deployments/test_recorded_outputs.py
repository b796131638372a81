"""Outputs on pages are those that docs/pictures/evening.py has recorded, where it has typed the
command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from deployments.installation import CHECKOUT

RECORDINGS: Final = sorted((CHECKOUT / "docs" / "pictures").glob("*.json"))
README: Final = CHECKOUT / "README.md"
PAGES: Final = [README, *sorted((CHECKOUT / "docs" / "guide").glob("*.md"))]
FIRST: Final = ("jobs", "unattended", "machines", "costs", "programs", "backups", "sizes")
"""The pages of the guide that begin with a recorded command and its output."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_output_of_a_recorded_command_is_quoted_as_it_was(page: Path) -> None:
    wrong = [
        command
        for command, quoted in _quotes(page.read_text())
        if (recorded := _recorded(command))
        and not any(_is_quote(quoted, lines) for lines in recorded)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", FIRST)
def test_a_page_begins_with_a_recorded_command_and_its_output(name: str) -> None:
    before = (CHECKOUT / "docs" / "guide" / f"{name}.md").read_text().partition("\n## ")[0]
    quotes = [(command, quoted) for command, quoted in _quotes(before) if _recorded(command)]
    assert any(quoted for _, quoted in quotes)


def test_every_command_of_the_readme_that_shows_output_was_recorded() -> None:
    quotes = list(_quotes(README.read_text()))
    typed = {shlex.split(command)[1] for command, _ in quotes if command.startswith("torpor ")}
    assert {"create", "hibernate", "wake", "spend"} <= typed
    assert [command for command, _ in quotes if not _recorded(command)] == []


def test_a_changed_line_and_an_unmarked_gap_are_no_quote() -> None:
    recorded = ["asking", "renting", "machine m-1 at local", "done"]
    assert _is_quote(["...", "machine m-1 at local", "done"], recorded)
    assert _is_quote(["asking", "...", "done"], recorded)
    assert not _is_quote(["asking", "done"], recorded)
    assert not _is_quote(["...", "machine m-2 at local", "done"], recorded)
    assert not _is_quote(["asking", "renting"], recorded)


def _recorded(command: str) -> list[list[str]]:
    """What the screen showed, each time that the command was typed."""
    return [
        [line for _, line in lines]
        for recording in RECORDINGS
        for typed, lines in json.loads(recording.read_text())
        if typed == command
    ]


def _quotes(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page that stands behind a dollar, and the lines below it."""
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        parts = re.split(r"^\$ (.+)\n", block, flags=re.MULTILINE)
        for command, output in zip(parts[1::2], parts[2::2], strict=True):
            yield command, output.splitlines()


def _is_quote(quoted: Sequence[str], recorded: Sequence[str]) -> bool:
    """Whether these lines are the recorded ones, but for what three dots stand for."""
    lines = [re.escape(line) if line != "..." else None for line in quoted]
    pattern = "".join(r"(?:.*\n)*?" if line is None else f"{line}\n" for line in lines)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in recorded)) is not None
