"""Markets in a real browser: their blocks, a workspace at two of them, a wake and its offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Locator, Page, expect

import blocks
from blocks import LambdaProvider, RunpodProvider, VastProvider, Workspace
from deployments.server import Server
from flows import create, hibernate
from tests.fixtures.waiting import until
from tests.markets.ec2 import REGION, FakeEc2
from tests.markets.every import Markets
from tests.markets.faults import Fault
from tests.ui.conftest import edit_block, new_block, save_block
from tests.ui.test_flows import Deployments

NAME = "ui-shop"
SHOP = ("vast", "runpod", "lambda", "ec2")


@pytest.fixture
def login(torpor_up: Server, markets: Markets) -> Iterator[FakeEc2]:
    """AWS, with the block of its login; in the end, no block of a fake is left."""
    aws = markets.fakes["ec2"]
    assert isinstance(aws, FakeEc2)
    markets.blocks("ec2", NAME)[0].save(NAME, overwrite=True, _sync=True)
    yield aws
    markets.delete_blocks(SHOP, NAME)


def test_from_the_blocks_of_markets_to_the_report_of_a_wake(
    torpor_up: Server, page: Page, pictures: Path, markets: Markets, login: FakeEc2
) -> None:
    forms = Deployments(torpor_up, page, pictures)
    fakes = markets.fakes

    for name in SHOP[:3]:
        new_block(page, torpor_up, f"{name}-provider", NAME)
        page.locator("input[type=password]").first.fill(fakes[name].key)
        page.get_by_label("API address (Optional)").fill(fakes[name].url)
        forms.picture(f"block-{name}-provider")
        save_block(page)
    new_block(page, torpor_up, "ec2-provider", NAME)
    page.get_by_label("Account").fill(login.account)
    page.get_by_label("Credentials (Optional)").fill(f"aws-credentials/{NAME}")
    forms.picture("block-ec2-provider")
    save_block(page)
    assert VastProvider.load(NAME, _sync=True).open().identity == (
        markets.provider("vast").identity
    )
    for kind in (VastProvider, RunpodProvider, LambdaProvider, blocks.Ec2Provider):
        kind.load(NAME, _sync=True).open().check()
    assert blocks.Ec2Provider.load(NAME, _sync=True).region == REGION

    new_block(page, torpor_up, "tuning", NAME)
    page.get_by_label("Lowest reliability (Optional)").fill("0.9")
    forms.picture("block-tuning")
    save_block(page)
    Workspace(name=NAME).save(NAME, overwrite=True, _sync=True)
    edit_block(page, torpor_up, "workspace", NAME)
    page.get_by_label("Provider (Optional)").fill(f"vast-provider/{NAME}")
    page.get_by_role("button", name="Add item").nth(3).click()
    page.locator("textarea").nth(4).fill(f"runpod-provider/{NAME}")  # below the provider
    page.get_by_label("GPU (Optional)").fill("RTX 4090")
    page.get_by_label("Tuning (Optional)").fill(NAME)
    forms.picture("block-workspace-two-providers")
    save_block(page)
    saved = Workspace.of(NAME)
    tuning = saved.open_tuning()
    assert (saved.provider, saved.more_providers, saved.gpu) == (
        f"vast-provider/{NAME}",
        [f"runpod-provider/{NAME}"],
        "RTX 4090",
    )
    assert tuning.min_reliability == 0.9

    create(NAME)
    (made,) = markets.alive()
    (markets.workspace(made) / "code").mkdir(parents=True)
    (markets.workspace(made) / "code" / "train.py").write_text("print('hello')\n")
    hibernate(NAME)
    assert markets.alive() == []

    tuning.min_reliability = 0.0  # RunPod's community states none for its many owners
    tuning.save(NAME, overwrite=True, _sync=True)
    fakes["runpod"].faults.arm(Fault("no capacity", "create"))  # the cheapest
    forms.open("wake")
    forms.pick(NAME)
    run = forms.submit("wake-market")
    assert markets.alive() == ["vast"]
    assert (markets.workspace("vast") / "code" / "train.py").read_text() == "print('hello')\n"

    page.goto(f"{torpor_up.ui_url}/v2/runs/flow-run/{run['id']}")
    page.get_by_role("tab", name="Artifacts").click()
    expect(page.get_by_role("link").filter(has_text=f"wake-{NAME}").first).to_be_visible()
    forms.picture("wake-market-artifacts")
    _follow(page, page.get_by_role("link").filter(has_text=f"offers-{NAME}").first)
    _follow(page, page.locator("a[href*='/artifacts/artifact/']").first)
    (machine,) = fakes["vast"].market.alive()
    expect(page.get_by_role("cell", name=f"machine {machine.id}", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name="RunPod refused").first).to_be_visible()
    expect(page.get_by_role("cell", name="RTX 4090 is wanted").first).to_be_visible()
    outcome = page.get_by_role("cell", name=f"machine {machine.id}", exact=True)
    box = until(outcome.bounding_box, "the table stands, which is drawn more than once")
    assert box["x"] + 100 < 850, "the outcome is not in the part of the table that a page shows"
    forms.picture("wake-market-offers")
    hibernate(NAME)


def _follow(page: Page, link: Locator) -> None:
    """Go where it leads. The list moves while it is drawn: a click may meet its neighbour."""
    expect(link).to_be_visible()
    page.goto(urljoin(page.url, str(link.get_attribute("href"))))
