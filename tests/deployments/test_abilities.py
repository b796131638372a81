"""What each market can do: the command, the guide and the page on adding one name all of them."""

from __future__ import annotations

import re
from typing import Final

import pytest

from blocks import PROVIDERS, LocalProvider
from deployments.installation import CHECKOUT
from deployments.market import abilities_of, main, name_of
from torpor.control.providers.provider import Abilities

GUIDE: Final = CHECKOUT / "docs" / "guide"


def test_the_guide_says_what_becomes_of_a_job_at_every_market() -> None:
    """Its table of machines that are stopped has each market in one line."""
    page = (GUIDE / "jobs.md").read_text().split("## When a market stops a machine")[1]
    table = re.search(r"(?:^\|.*\|\n)+", page, re.M)
    assert table
    first = " ".join(line.split("|")[1] for line in table[0].splitlines()[2:]).lower()
    assert [kind for kind in PROVIDERS if name_of(kind).lower() not in first] == []


def test_every_market_has_a_page_that_the_guide_links_to() -> None:
    pages = {page.stem for page in (GUIDE / "markets").glob("*.md")}
    markets = {name_of(kind).lower() for kind in PROVIDERS if kind is not LocalProvider}
    assert pages == markets
    machines = (GUIDE / "machines.md").read_text()
    assert [name for name in pages if f"(markets/{name}.md)" not in machines] == []


def test_every_ability_at_every_market_is_printed_without_a_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "EC2: notice_s = 120.0" in lines
    wanted = len(PROVIDERS) * (len(Abilities.__struct_fields__) + 1)
    assert len({line.partition(" = ")[0] for line in lines}) == len(lines) == wanted
    page = (CHECKOUT / "docs" / "providers.md").read_text()
    explained = re.findall(r"`(\w+)`:", page)
    assert [name for name in explained if f"Vast: {name} = " not in "\n".join(lines)] == []
    assert len(explained) > 10


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
