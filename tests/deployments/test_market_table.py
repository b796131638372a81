"""What each market can do: the table, the guide and the page on adding one name all of them."""

from __future__ import annotations

import re
from typing import Any, Final

from blocks import PROVIDERS, LocalProvider, VastProvider
from deployments.installation import CHECKOUT
from deployments.market_table import PROPERTIES, abilities_of, name_of, table
from torpor.control.providers.seam import Abilities

GUIDE: Final = CHECKOUT / "docs" / "guide"


def test_the_guide_says_what_becomes_of_a_job_at_every_market() -> None:
    """Its table of machines that are stopped has each market in one line."""
    page = (GUIDE / "jobs.md").read_text().split("## When a market stops a machine")[1]
    lines = re.findall(r"^\|.*\|$", page, re.M)
    first = " ".join(line.split("|")[1] for line in lines[2:7]).lower()
    assert [kind for kind in PROVIDERS if name_of(kind).lower() not in first] == []


def test_every_market_has_a_page_that_the_guide_links_to() -> None:
    pages = {page.stem for page in (GUIDE / "markets").glob("*.md")}
    markets = {name_of(kind).lower() for kind in PROVIDERS if kind is not LocalProvider}
    assert pages == markets
    machines = (GUIDE / "machines.md").read_text()
    assert [name for name in pages if f"(markets/{name}.md)" not in machines] == []


def test_every_provider_block_has_a_column_and_every_ability_a_line() -> None:
    head = table().splitlines()[0]
    assert head.split(" | ")[1:] == [*map(name_of, PROVIDERS[:-1]), f"{name_of(PROVIDERS[-1])} |"]

    class Asked:
        """Notes which abilities the lines look at."""

        def __init__(self) -> None:
            self.names: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.names.add(name)
            return getattr(abilities_of(VastProvider), name)

    asked: Any = Asked()
    for cell in PROPERTIES.values():
        cell(asked)
    words = {"not_adopted"}  # of a message
    assert asked.names == {*Abilities.__struct_fields__, "checkpoint"} - words


def test_only_this_host_was_tried() -> None:
    """Whoever tries a market says so in its adapter, and here."""
    assert [kind for kind in PROVIDERS if abilities_of(kind).tried] == [LocalProvider]


def test_the_page_on_adding_a_market_names_what_is_there() -> None:
    text = (CHECKOUT / "docs" / "contributing" / "market.md").read_text()
    named = set(re.findall(r"`((?:blocks|tests|torpor|deployments)/[\w/]+\.py)`", text))
    assert len(named) >= 5
    there = {
        path: [CHECKOUT / path.replace("NAME", name) for name in ("vast", "ec2")] for path in named
    }
    assert [path for path, tried in there.items() if not any(t.exists() for t in tried)] == []
    helpers = re.findall(r"`(\w+\.py)`", text)
    providers = CHECKOUT / "torpor" / "control" / "providers"
    assert [name for name in helpers if not (providers / name).exists()] == []
