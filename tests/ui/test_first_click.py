"""README's first click, exactly: a clean home, ``make up``, a real browser, ``make down``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deployments.installation import CHECKOUT
from deployments.inventory import Inventory
from tests.fixtures.deployed import ENDED
from tests.fixtures.ordinary_user import as_nobody
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import PATIENCE_S, until
from tests.ui.conftest import WAIT_MS, click_for, press
from torpor.control.ports import free_ports

WORKSPACE = "machines/*/home/workspace"
USERS = ["root", "ordinary"] if os.geteuid() == 0 else ["ordinary"]
ANOTHER_UID = 65533
COUNT = 'from flows import list_snapshots; print(len(list_snapshots("demo")))'


@dataclass
class Newcomer:
    """Somebody who has cloned the repository, and whose home is empty."""

    home: Path
    prefix: list[str]
    printed: str = ""
    login: str = field(default="", repr=False)

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "torpor"

    @property
    def temporary(self) -> Path:
        return self.home.with_name(f"{self.home.name}-tmp")

    @property
    def ui(self) -> str:
        return self._line("UI")

    @property
    def environment(self) -> dict[str, str]:
        ours = ("PREFECT_", "TORPOR_", "XDG_", "PYTEST_")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
        }

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, *argv],
            cwd=CHECKOUT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def make(self, *arguments: str) -> str:
        done = self.run("make", "--silent", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self, *port: str) -> None:
        self.printed = self.make("up", *port)
        self.login = Path(self._line("password").removeprefix("the whole line in ")).read_text()

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command in a shell where the line was run that ``make up`` names for Python."""
        usual = f"export PREFECT_HOME={self.state}/of-a-script"  # else ~/.prefect
        return self.run("sh", "-c", f"{usual}\n{self._line('Python')}\n{command}")

    def ask(self, path: str, wanted: dict[str, Any]) -> Any:
        return ask("POST", f"{self.ui}/api/{path}", wanted, by=self.login)

    def identity(self) -> dict[str, Any]:
        """The block with the SSH key, secret included."""
        wanted = {"block_types": {"slug": {"any_": ["ssh-identity"]}}, "include_secrets": True}
        (found,) = self.ask("block_documents/filter", wanted)
        return {"id": found["id"], "data": found["data"]}

    def _line(self, label: str) -> str:
        found = re.search(rf"^  {label} +(.*)$", self.printed, re.MULTILINE)
        assert found, self.printed
        return found[1]


@pytest.fixture(params=USERS)
def newcomer(request: pytest.FixtureRequest) -> Iterator[Newcomer]:
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))  # short: it holds the names of Unix sockets
    folder.chmod(0o755)
    home, temporary = folder / "h", folder / "h-tmp"
    home.mkdir(mode=0o700)
    temporary.mkdir()
    temporary.chmod(0o777)
    other = os.geteuid() == 0 and request.param == "ordinary"
    made = Newcomer(home, as_nobody(folder, home) if other else [])
    try:
        yield made
    finally:
        made.run("make", "--silent", "down", "MACHINES=1")
        shutil.rmtree(folder)


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

    (folder,) = newcomer.state.glob(WORKSPACE)
    before = Inventory.of(folder)
    assert before.files == 203
    _run(newcomer, page, "hibernate", picture)
    assert list(newcomer.state.glob("machines/m-*")) == []
    _run(newcomer, page, "wake", picture)
    if user == USERS[0]:
        _switch_watch_on(newcomer, page, picture)
    page.close()  # the graph of a run is drawn on and on, by the processor
    (woken,) = newcomer.state.glob(WORKSPACE)
    assert woken != folder
    assert before.differences(Inventory.of(woken)) == []

    listed = newcomer.shell(f"exec .venv/bin/python -c '{COUNT}'")
    assert listed.stdout == "1\n"
    assert "Traceback" not in listed.stderr  # Prefect may say that events are still on their way

    identity = newcomer.identity()
    assert "ended workers, store, Prefect server" in newcomer.make("down")
    assert "ended" not in newcomer.make("down", "MACHINES=1").splitlines()[0]
    assert _processes(newcomer) == []
    if user == USERS[0]:
        _see_that_up_comes_back(newcomer, identity, woken)
    assert sorted(os.listdir("/")) == top_before
    assert _outside(newcomer) == []


def _see_that_up_comes_back(newcomer: Newcomer, identity: dict[str, Any], woken: Path) -> None:
    """With the same address and blocks; the machine is served again, and its files have stayed."""
    url, machine = newcomer.ui, woken.relative_to(newcomer.state).parts[1]
    newcomer.up()
    assert newcomer.ui == url
    assert newcomer.identity() == identity
    assert list(newcomer.state.glob(WORKSPACE)) == [woken]
    assert re.search(rf"machine {machine}\S* had stopped and is served again", newcomer.printed)
    newcomer.make("down", "MACHINES=1")
    assert _processes(newcomer) == []


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


def _processes(newcomer: Newcomer) -> list[int]:
    """Processes with the newcomer's home in their arguments or environment."""
    mark = os.fsencode(newcomer.home)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            words += Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if mark in words:
            found.append(int(name))
    return found


def _outside(newcomer: Newcomer) -> list[str]:
    """What lies in the home and among the temporary files, but for the state folder."""
    found = [*newcomer.temporary.rglob("*"), *newcomer.home.rglob("*")]
    inside = {newcomer.state, *newcomer.state.parents}
    return [str(p) for p in found if p not in inside and newcomer.state not in p.parents]
