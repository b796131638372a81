"""The pages about Python are as `python docs/api.py` writes them from the docstrings."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Final

import pytest

import blocks
import flows
from deployments.installation import CHECKOUT

PAGES: Final[dict[Path, str]] = runpy.run_path(str(CHECKOUT / "docs" / "api.py"))["pages"]()
API: Final = CHECKOUT / "docs" / "api.md"
BLOCKS: Final = CHECKOUT / "docs" / "blocks.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_as_the_docstrings_say(page: Path) -> None:
    assert page.read_text() == PAGES[page], "run `python docs/api.py`"


def test_each_function_has_its_parameters_results_and_an_example() -> None:
    entries = _entries(API)
    for name in flows.__all__:
        function = getattr(flows, name)
        described = re.findall(r"^\* `(\w+)`(?: \([^)]*\))?: \S", entries[name], re.MULTILINE)
        parameters = [*inspect.signature(getattr(function, "fn", function)).parameters]
        assert described[: len(parameters)] == parameters
        assert "\nReturns: " in entries[name]
        assert re.search(rf"```python\nfrom flows import .*\b{name}\b", entries[name])


def test_each_field_of_a_block_says_whether_it_is_secret() -> None:
    entries = _entries(BLOCKS)
    for name in blocks.__all__:
        block = getattr(blocks, name)
        told = re.findall(r"^\* `(\w+)` \((.*?)\): \S", entries[name], re.MULTILINE)
        assert [field for field, _ in told] == [*block.model_fields]
        secrets = {one.partition(".")[0] for one in block.model_json_schema()["secret_fields"]}
        assert {field for field, facts in told if "**secret**" in facts} == secrets


def test_units_ranges_and_defaults_stand_beside_the_names() -> None:
    api, fields = API.read_text(), BLOCKS.read_text()
    assert "* `max_hours` (hours, 0 to 8,784): " in api
    assert "    dry_run: bool = True," in _entries(API)["watch"]
    assert "* `disk_gib` (`float`, GiB, at least 0, default `0.0`): " in fields
    assert "* `api_key` (`str`, required, **secret**): " in fields


def _entries(page: Path) -> dict[str, str]:
    """What the page says of each name."""
    parts = re.split(r"^## (\w+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
