"""The benchmark's form submitted, and its page, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
from playwright.sync_api import Page, expect

from blocks import Workspace
from deployments.installation import Installation
from deployments.server import Server
from tests.fixtures.deployed import machines_of
from tests.ui.test_flows import Deployments
from torpor.control.measure.scratch import machines_name
from torpor.shared.values import WorkspaceName

NAME = "ui-measured"


def test_a_benchmark_from_the_form_to_its_page(
    torpor_up: Server, page: Page, pictures: Path, installation: Installation, tmp_path: Path
) -> None:
    Workspace(name=NAME).save(NAME, overwrite=True, _sync=True)  # playwright keeps a loop running
    deployments = Deployments(torpor_up, page, pictures)

    deployments.open("benchmark")
    expect(
        page.get_by_text("Names of further Object Store blocks to measure; * for every one.")
    ).to_be_visible()
    deployments.picture("benchmark-form")
    deployments.pick(NAME)
    page.get_by_label("rounds").fill("1")
    page.get_by_label("minutes").fill("0.1")
    page.get_by_label("folder").fill(str(tmp_path))
    run = deployments.submit("benchmark")

    (folder,) = tmp_path.iterdir()
    table = pandas.read_csv(folder / "figures.csv")
    assert set(table.what) == {"line", "codec"}
    kept = json.loads((folder / "benchmark.json").read_text())
    assert "store" in {advice["about"] for advice in kept["advice"]}
    for name in (NAME, machines_name(WorkspaceName(NAME))):
        assert machines_of(installation, name) == []

    deployments.artifact(f"benchmark-{NAME}", run["id"])
    expect(page.get_by_role("heading", name="What it advises")).to_be_visible()
    deployments.picture("benchmark-page")
