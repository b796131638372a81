"""The README's pictures are drawn from the kept results, and those of the map from the imports."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from deployments.installation import CHECKOUT

DRAW: Final = CHECKOUT / "docs" / "pictures" / "draw.py"


def test_every_picture_of_the_readme_is_drawn() -> None:
    drawn: dict[str, str] = runpy.run_path(str(DRAW))["pictures"]()
    readme = (CHECKOUT / "README.md").read_text()
    named = {Path(target).name for target in re.findall(r"\]\((docs/pictures/[^)]+)\)", readme)}
    assert named == set(drawn)
    for picture in drawn.values():
        ElementTree.fromstring(picture)  # noqa: S314 - our own


def test_the_map_shows_what_imports_what_now() -> None:
    rooms = runpy.run_path(str(CHECKOUT / "docs" / "pictures" / "rooms.py"))
    page = (CHECKOUT / "docs" / "contributing" / "map.md").read_text()
    assert page == rooms["page"](page), "run `python docs/pictures/rooms.py`"
    house = rooms["pictures"]()["house"]
    assert house["torpor/machine"] == {"torpor/shared"}
    assert "flows" in house["deployments"] and "torpor/shared" in house["torpor/control"]
