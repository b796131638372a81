"""The pictures of the pages are drawn from the kept results, those of the map from the imports."""

from __future__ import annotations

import json
import re
import runpy
from typing import Final
from xml.etree import ElementTree

from deployments.installation import CHECKOUT

DRAW: Final = CHECKOUT / "docs" / "pictures" / "draw.py"
EVENING: Final = DRAW.with_name("evening.py")


def test_every_drawn_picture_is_on_a_page_and_the_readme_has_one() -> None:
    drawn: dict[str, str] = runpy.run_path(str(DRAW))["pictures"]()
    readme = CHECKOUT / "README.md"
    pages = [readme, *(CHECKOUT / "docs").rglob("*.md")]
    named = {
        page: re.findall(r"\]\([\w./]*pictures/(\w+\.svg)\)", page.read_text()) for page in pages
    }
    assert len(named[readme]) == 1
    assert {name for names in named.values() for name in names} == set(drawn)
    for picture in drawn.values():
        ElementTree.fromstring(picture)  # noqa: S314 - our own


def test_a_recording_keeps_each_line_as_the_terminal_leaves_it() -> None:
    screen = runpy.run_path(str(EVENING))["screen"]
    shown = [
        (1.0, "$ torpor wake mywork\r\n"),
        (2.0, "\r\x1b[Kloading Prefect"),
        (3.0, "\r\x1b[Kloading Prefect, 3 s\r\x1b[K"),
        (4.5, "\x1b[1mwhat\x1b[0m   value\r\n\x1b]133;D;0\x07"),
    ]
    assert screen(shown) == [(1.0, "$ torpor wake mywork"), (4.5, "what   value"), (0.0, "")]


def test_the_recorded_evening_has_the_commands_of_the_readme_and_none_failed() -> None:
    told = runpy.run_path(str(DRAW))["RECORDING"].read_text()
    evening = [(command, lines) for command, lines in json.loads(told)]
    readme = (CHECKOUT / "README.md").read_text()
    typed = [command.split(" ")[0:2] for command, _ in evening]
    for first in ("demo", "up", "init", "create", "ssh", "hibernate", "wake"):
        assert ["torpor", first] in typed
        assert re.search(rf"^torpor {first}\b", readme, re.MULTILINE)
    wide = [line for command, lines in evening[1:] for _, line in lines if len(line) > 80]
    assert [line for line in wide if "http" not in line and "/home/" not in line] == []


def test_the_map_shows_what_imports_what_now() -> None:
    rooms = runpy.run_path(str(CHECKOUT / "docs" / "pictures" / "rooms.py"))
    page = (CHECKOUT / "docs" / "contributing" / "map.md").read_text()
    assert page == rooms["page"](page), "run `python docs/pictures/rooms.py`"
    house = rooms["pictures"]()["house"]
    assert house["torpor/machine"] == {"torpor/shared"}
    assert "flows" in house["deployments"] and "torpor/shared" in house["torpor/control"]
