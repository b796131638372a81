"""docs/guide/settings.md has every setting once, as the code says it."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Final

import pytest
import yaml

import blocks
from deployments.installation import CHECKOUT
from deployments.settings_page import PAGE, with_tables

DEPLOYMENTS: Final = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())["deployments"]
SHARED: Final = "Of several deployments"


def test_the_page_says_what_the_code_says() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python -m deployments.settings_page"


@pytest.mark.parametrize("name", blocks.__all__)
def test_every_field_of_a_block_is_there_once(name: str) -> None:
    kind = getattr(blocks, name)
    title = kind.get_block_type_name()
    sections = [
        rows
        for heading, rows in _sections().items()
        if _is_of(heading, title.split(" Provider")[0])
    ]
    assert sorted(row[0] for rows in sections for row in rows) == sorted(kind.model_fields)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_every_parameter_of_a_deployment_is_there_once(deployment: dict[str, str]) -> None:
    path, function = deployment["entrypoint"].split(":")
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
    name = re.escape(deployment["name"])
    its = re.compile(rf"`(?:{flow.name}/)?{name}`")
    named = [row[0] for row in _sections()[SHARED] if its.search(row[-1])]
    for heading, rows in _sections().items():
        if its.search(heading):
            named += [row[0] for row in rows]
    assert sorted(named) == sorted(inspect.signature(flow.fn).parameters)


def test_no_line_is_empty() -> None:
    rows = [row for rows in _sections().values() for row in rows]
    assert len(rows) > 200
    assert [row for row in rows if not row[2] or not row[3]] == []


@pytest.mark.parametrize("page", ["", "<!-- end -->"])
def test_a_page_without_a_place_for_the_tables_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="lacks the lines"):
        with_tables(page)


def _is_of(heading: str, title: str) -> bool:
    return title in [part.removesuffix(" Provider") for part in heading.split(", ")]


def _sections() -> dict[str, list[list[str]]]:
    """The cells of each table's lines, by the heading above it; the name without quotes first."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| `")]
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
        found[heading] = [[row[0].strip("` "), *row[1:]] for row in cells]
    return found
