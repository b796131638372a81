"""A deploy in a real browser: its form submitted, the run's phases, and the server's address. The
stack's server asks for a token that a Secret block holds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from prefect.blocks.system import Secret

from blocks import Workspace
from deployments.server import Server
from flows import list_machines
from tests.fixtures.deployed import Deployed
from tests.fixtures.prefect_api import ask
from tests.fixtures.small_stack import small_stack
from tests.fixtures.waiting import until
from tests.ui.conftest import edit_block
from tests.ui.test_flows import Deployments, fields_of

pytestmark = pytest.mark.together("automations and make up")

NAME = "ui-deploy"
TOKEN = "a-token-of-nobody"


def test_a_deploy_from_the_form_to_the_address(
    torpor_up: Server, deployed: Deployed, page: Page, pictures: Path
) -> None:
    Workspace(name=NAME).save(NAME, overwrite=True, _sync=True)
    Secret(value=TOKEN).save(NAME, overwrite=True, _sync=True)
    stack = small_stack(
        environment=[f"~/{NAME}"],  # of its own: the store holds the others' when this test begins
        proof_method="GET", proof_path="/api", proof_body="", proof_answer="version",
        server=["python3", "{bin}serve.py", "{port}", "{model_path}", "SERVER_KEY"],
        secrets=[f"SERVER_KEY={NAME}"], bearer="SERVER_KEY",
    )  # fmt: skip
    stack.save(NAME, overwrite=True, _sync=True)
    deployments = Deployments(torpor_up, page, pictures)

    edit_block(page, torpor_up, "stack", NAME)
    expect(page.locator(f"text=SERVER_KEY={NAME}").first).to_be_visible()
    deployments.picture("stack-block")

    deployments.open("deploy")
    for label, description in fields_of("deploy").items():
        expect(page.get_by_text(label, exact=True).first).to_be_visible()
        expect(page.get_by_text(description).first).to_be_visible()
    deployments.picture("deploy-form")
    for number in (0, 1, 0):  # the workspace, the stack; a form still being drawn forgets the first
        deployments.pick(NAME, number)
    run = deployments.submitted("deploy")
    ended = deployed.end(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]["message"]
    assert ended["parameters"]["strategy"] == "stored"

    page.goto(f"{torpor_up.ui_url}/v2/runs/flow-run/{run}")
    expect(page.get_by_text("Completed").first).to_be_visible()
    deployments.picture("deploy-run")
    until(partial(_steps_seen, torpor_up, run), "Prefect has the run's steps", every_s=0.5)
    deployments.artifact(f"deploy-{NAME}", run)
    address = f"http://127.0.0.1:{stack.port}, after the next command"
    expect(page.get_by_role("cell", name=address, exact=True)).to_be_visible()
    forward = page.get_by_role("cell", name=f"ssh -N -L {stack.port}:127.0.0.1:{stack.port}")
    expect(forward.first).to_be_visible()
    for phase in ("machine ", "restore ", "environment: setup ", "health ", "completion "):
        expect(page.get_by_role("cell").filter(has_text=phase).first).to_be_visible()
    deployments.picture("deploy-artifact")
    assert TOKEN not in _all_of(torpor_up, run)
    (machine,) = list_machines(NAME)
    assert machine.state == "running"


def _steps_seen(server: Server, run: str) -> bool:
    """Prefect records them a while after they have ended."""
    wanted = {"flow_runs": {"id": {"any_": [run]}}}
    found = ask("POST", f"{server.api_url}/task_runs/filter", wanted)
    names = " ".join(str(deployment["name"]) for deployment in found)
    return all(step in names for step in ("create machine", "start attempt 1", "keep environment"))


def _all_of(server: Server, run: str) -> str:
    """What Prefect has of the run, and of the stack's block."""
    wanted: dict[str, Any] = {"flow_run_id": {"any_": [run]}}
    api = server.api_url
    named = {"block_documents": {"name": {"any_": [NAME]}}, "include_secrets": False}
    return json.dumps(
        [
            ask("GET", f"{api}/flow_runs/{run}"),
            ask("POST", f"{api}/logs/filter", {"logs": wanted}),
            ask("POST", f"{api}/artifacts/filter", {"artifacts": wanted}),
            ask("POST", f"{api}/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}}),
            ask("POST", f"{api}/block_documents/filter", named),
        ]
    )
