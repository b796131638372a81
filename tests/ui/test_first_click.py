"""README's first click, exactly: a clean home, ``make up``, a real browser, ``make down``."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deployments.inventory import differences, inventory_of, sizes_of
from tests.fixtures.deployed import ENDED
from tests.fixtures.newcomer import USERS, Newcomer, outside_of, processes_of
from tests.fixtures.waiting import until
from tests.ui.conftest import WAIT_MS, click_for, press
from torpor.control.ports import free_ports

WORKSPACE = "machines/*/home/workspace"
COUNT = 'from flows import list_snapshots; print(len(list_snapshots("demo")))'


@pytest.mark.rule(21)
def test_the_first_click(
    newcomer: Newcomer, blank_page: Page, pictures: Path, request: pytest.FixtureRequest
) -> None:
    top_before = sorted(os.listdir("/"))
    # Of its own: where an installation runs, the usual port is taken or will be in a moment.
    newcomer.up(f"PORT={free_ports(1)[0]}")

    page, user = blank_page, request.node.callspec.params["newcomer"]

    def picture(name: str) -> None:
        page.screenshot(path=pictures / f"first-click-{user}-{name}.png", full_page=True)

    page.goto(newcomer.ui, wait_until="commit")
    prompt = page.get_by_placeholder("admin:pass")
    expect(prompt).to_be_visible(timeout=WAIT_MS)
    picture("1-login")
    prompt.fill("torpor:wrong")
    page.get_by_role("button", name="Login").click()
    expect(page.get_by_text("Invalid credentials")).to_be_visible(timeout=WAIT_MS)
    prompt.fill(newcomer.login.strip())
    page.get_by_role("button", name="Login").click()
    page.get_by_role("link", name="Deployments").click()
    expect(page.get_by_role("link", name="backup").first).to_be_visible(timeout=WAIT_MS)
    picture("2-deployments")
    _see_torpors_page(newcomer, page, "torpor is up")

    (folder,) = newcomer.state.glob(WORKSPACE)
    before = inventory_of(folder)
    assert len(sizes_of(before)) == 203
    _run(newcomer, page, "hibernate", picture)
    assert list(newcomer.state.glob("machines/m-*")) == []
    _run(newcomer, page, "wake", picture)
    if user == USERS[0]:
        _switch_watch_on(newcomer, page, picture)
        _see_torpors_page(newcomer, page, "1 of 1 awake")
    page.close()  # the graph of a run is drawn on and on, by the processor
    (woken,) = newcomer.state.glob(WORKSPACE)
    assert woken != folder
    assert differences(before, inventory_of(woken)) == []

    listed = newcomer.shell(f"exec .venv/bin/python -c '{COUNT}'")
    assert listed.stdout == "1\n"
    assert "Traceback" not in listed.stderr  # Prefect may say that events are still on their way

    identity = newcomer.identity()
    said = newcomer.make("down")  # a run of a schedule may be going on
    assert re.search("ended workers(, flow runs)?, store, Prefect server", said), said
    assert "ended" not in newcomer.make("down", "MACHINES=1").splitlines()[0]
    assert processes_of(newcomer) == []
    if user == USERS[0]:
        _see_that_up_comes_back(newcomer, identity, woken)
    assert sorted(os.listdir("/")) == top_before
    assert outside_of(newcomer) == []


def _see_torpors_page(newcomer: Newcomer, page: Page, title: str) -> None:
    """At the address that `up` names first, in a tab of its own."""
    (address,) = re.findall(r"^  page +(\S+)$", newcomer.printed, re.MULTILINE)
    tab = page.context.new_page()
    tab.goto(address, wait_until="commit")
    expect(tab.get_by_role("heading", name=title)).to_be_visible(timeout=WAIT_MS)
    expect(tab.get_by_role("cell", name="demo", exact=True)).to_be_visible(timeout=WAIT_MS)
    tab.close()


def _see_that_up_comes_back(newcomer: Newcomer, identity: dict[str, Any], woken: Path) -> None:
    """With the same address and blocks; the machine is served again, and its files have stayed."""
    url, machine = newcomer.ui, woken.relative_to(newcomer.state).parts[1]
    newcomer.up()
    assert newcomer.ui == url
    assert newcomer.identity() == identity
    assert list(newcomer.state.glob(WORKSPACE)) == [woken]
    assert re.search(rf"machine {machine}\S* had stopped and is served again", newcomer.printed)
    newcomer.make("down", "MACHINES=1")
    assert processes_of(newcomer) == []


def _switch_watch_on(newcomer: Newcomer, page: Page, picture: Any) -> None:
    """As the guide says: from then on it runs by itself, and acts (no dry run)."""
    page.get_by_role("link", name="Deployments").click()
    page.get_by_placeholder("Search deployments").fill("watch")
    expect(page.get_by_role("link", name="backup", exact=True)).to_have_count(0)
    page.get_by_role("link", name="watch", exact=True).first.click()
    switch = page.get_by_role("switch", name="toggle Every 2 minutes")
    expect(switch).to_be_visible(timeout=WAIT_MS)
    switch.click()
    expect(switch).to_be_checked(timeout=WAIT_MS)
    wanted = {"deployments": {"name": {"any_": ["watch"]}}, "sort": "EXPECTED_START_TIME_ASC"}

    def completed() -> dict[str, Any] | None:
        runs = newcomer.ask("flow_runs/filter", wanted)
        return next((run for run in runs if run["state_type"] in ENDED), None)

    run = until(completed, "a run of the schedule has ended", every_s=1.0)
    assert run["auto_scheduled"]
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert run["parameters"]["dry_run"] is False
    page.reload()
    expect(page.get_by_role("link", name=run["name"]).first).to_be_visible(timeout=WAIT_MS)
    picture("watch-runs")
    switch.click()
    expect(switch).not_to_be_checked(timeout=WAIT_MS)


def _run(newcomer: Newcomer, page: Page, name: str, picture: Any) -> None:
    """Deployments, search for NAME, Run > Custom run, choose `demo`, Submit; see it complete."""
    page.get_by_role("link", name="Deployments").click()
    page.get_by_placeholder("Search deployments").fill(name)
    expect(page.get_by_role("link", name="backup", exact=True)).to_have_count(0)  # filtered by now
    page.get_by_role("link", name=name, exact=True).first.click()
    custom = page.get_by_role("menuitem", name="Custom run")
    click_for(page.get_by_role("button", name="Run", exact=True), custom)
    blocks = page.get_by_role("button", name="Select a block")
    click_for(custom, blocks)
    option = page.get_by_role("option", name="demo", exact=True)
    click_for(blocks, option)
    option.click()
    picture(f"{name}-form")
    press(page, "Submit", "/create_flow_run")
    page.wait_for_url("**?tab=Runs", timeout=WAIT_MS)
    wanted = {"deployments": {"name": {"any_": [name]}}}
    run = until(partial(_ended, newcomer, wanted), f"{name} has ended", every_s=0.5)
    page.get_by_role("link", name=run["name"]).first.click()
    expect(page.get_by_text("Finished in state").first).to_be_visible(timeout=WAIT_MS)
    picture(f"{name}-run")
    assert run["state_type"] == "COMPLETED", run["state"]["message"]


def _ended(newcomer: Newcomer, wanted: dict[str, Any]) -> dict[str, Any] | None:
    run: dict[str, Any]
    (run,) = newcomer.ask("flow_runs/filter", wanted)
    return run if run["state_type"] in ENDED else None
