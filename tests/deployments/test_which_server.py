"""Which Prefect server `up`, commands and flows from Python use where several are possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import server
from deployments.installation import CHECKOUT, Installation
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.own_server import FOLDER_VARIABLE, announce, choose_server
from torpor.control.processes import STARTED_BY

CLOUD = "https://api.prefect.example/api"
TEAM = "http://prefect.team.example:4200/api"
OWN = "http://127.0.0.1:4321/api"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """The installation of a user whose environment names no server and no profile."""
    for name in [*os.environ]:
        if name.startswith("PREFECT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv(STARTED_BY, raising=False)
    (tmp_path / "prefect").mkdir()
    return Installation(tmp_path / "state")


def _start(here: Installation) -> None:
    """What the first start of an installation leaves."""
    here.login()
    here.port_file.write_text("4321\n")


def _profile(here: Installation) -> Path:
    file = here.folder.with_name("prefect") / "profiles.toml"
    file.write_text(f'active = "cloud"\n[profiles.cloud]\nPREFECT_API_URL = "{CLOUD}"\n')
    return file


@pytest.mark.parametrize(
    ("environment", "own", "profile", "taken", "others"),
    [
        ("", False, False, None, []),
        ("", True, False, OWN, []),
        ("", False, True, CLOUD, []),
        ("", True, True, OWN, [CLOUD]),
        (TEAM, True, True, TEAM, [OWN, CLOUD]),
        (TEAM, False, True, TEAM, [CLOUD]),
        (OWN, True, True, OWN, [CLOUD]),
        ("http://localhost:4321/api/", True, False, OWN, []),
    ],
)
def test_the_environment_comes_first_then_the_installation_then_the_profile(
    here: Installation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    own: bool,
    profile: bool,
    taken: str | None,
    others: list[str],
) -> None:
    if environment:
        monkeypatch.setenv("PREFECT_API_URL", environment)
    if own:
        _start(here)
    if profile:
        _profile(here)
    choice = choose_server()
    assert (choice and choice.taken.api_url) == taken
    assert [one.api_url for one in choice.others] == others if choice else True
    if choice:
        announce(choice)
        announce(choice)
    said = capsys.readouterr().err
    assert said.count("\n") == bool(others)
    for other in others:
        assert f"the Prefect server is {taken} (" in said
        assert other in said

    used = server.server_of(here)
    assert used.own == (environment != TEAM)
    if own or environment:
        assert used.api_url == taken
    # Before its first start, `up` starts a server of its own, and says so.
    up_says = server.choice_for(here, used)
    assert (CLOUD in up_says.words if up_says else False) == profile


def test_a_profile_that_a_variable_names_is_the_environments(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(here)
    _profile(here)
    monkeypatch.setenv("PREFECT_PROFILE", "cloud")
    used = server.server_of(here)
    assert (used.api_url, used.own, used.named_by) == (CLOUD, False, "PREFECT_PROFILE=cloud")


def test_flows_from_python_use_the_server_of_up_while_a_profile_names_another(
    here: Installation,
) -> None:
    _start(here)
    file = _profile(here)
    script = (
        "import blocks; from prefect.settings import get_current_settings as now;"
        "print(now().api.url, now().api.auth_string.get_secret_value())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.split() == [OWN, here.login()]
    assert f"and not {CLOUD} (the active profile cloud of {file})" in done.stderr
