"""The README's pictures are what docs/pictures/draw.py draws from kept results."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from deployments.installation import CHECKOUT

FOLDER: Final = CHECKOUT / "docs" / "pictures"
DRAWN: Final[dict[str, str]] = runpy.run_path(str(FOLDER / "draw.py"))["pictures"]()


@pytest.mark.parametrize("name", DRAWN)
def test_a_kept_picture_is_what_its_numbers_say(name: str) -> None:
    assert (FOLDER / name).read_text() == DRAWN[name], "run python docs/pictures/draw.py"
    ElementTree.fromstring(DRAWN[name])  # noqa: S314 - our own


def test_the_bars_are_as_long_as_the_medians() -> None:
    peers: dict[str, Any] = json.loads(
        (CHECKOUT / "benchmarks" / "results" / "peers.json").read_text()
    )
    shown = re.findall(r'font-size="12"[^>]*>([\d.]+)<', DRAWN["bars.svg"])
    seconds = [
        peers["tools"][tool][step]["wall_s"]["median"]
        for step in ("full", "unchanged", "incremental", "restore")
        for tool in ("torpor", "restic", "tar+lz4+s5cmd")
    ]
    assert shown == [f"{value:.1f}" for value in seconds]
    assert f"n = {peers['tools']['torpor']['full']['wall_s']['n']} " in DRAWN["bars.svg"]


def test_the_recording_is_of_a_whole_demo() -> None:
    text = re.sub(r"<[^>]+>", "", DRAWN["demo.svg"])
    for step in ("$ make demo", "hibernate", "destroyed", "wake", "is identical, every byte"):
        assert step in text


def test_every_picture_is_in_the_readme() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    pictures = {Path(target).name for target in re.findall(r"\]\((docs/pictures/[^)]+)\)", readme)}
    assert pictures == set(DRAWN)
