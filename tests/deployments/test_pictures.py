"""docs/pictures/draw.py draws the README's pictures from the kept results."""

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
