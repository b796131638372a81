"""``make up`` and ``make down``, really run."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.down import down
from deployments.installation import Installation
from deployments.processes import running
from deployments.server import Server
from tests.fixtures.prefect_api import ask
from tests.fixtures.prefect_server import make

pytestmark = pytest.mark.timeout(1200)  # it starts everything, on a machine that others use too

ROLES = ("server", "worker", "register")


def test_up_brings_everything_that_a_first_click_needs(torpor_up: Server) -> None:
    deployments = {one["name"]: one for one in _all(torpor_up, "deployments/filter")}
    # By name: tests of other rooms deploy flows of their own to the session's server.
    for one in (deployments[name] for name in ("create", "hibernate", "wake")):
        assert one["work_pool_name"] == "torpor"
        assert one["description"]
        assert "torpor" in one["tags"]
    blocks = {
        f"{one['block_type']['slug']}/{one['name']}"
        for one in _all(torpor_up, "block_documents/filter")
    }
    assert {
        "object-store/default",
        "ssh-identity/default",
        "local-provider/default",
        "workspace/demo",
        "aws-credentials/embedded",
    } <= blocks
    workers = _all(torpor_up, "work_pools/torpor/workers/filter")
    assert [one["status"] for one in workers] == ["ONLINE"]


def test_up_again_changes_nothing(torpor_up: Server, installation: Installation) -> None:
    before = _longest_running(installation)
    endpoint = _document(torpor_up, "object-store", "default")["data"]["endpoint_url"]
    identity = _document(torpor_up, "ssh-identity", "default")
    machines = {path.name for path in installation.machines.iterdir()}
    url, schedule = _schedule(torpor_up, "backup")
    assert not schedule["active"]  # until the user says so
    assert schedule["parameters"] == {"workspace": "demo"}
    theirs = {"active": True, "schedule": {"cron": "0 5 29 2 *", "timezone": "Europe/Berlin"}}
    ask("PATCH", url, theirs)
    printed = make(installation, "up")
    url, again = _schedule(torpor_up, "backup")
    assert (again["active"], again["schedule"]["cron"]) == (True, "0 5 29 2 *")
    ask("PATCH", url, {"active": False})
    assert _longest_running(installation) == before
    assert _document(torpor_up, "object-store", "default")["data"]["endpoint_url"] == endpoint
    assert _document(torpor_up, "ssh-identity", "default") == identity
    assert {path.name for path in installation.machines.iterdir()} == machines
    assert torpor_up.ui_url in printed
    assert "hibernate" in printed


def _longest_running(installation: Installation) -> list[psutil.Process]:
    """The server and the worker themselves; flow runs of the worker's come and go."""
    roles = ("server", "worker")
    return [min(running(installation, role), key=lambda one: one.create_time()) for role in roles]


def test_everything_listens_on_loopback_only(torpor_up: Server, installation: Installation) -> None:
    ours = [process.pid for process in running(installation, *ROLES)]
    listening = [address for pid in ours for address in _listening(pid)]
    assert int(torpor_up.ui_url.rpartition(":")[2]) in {port for _, port in listening}
    assert {host for host, _ in listening} == {"127.0.0.1"}


def test_others_can_read_nothing_of_it(torpor_up: Server, installation: Installation) -> None:
    assert stat.S_IMODE(installation.folder.stat().st_mode) == 0o700
    secret = _secret(torpor_up)
    for path in [*installation.folder.glob("*.log"), installation.port_file]:
        assert secret not in path.read_text()
    for process in running(installation, *ROLES):
        for what in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{process.pid}/{what}").read_bytes()


def test_other_web_pages_may_not_ask_the_server(torpor_up: Server) -> None:
    """Prefect allows every origin by default, and its API hands out the blocks' secrets."""
    url = f"{torpor_up.api_url}/block_documents/filter"
    ask = {"Access-Control-Request-Method": "POST"}
    allowed = httpx.options(url, headers={**ask, "Origin": torpor_up.ui_url})
    assert allowed.headers["access-control-allow-origin"] == torpor_up.ui_url
    refused = httpx.options(url, headers={**ask, "Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_down_ends_all_and_up_comes_back_with_the_same_blocks(
    torpor_up: Server, installation: Installation
) -> None:
    identity = _document(torpor_up, "ssh-identity", "default")
    own = [path.name for path in installation.machines.iterdir() if path.name.startswith("m-")]
    before = _everything(installation)
    printed = make(installation, "down", "--machines")
    assert "ended worker, store, Prefect server" in printed
    assert not _everything(installation) & before
    assert "was not up" in make(installation, "down")
    assert [p.name for p in installation.machines.iterdir() if p.name.startswith("m-")] == own
    printed = make(installation, "up", "--port", torpor_up.ui_url.rpartition(":")[2])
    assert _document(torpor_up, "ssh-identity", "default") == identity
    for name in own:  # files of a machine stay, and it is served again
        assert re.search(rf"machine {name}\S* had stopped and is served again", printed)


def test_a_taken_port_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from deployments import up

    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        patch.setenv("TORPOR_STATE", str(tmp_path / "state"))
        patch.delenv("PREFECT_API_URL", raising=False)
        assert up.main(["--port", port]) == 1
    assert f"port {port} on 127.0.0.1 is taken" in capfd.readouterr().err
    assert not running(Installation(tmp_path / "state"), *ROLES)


def test_the_users_own_server_is_used_and_never_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from deployments import up

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORPOR_STATE", str(tmp_path / "state"))
        patch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        assert up.main([]) == 1
        assert "no Prefect server answers there" in capfd.readouterr().err
        assert up.main(["--port", "4200"]) == 1
        assert "leave out the port" in capfd.readouterr().err
    assert not (tmp_path / "state" / "prefect").exists()


def test_a_second_make_up_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from deployments import up

    made = Installation(tmp_path / "state")
    with made.locked(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORPOR_STATE", str(made.folder))
        assert up.main([]) == 1
    assert "another `make up` or `make down` uses" in capfd.readouterr().err
    down(made)  # the lock died with its holder


def _all(server: Server, path: str) -> Any:
    return ask("POST", f"{server.api_url}/{path}", {})


def _schedule(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    """The URL and content of a deployment's only schedule."""
    deployment = ask("GET", f"{server.api_url}/deployments/name/{name}/{name}")
    (schedule,) = deployment["schedules"]
    return f"{server.api_url}/deployments/{deployment['id']}/schedules/{schedule['id']}", schedule


def _document(server: Server, slug: str, name: str) -> dict[str, object]:
    url = f"{server.api_url}/block_types/slug/{slug}/block_documents/name/{name}"
    document = ask("GET", url)
    return {"id": document["id"], "data": document["data"]}


def _secret(server: Server) -> str:
    url = f"{server.api_url}/block_types/slug/aws-credentials/block_documents/name/embedded"
    data = ask("GET", url, query={"include_secrets": True})["data"]
    return str(data["aws_secret_access_key"])


def _listening(pid: int) -> set[tuple[str, int]]:
    """Host and port of every listening TCP socket of a process."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
        if match:
            inodes.add(match[1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                raw = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def _everything(installation: Installation) -> set[tuple[int, str]]:
    """Every process that says the installation's folder in arguments or environment, and its
    arguments. The tests' own store inherits this environment, and is not one of them."""
    folder = str(installation.folder).encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            argv = Path(f"/proc/{name}/cmdline").read_bytes()
            env = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if folder in argv + env and b"/pytest-of-" not in argv:
            found.add((int(name), argv.replace(b"\0", b" ").decode(errors="replace")))
    return found
