"""The form of spend submitted, its table, and its page with the plot, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

from playwright.sync_api import Page, expect

from blocks import Budget, Workspace
from deployments.server import Server
from tasks.workspace import OpenWorkspace
from tests.fixtures.market import H100
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

    deployments.artifact(f"spend-{NAME}", run["id"])
    expect(page.get_by_role("cell", name="2 x H100 SXM", exact=True).first).to_be_visible()
    expect(page.get_by_role("cell", name="research", exact=True).first).to_be_visible()
    deployments.picture("spend-table")
    deployments.artifact(f"spend-{NAME}-page", run["id"])
    expect(page.get_by_role("heading", name="Budgets of this workspace")).to_be_visible()
    expect(page.get_by_text(f"budget {NAME}: 20.00 $ of 100.00 $ spent").first).to_be_visible()
    deployments.sees_plots()
    deployments.picture("spend-page")
