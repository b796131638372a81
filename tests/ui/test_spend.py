"""The form of spend submitted, its table, and its page with the plot, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

from playwright.sync_api import Page, expect

from blocks import Budget, Workspace
from deployments.server import Server
from tasks.workspace import OpenWorkspace
from tests.fixtures.market import H100
from tests.fixtures.prefect_api import ask
from tests.ui.test_flows import Deployments

NAME = "ui-spent"


def test_spend_from_the_form_to_its_plot(torpor_up: Server, page: Page, pictures: Path) -> None:
    Workspace(name=NAME, project="research").save(NAME, overwrite=True, _sync=True)
    Budget(usd_month=100, workspaces=[NAME]).save(NAME, overwrite=True, _sync=True)
    rentals = OpenWorkspace.of(NAME).rentals
    rental = rentals.begin(rentals.new_label("me"), H100, None, "research")
    now = time.time()
    began = {"created_unix": now - 5 * 3600, "seen_unix": now, "machine": "m1"}
    rentals.change(rentals.change(rental, **began), state="ended")
    deployments = Deployments(torpor_up, page, pictures)

    deployments.open("spend")
    deployments.pick(NAME)
    page.get_by_label("months").fill("2")
    run = deployments.submit("spend")
    assert run["state_type"] == "COMPLETED", run["state"]["message"]

    found = {}
    for key in (f"spend-{NAME}", f"spend-{NAME}-page"):
        wanted = {"artifacts": {"key": {"any_": [key]}}, "limit": 1}
        found[key] = ask("POST", f"{torpor_up.api_url}/artifacts/filter", wanted)[0]
        assert found[key]["flow_run_id"] == run["id"]
    page.goto(f"{torpor_up.ui_url}/v2/artifacts/artifact/{found[f'spend-{NAME}']['id']}")
    expect(page.get_by_role("cell", name="2 x H100 SXM", exact=True).first).to_be_visible()
    expect(page.get_by_role("cell", name="research", exact=True).first).to_be_visible()
    deployments.picture("spend-table")
    page.goto(f"{torpor_up.ui_url}/v2/artifacts/artifact/{found[f'spend-{NAME}-page']['id']}")
    expect(page.get_by_role("heading", name="Budgets of this workspace")).to_be_visible()
    expect(page.get_by_text(f"budget {NAME}: 20.00 $ of 100.00 $ spent").first).to_be_visible()
    image = page.locator("[data-testid=markdown-display] img")
    expect(image).to_be_visible()
    # a picture that cannot be shown has no width of its own
    assert image.evaluate("i => i.decode().then(() => i.naturalWidth)") > 300
    deployments.picture("spend-page")
