"""Each flow's form in a real browser: what a person sees, fills, submits and gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from prefect.utilities.callables import parameter_schema

import flows
from blocks import Workspace
from deployments.first_machine import fill
from deployments.installation import Installation
from deployments.server import Server
from flows import list_machines, list_snapshots
from tests.fixtures.deployed import ENDED, place_of
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until
from tests.ui.conftest import WAIT_MS, click_for, press

NAME = "ui-forms"

FORMS = (
    "backup", "cancel-job", "compare", "create", "delete-snapshots", "hibernate", "job",
    "reconcile", "restore-path", "spend", "wake",
)  # fmt: skip
SUBMITTED = {"create", "hibernate", "wake"}
"""Forms that a test fills and submits; it sees their fields too."""


def fields_of(name: str) -> dict[str, str]:
    """The label of each field of a form, with the plain words that its description begins with."""
    schema = parameter_schema(getattr(flows, name.replace("-", "_")))
    return {
        field if field in schema.required else f"{field} (Optional)": said["description"]
        .partition("`")[0]
        .partition(".")[0]
        .strip()
        for field, said in schema.properties.items()
    }


@dataclass
class Deployments:
    """The forms and runs of the deployments that ``make up`` made."""

    server: Server
    page: Page
    pictures: Path

    def open(self, name: str) -> None:
        """Go to the form as a person does: deployment, Run, Custom run."""
        deployment = self._one("deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        self.page.goto(f"{self.server.ui_url}/v2/deployments/deployment/{deployment['id']}")
        custom = self.page.get_by_role("menuitem", name="Custom run")
        click_for(self.page.get_by_role("button", name="Run", exact=True), custom)
        click_for(custom, self.page.get_by_role("button", name="Submit"))

    def see_fields(self, name: str) -> None:
        """The form says what each field is, in the order of the flow's parameters."""
        wanted = fields_of(name)
        for label, description in wanted.items():
            expect(self.page.get_by_text(label, exact=True).first).to_be_visible()
            expect(self.page.get_by_text(description).first).to_be_visible()
        expect(self.page.get_by_role("button", name="Select a block")).to_be_visible()
        self.picture(f"{name}-form")
        shown = self.page.locator("label").all_inner_texts()
        assert [text for text in shown if text in wanted] == list(wanted)

    def pick(self, saved: str, number: int = 0) -> None:
        """Choose a saved block from a list of the form, unless it is chosen."""
        listed = self.page.get_by_role("button", name="Select a block").nth(number)
        option = self.page.get_by_role("option", name=saved, exact=True)
        if listed.filter(has_text=saved).is_visible():
            return
        click_for(listed, option)
        option.click()
        expect(option).to_have_count(0)

    def submit(self, name: str) -> dict[str, Any]:
        """Submit the form and wait for the run that it made to complete."""
        wanted = {"flow_runs": {"id": {"any_": [self.submitted(name)]}}}
        run = until(partial(self._ended, wanted), "the run has ended", every_s=0.5)
        assert run["state_type"] == "COMPLETED", run["state"]["message"]
        return run

    def submitted(self, name: str) -> str:
        """Submit the form; returns the id of the run that it made."""
        self.picture(f"{name}-filled")
        made: list[dict[str, Any]] = []

        def see(route: Route) -> None:
            answer = route.fetch()
            made.append(answer.json())
            route.fulfill(response=answer)

        self.page.route("**/create_flow_run", see)
        press(self.page, "Submit", "/create_flow_run")
        self.page.wait_for_url("**?tab=Runs", timeout=WAIT_MS)
        self.page.unroute("**/create_flow_run")
        return str(made[-1]["id"])

    def _ended(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        run = self._one("flow_runs/filter", wanted)
        return run if run["state_type"] in ENDED else None

    def artifacts(self, run: dict[str, Any], name: str) -> None:
        """Open the run's page, its artifacts, and the table among them."""
        self.page.goto(f"{self.server.ui_url}/v2/runs/flow-run/{run['id']}")
        self.page.get_by_role("tab", name="Artifacts").click()
        for key in (f"{name}-{NAME}-progress", f"{name}-{NAME}"):
            expect(self.page.get_by_role("link").filter(has_text=key).first).to_be_visible()
        self.picture(f"{name}-artifacts")
        self.page.get_by_role("link").filter(has_text="TABLE").click()
        progress = self.page.get_by_role("link").filter(has_text=f"{name}-{NAME}-progress")
        expect(progress).to_have_count(0)  # the list without what is no table
        self.page.locator("a[href*='/artifacts/artifact/']").first.click()
        expect(self.page.get_by_role("cell", name="files", exact=True)).to_be_visible()
        expect(self.page.get_by_role("cell", name="203", exact=True)).to_be_visible()
        self.picture(f"{name}-table")

    def artifact(self, key: str, run: str) -> None:
        """Open what this run told last under that key. Other runs may tell under it too."""
        wanted = {"key": {"any_": [key]}, "flow_run_id": {"any_": [run]}}
        found = self._one("artifacts/filter", {"artifacts": wanted, "sort": "CREATED_DESC"})
        self.page.goto(f"{self.server.ui_url}/v2/artifacts/artifact/{found['id']}")

    def picture(self, name: str) -> None:
        path = self.pictures / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 10_000

    def _one(self, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = ask("POST", f"{self.server.api_url}/{path}", wanted)[0]
        return found


@pytest.fixture
def deployments(torpor_up: Server, page: Page, pictures: Path) -> Deployments:
    return Deployments(torpor_up, page, pictures)


@pytest.fixture(scope="module")
def reference(torpor_up: Server) -> Iterator[dict[str, Any]]:
    """The workspace block that is picked, as a form refers to it."""
    # Playwright keeps an event loop running, in which save() alone would be a coroutine.
    identity = Workspace(name=NAME).save(NAME, overwrite=True, _sync=True)
    yield {"$ref": {"block_document_id": str(identity)}}


@pytest.mark.parametrize("name", [form for form in FORMS if form not in SUBMITTED])
@pytest.mark.usefixtures("reference")
def test_a_form_says_what_each_field_is_and_needs_a_workspace(
    deployments: Deployments, name: str
) -> None:
    deployments.open(name)
    deployments.see_fields(name)
    refusal = deployments.page.get_by_text("'workspace' is a required property")
    click_for(deployments.page.get_by_role("button", name="Submit"), refusal.first)


def test_forms_filled_and_submitted(
    deployments: Deployments, installation: Installation, reference: dict[str, Any]
) -> None:
    """A workspace is created, filled, hibernated and woken with nothing but the browser."""
    page = deployments.page

    deployments.open("create")
    deployments.see_fields("create")
    deployments.pick(NAME)
    run = deployments.submit("create")
    assert run["parameters"] == {
        "workspace": reference,
        "gpu": "",
        "regions": [],
        "job": "",
        "max_usd": 0,
        "agreed_usd_h": None,
    }
    (machine,) = list_machines(NAME)
    fill(place_of(installation, NAME))

    deployments.open("hibernate")
    deployments.see_fields("hibernate")
    deployments.pick(NAME)
    page.get_by_role("button", name="Add item").first.click()
    page.locator("textarea").nth(1).fill("*.log")
    run = deployments.submit("hibernate")
    assert run["parameters"] == {
        "workspace": reference,
        "destroy": True,
        "machine": "",
        "accept_changed": ["*.log"],
        "only_if_idle": False,
        "accept_lost": [],
        "dry_run": False,
        "only_if_unused": False,
    }
    assert run["name"] == f"hibernate-{NAME}"
    assert list_machines(NAME) == []
    (snapshot,) = list_snapshots(NAME)
    deployments.artifacts(run, "hibernate")

    deployments.open("wake")
    deployments.see_fields("wake")
    deployments.pick(NAME)
    page.get_by_role("switch").first.click()
    run = deployments.submit("wake")
    assert run["parameters"] == {
        "workspace": reference,
        "snapshot": "newest",
        "machine": "",
        "full_check": False,
        "accept_paths": [],
        "dry_run": False,
        "gpu": "",
        "regions": [],
        "job": "",
        "max_usd": 0,
        "agreed_usd_h": None,
    }
    deployments.artifacts(run, "wake")
    (woken,) = list_machines(NAME)
    assert woken.id != machine.id
    home = place_of(installation, NAME)
    assert (home / "README.txt").read_text().startswith("This is the workspace")
    assert (home / "latest.bin").resolve() == home / "weights.bin"
    assert list_snapshots(NAME) == [snapshot]
