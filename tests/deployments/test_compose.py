"""The files for Docker compose say what the chart and the product say. No Docker runs them here."""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import prefect
import yaml

from blocks import SSHIdentity
from deployments.cluster import read_teams
from deployments.installation import CHECKOUT
from deployments.server import SETTINGS, Server
from deployments.worker import POOLS

FOLDER: Final = CHECKOUT / "deployments" / "compose"
CHART: Final = CHECKOUT / "deployments" / "chart"


def _file() -> tuple[dict[str, Any], str]:
    text = (FOLDER / "compose.yaml").read_text()
    return yaml.safe_load(text), text


def _writes_nowhere(service: dict[str, Any]) -> None:
    """But into its volumes and a /tmp of its own, and it has no right of root beyond its files."""
    assert service["read_only"] and "/tmp" in service["tmpfs"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_server_is_the_charts_with_a_login_and_a_key_of_the_blocks() -> None:
    server = _file()[0]["services"]["server"]
    chart = yaml.safe_load((CHART / "values" / "prefect-server.yaml").read_text())
    tag = chart["global"]["prefect"]["image"]["prefectTag"]
    assert server["image"] == f"prefecthq/prefect:{tag}" and tag.startswith(prefect.__version__)
    environment = server["environment"]
    assert SETTINGS.items() <= environment.items()
    plain = {one["name"]: one["value"] for one in chart["server"]["env"] if "value" in one}
    assert plain.items() <= environment.items()
    page = environment["PREFECT_SERVER_UI_API_URL"].removesuffix("/api")
    assert environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == page  # not any page on the web
    assert environment["PREFECT_SERVER_UI_STATIC_DIRECTORY"] == "/tmp/ui"  # in a tmpfs
    _writes_nowhere(server)
    assert "ports" not in server  # only Caddy is reached from outside


def test_each_pool_has_a_worker_as_in_the_chart_and_none_may_write_its_root() -> None:
    services = _file()[0]["services"]
    chart = (CHART / "torpor" / "templates" / "workers.yaml").read_text()
    pools = set()
    for worker in (services["worker"], services["job-worker"]):
        assert f"[tini, --, {', '.join(worker['entrypoint'])}]" in chart
        options = worker["command"]
        pools.add(options[options.index("--pool") + 1])
        assert [word for word in options if word.startswith("--") and word not in chart] == []
        _writes_nowhere(worker)
        assert worker["depends_on"] == {"register": {"condition": "service_completed_successfully"}}
    assert pools == {pool.name for pool in POOLS}
    teams, *switches = services["register"]["command"]
    assert read_teams(CHECKOUT / Path(teams).relative_to("/opt/torpor")) == []
    assert _example()["TORPOR_IDLE"] in ("hibernate", "report")  # else nothing looks after machines
    assert switches == [
        "--idle=${TORPOR_IDLE:?hibernate, report or off}",
        "--nightly=${TORPOR_NIGHTLY:?on or off}",
    ]


def _example() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", (FOLDER / "example.env").read_text(), re.MULTILINE))


def test_a_secret_has_no_value_in_the_example_and_compose_starts_nothing_without_one() -> None:
    compose, text = _file()
    given = {
        name: str(value)
        for service in compose["services"].values()
        for name, value in service.get("environment", {}).items()
        if re.search("PASSWORD|AUTH|KEY|CONNECTION", name)
    }
    assert {"POSTGRES_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING"} < given.keys()
    for name, value in given.items():
        assert "${" in value, name
    for secret in {*re.findall(r"\$\{(\w+)", " ".join(given.values()))}:
        assert _example()[secret] == "", secret  # as a part of a value, it would pass for one
        for use in re.findall(r"\$\{" + secret + r"([^}]*)\}", text):
            assert use.startswith(":?"), secret


def test_each_value_that_the_files_ask_for_is_in_the_example() -> None:
    compose, text = _file()
    assert {*re.findall(r"\$\{(\w+)", text)} == {*_example()}
    asked = re.findall(r"\{\$(\w+)", (FOLDER / "Caddyfile").read_text())
    assert {*asked} == {*compose["services"]["caddy"]["environment"]}


def test_no_file_of_values_gets_into_the_image_or_into_git() -> None:
    """The image has all of deployments/."""
    assert "**/.env" in (CHECKOUT / ".dockerignore").read_text().splitlines()
    assert ".env" in (CHECKOUT / ".gitignore").read_text().splitlines()
    assert "--env-file ~/torpor.env" in _file()[1]


def test_the_identity_that_machines_let_in_is_a_file_that_outlives_the_database(
    prefect_server: Server, tmp_path: Path
) -> None:
    """Run as the guide has it, but for Docker and the block's name."""
    page = (CHECKOUT / "docs" / "guide" / "where-it-runs.md").read_text()
    (makes,) = re.findall(r"^(ssh-keygen .*?) +#", page, re.MULTILINE)
    ((saves, read),) = re.findall(r"^dc run .* register -c '(.*)' < (\S+)$", page, re.MULTILINE)
    *argv, file = shlex.split(makes)
    assert file == read
    key, name = tmp_path / "key", f"kept-{secrets.token_hex(4)}"
    subprocess.run([*argv, str(key)], check=True)
    with key.open() as given:
        program = [sys.executable, "-c", saves.replace('"default"', repr(name))]
        subprocess.run(program, cwd=CHECKOUT, stdin=given, check=True)
    line = SSHIdentity.load(name).public_key
    SSHIdentity.delete(name)
    assert line.split()[:2] == key.with_suffix(".pub").read_text().split()[:2]


def test_the_browser_behind_caddy_is_told_what_the_server_says_but_for_the_address(
    prefect_server: Server,
) -> None:
    """Prefect's server names its own address there, which only its host can reach."""
    (answer,) = re.findall(r"respond `(.*)`", (FOLDER / "Caddyfile").read_text())
    told = yaml.safe_load(answer)
    real = httpx.get(f"{prefect_server.ui_url}/ui-settings").json()
    assert told.pop("api_url") == "https://{$TORPOR_HOST}/api"
    assert urlsplit(real.pop("api_url")).path == "/api"
    assert told == real
