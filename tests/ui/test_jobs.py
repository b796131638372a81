"""A job in a real browser: its form submitted, its log while it runs, and the table of watch."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from blocks import Workspace
from deployments.installation import Installation
from deployments.server import Server
from flows import list_machines
from tests.fixtures.deployed import Deployed, place_of
from tests.fixtures.prefect_api import ask
from tests.ui.conftest import click_for
from tests.ui.test_flows import Deployments
from torpor.control.jobs.records import new_job_id

# Of these, tests/deployments/test_queues.py kills the worker.
pytestmark = pytest.mark.together("automations and make up")

NAME = "ui-job"
COUNT = "n=0; until test -e go; do n=$((n+1)); echo step $n; sleep 0.5; done; echo enough"


def test_a_job_from_the_form_to_its_report(
    torpor_up: Server,
    deployed: Deployed,
    installation: Installation,
    page: Page,
    pictures: Path,
) -> None:
    Workspace(name=NAME).save(NAME, overwrite=True, _sync=True)
    assert deployed.end(deployed.start("create", {"workspace": NAME}))["state_type"] == "COMPLETED"
    (machine,) = list_machines(NAME)
    place = place_of(installation, NAME)
    deployments = Deployments(torpor_up, page, pictures)

    deployments.open("job")
    deployments.see_fields("job")
    deployments.pick(NAME)
    page.locator("textarea").first.fill(COUNT)
    page.get_by_label("save_minutes (Optional)").fill("15")
    queues = page.get_by_role("button", name="Select a work queue")
    high = page.get_by_role("option", name="high", exact=True)
    click_for(page.get_by_role("button", name="Additional Options"), queues)
    click_for(queues, high)
    high.click()
    run = deployments.submitted("job")

    page.goto(f"{torpor_up.ui_url}/v2/runs/flow-run/{run}")
    expect(page.get_by_text("step 3", exact=True).first).to_be_visible()
    expect(page.get_by_text("Running").first).to_be_visible()
    deployments.picture("job-log")

    watched = deployed.end(deployed.start("watch", {"workspaces": [NAME]}))
    assert watched["state_type"] == "COMPLETED"
    deployments.artifact("watch", watched["id"])
    expect(page.get_by_role("cell", name=f"{new_job_id(run)} is running").first).to_be_visible()
    expect(page.get_by_role("cell", name=f"{machine.id} at").first).to_be_visible()
    page.set_viewport_size({"width": 2600, "height": 900})  # to see more columns
    deployments.picture("watch-table")
    page.set_viewport_size({"width": 1280, "height": 1400})

    (place / "go").touch()
    ended = deployed.end(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]["message"]
    assert ended["parameters"]["command"] == COUNT
    assert ended["parameters"]["save_minutes"] == 15
    assert ended["work_queue_name"] == "high"
    assert ended["name"] == f"job-{NAME}"
    deployments.artifact(f"job-{new_job_id(run)}", run)
    outcome = "succeeded: the command ended with status 0"
    expect(page.get_by_role("cell", name=outcome, exact=True)).to_be_visible()
    deployments.picture("job-report")
    assert list_machines(NAME) == []


def test_the_queues_are_shown_in_their_order(torpor_up: Server, page: Page, pictures: Path) -> None:
    page.goto(f"{torpor_up.ui_url}/v2/work-pools/work-pool/torpor-jobs?tab=Work+Queues")
    for name in ("critical", "high", "normal", "low"):
        expect(page.get_by_role("link", name=name, exact=True).first).to_be_visible()
    pool = ask("GET", f"{torpor_up.api_url}/work_pools/torpor-jobs")
    assert pool["concurrency_limit"] == 8
    Deployments(torpor_up, page, pictures).picture("job-queues")
