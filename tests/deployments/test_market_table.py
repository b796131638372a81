"""docs/providers.md says what the adapters say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from blocks import PROVIDERS, LocalProvider, VastProvider
from deployments.installation import CHECKOUT
from deployments.market_table import COLUMNS, PAGE, abilities_of, table, with_table
from torpor.control.providers.seam import Abilities


def test_the_page_says_what_the_adapters_say() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run python -m deployments.market_table"


def test_the_guide_says_what_becomes_of_a_job_at_every_market() -> None:
    """Its table of machines that are stopped has each market in one line."""
    guide = (CHECKOUT / "docs" / "guide.md").read_text()
    lines = re.findall(r"^\|.*\|$", guide.split("**A machine that its market stops**")[1], re.M)
    first = " ".join(line.split("|")[1] for line in lines[2:7]).lower()
    assert [name for name in _names() if name.lower() not in first] == []


def _names() -> list[str]:
    return [kind.get_block_type_name().removesuffix(" Provider") for kind in PROVIDERS]


def test_every_provider_block_has_a_line_and_every_ability_a_cell() -> None:
    lines = table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [
        kind.get_block_type_slug() for kind in PROVIDERS
    ]

    class Asked:
        """Notes which abilities the columns look at."""

        def __init__(self) -> None:
            self.names: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.names.add(name)
            return getattr(abilities_of(VastProvider), name)

    asked: Any = Asked()
    for cell in COLUMNS.values():
        cell(asked)
    assert asked.names == set(Abilities.__struct_fields__)


def test_only_this_host_was_tried() -> None:
    """Whoever tries a market says so in its adapter, and here."""
    assert [kind for kind in PROVIDERS if abilities_of(kind).tried] == [LocalProvider]


@pytest.mark.parametrize("page", ["", "| market |\n\n| market |\n"])
def test_a_page_without_one_table_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="tables"):
        with_table(page)


def test_the_page_on_adding_a_market_names_what_is_there() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`((?:blocks|tests|torpor|deployments)/[\w/]+\.py)`", text))
    assert len(named) >= 5
    there = (CHECKOUT / path.replace("NAME", "vast") for path in named)
    assert [path for path in there if not path.exists()] == []
    helpers = re.findall(r"`(\w+\.py)`", text)
    providers = CHECKOUT / "torpor" / "control" / "providers"
    assert [name for name in helpers if not (providers / name).exists()] == []
