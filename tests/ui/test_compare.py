"""The form of compare submitted, its table and its page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from pydantic import SecretStr

from blocks import RunpodProvider, VastProvider, Workspace
from deployments.server import Server
from tests.markets.runpod import FakeRunPod
from tests.markets.server import FakeMarket
from tests.markets.vast import FakeVast
from tests.ui.test_flows import Deployments

NAME = "ui-compare"


@pytest.fixture
def two_markets(torpor_up: Server) -> Iterator[list[FakeMarket]]:
    """With their blocks; in the end, no block of a fake is left."""
    vast, runpod = FakeVast(), FakeRunPod()
    VastProvider(api_key=SecretStr(vast.key), url=vast.url).save(NAME, overwrite=True, _sync=True)
    RunpodProvider(api_key=SecretStr(runpod.key), url=runpod.url).save(
        NAME, overwrite=True, _sync=True
    )
    yield [vast, runpod]
    for kind in (VastProvider, RunpodProvider):
        kind.delete(NAME, _sync=True)
    for fake in (vast, runpod):
        fake.close()


def test_compare_from_the_form_to_its_page(
    torpor_up: Server, page: Page, pictures: Path, two_markets: list[FakeMarket]
) -> None:
    Workspace(name=NAME, provider=f"vast-provider/{NAME}", gpu="RTX 4090").save(
        NAME, overwrite=True, _sync=True
    )
    forms = Deployments(torpor_up, page, pictures)
    forms.open("compare")
    forms.see_fields("compare")
    forms.pick(NAME)
    page.get_by_label("hours").fill("10")
    run = forms.submit("compare")
    assert all(fake.market.rented == [] for fake in two_markets)

    forms.artifact(f"compare-{NAME}", run["id"])
    expect(page.get_by_role("cell", name="vast", exact=True).first).to_be_visible()
    expect(page.get_by_role("cell", name="runpod", exact=True).first).to_be_visible()
    expect(page.get_by_role("cell", name="1 x RTX 4090", exact=True).first).to_be_visible()
    forms.picture("compare-table")
    forms.artifact(f"compare-{NAME}-page", run["id"])
    expect(page.get_by_role("heading", name="Which one for which use")).to_be_visible()
    expect(page.get_by_role("cell", name="RTX 4090 is wanted").first).to_be_visible()
    forms.picture("compare-page")
