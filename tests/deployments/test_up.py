"""``make up``, really run; ``make down`` in tests/ui/test_first_click.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments import server, worker
from deployments.down import down
from deployments.installation import Installation
from deployments.processes import running
from deployments.server import Server
from tests.fixtures.deployed import machines_of
from tests.fixtures.prefect_api import ask
from tests.fixtures.prefect_server import make
from torpor.control import disk_space
from torpor.control.ports import free_ports
from torpor.control.supervision import LOCK, STORE, Supervision, children_of, living
from torpor.shared.errors import InvalidInput, TorporError

pytestmark = pytest.mark.together("automations and make up")

ROLES = (LOCK, STORE, "server", *worker.ROLES, "register")
OLD = "http://127.0.0.1:4321/api"


def test_up_brings_everything_that_a_first_click_needs(
    torpor_up: Server, installation: Installation
) -> None:
    deployments = {found["name"]: found for found in _all(torpor_up, "deployments/filter")}
    # By name: tests of other rooms deploy flows of their own to the session's server.
    for deployment in (deployments[name] for name in ("create", "hibernate", "wake")):
        assert deployment["work_pool_name"] == "torpor"
        assert deployment["description"]
        assert "torpor" in deployment["tags"]
    blocks = {
        f"{block['block_type']['slug']}/{block['name']}"
        for block in _all(torpor_up, "block_documents/filter")
    }
    assert {
        "object-store/default",
        "ssh-identity/default",
        "local-provider/default",
        "workspace/demo",
        "stack/llama-cpp",
        "stack/ollama",
        "stack/pytorch",
        "stack/vllm",
        "aws-credentials/embedded",
    } <= blocks
    store = _document(torpor_up, "object-store", "default", secrets=True)["data"]
    assert isinstance(store, dict)
    assert store["encryption_key"] == installation.store_key_file.read_text().strip()
    for pool in worker.POOLS:
        workers = _all(torpor_up, f"work_pools/{pool.name}/workers/filter")
        assert [found["status"] for found in workers] == ["ONLINE"]
    found = _all(torpor_up, "work_pools/torpor-jobs/queues/filter")
    queues = {queue["name"]: queue for queue in found}
    ranked = sorted(queues, key=lambda name: queues[name]["priority"])
    assert ranked == ["critical", "high", "normal", "low", "default"]


@pytest.mark.rule(20)
def test_up_again_changes_nothing(torpor_up: Server, installation: Installation) -> None:
    before = _parent(installation), children_of(installation.folder)
    endpoint = _document(torpor_up, "object-store", "default")["data"]["endpoint_url"]
    identity = _document(torpor_up, "ssh-identity", "default")
    machines = machines_of(installation, "demo")
    url, schedule = _schedule(torpor_up, "backup/backup-all")
    assert not schedule["active"]  # until the user says so
    _, watching = _schedule(torpor_up, "watch/watch")
    assert not watching["active"]
    # Switching a schedule on empties its parameters, so its runs have those of the deployment.
    assert schedule["parameters"] == watching["parameters"] == {}
    watch = _deployment(torpor_up, "watch/watch")
    assert watch["job_variables"] == {"command": worker.WATCH_COMMAND}
    assert _deployment(torpor_up, "hibernate/hibernate")["job_variables"] == {}
    assert watch["parameters"] == {"dry_run": False, "metrics": str(installation.metrics)}
    backup = _deployment(torpor_up, "backup/backup-all")
    changed = {**backup["parameters"], "keep_daily": 30}
    mine = f"{torpor_up.api_url}/deployments/{backup['id']}"
    ask("PATCH", mine, {"parameters": changed, "paused": True, "concurrency_limit": 1})
    kept = _deployment(torpor_up, "backup/backup-all")
    theirs = {"active": True, "schedule": {"cron": "0 5 29 2 *", "timezone": "Europe/Berlin"}}
    ask("PATCH", url, theirs)
    printed = make(installation, "up")
    url, again = _schedule(torpor_up, "backup/backup-all")
    assert (again["active"], again["schedule"]["cron"]) == (True, "0 5 29 2 *")
    after = _deployment(torpor_up, "backup/backup-all")
    assert after["parameters"] == changed and after["paused"]
    differ = {field for field in after if after[field] != kept[field]}
    # The schedule was changed after that; the worker has polled.
    assert differ <= {"updated", "version", "schedules", "last_polled", "status"}
    ask("PATCH", mine, {"paused": False, "concurrency_limit": 8})
    ask("PATCH", url, {"active": False})
    assert (_parent(installation), children_of(installation.folder)) == before
    assert {"store", "server", *worker.ROLES} == before[1].keys()
    assert _document(torpor_up, "object-store", "default")["data"]["endpoint_url"] == endpoint
    assert _document(torpor_up, "ssh-identity", "default") == identity
    assert machines_of(installation, "demo") == machines
    assert torpor_up.ui_url in printed
    assert "hibernate" in printed


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")],  # noqa: S104
)
def test_a_taken_port_is_named(
    family: socket.AddressFamily,
    address: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.socket(family) as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _up(tmp_path, port) == 1
    said = capfd.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken by " in said
    assert (
        f"(process {os.getpid()}): end it, or choose another port, such as `torpor up --port "
        in said
    )
    assert not running(Installation(tmp_path / "state"), *ROLES)


def test_a_port_that_is_taken_while_the_server_starts_is_named() -> None:
    """What uvicorn prints; it may live on for minutes after that."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        used = Server(f"http://127.0.0.1:{port}/api", own=True)
        with pytest.raises(InvalidInput, match=f"port {port} on 127.0.0.1 is taken by "):
            server.serves(used, b"[Errno 98] address already in use")


@pytest.mark.usefixtures("needs_server")
def test_a_server_that_does_not_start_ends_its_supervisor_which_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "check", lambda *_, **__: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _up(tmp_path, port) == 1
    assert f"port {port} on 127.0.0.1 is taken by " in capfd.readouterr().err
    assert not running(Installation(tmp_path / "state"), *ROLES)


def test_without_a_port_another_one_is_chosen_where_the_usual_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(server, "USUAL_PORT", taken.getsockname()[1])
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        chosen = server.server_of(Installation(tmp_path / "state"))
    assert int(chosen.ui_url.rpartition(":")[2]) != server.USUAL_PORT


@pytest.mark.rule(20)
def test_a_full_disk_is_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk_space, "LEAST_FREE_BYTES", 1 << 60)
    assert _up(tmp_path, free_ports(1)[0]) == 1
    said = capfd.readouterr().err
    assert f"disk full: {tmp_path}" in said
    assert "bytes free" in said
    assert not running(Installation(tmp_path / "state"), *ROLES)


def _up(folder: Path, port: int) -> int:
    from deployments import up

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORPOR_STATE", str(folder / "state"))
        patch.delenv("PREFECT_API_URL", raising=False)
        return up.main(["--port", str(port)])


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
    assert "another `torpor up` or `torpor down` uses" in capfd.readouterr().err
    down(made)  # the lock died with its holder


def _parent(installation: Installation) -> int:
    there = living(installation.folder)
    assert there
    return there.pid


def _all(server: Server, path: str) -> Any:
    return ask("POST", f"{server.api_url}/{path}", {})


def _schedule(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    """The URL and content of a deployment's only schedule."""
    deployment = _deployment(server, name)
    (schedule,) = deployment["schedules"]
    return f"{server.api_url}/deployments/{deployment['id']}/schedules/{schedule['id']}", schedule


def _deployment(server: Server, name: str) -> Any:
    return ask("GET", f"{server.api_url}/deployments/name/{name}")


def _document(server: Server, slug: str, name: str, *, secrets: bool = False) -> dict[str, object]:
    url = f"{server.api_url}/block_types/slug/{slug}/block_documents/name/{name}"
    document = ask("GET", url, query={"include_secrets": secrets})
    return {"id": document["id"], "data": document["data"]}


@pytest.mark.rule(20)
@pytest.mark.usefixtures("needs_server")
def test_registering_ends_with_the_supervisor_and_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd starts no other one while the `up` beside the first goes on."""
    from deployments import up

    made = Installation(tmp_path)
    monkeypatch.setattr(up, "LOOK_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        used = Server(f"http://127.0.0.1:{silent.getsockname()[1]}/api", own=True, login="a:b")
        with pytest.raises(TorporError, match="the supervisor has ended"):
            up.register(made, used)
    assert not running(made, "register")


class Began:
    """A supervisor that `make up` has started, as far as it looks at one."""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An installation that is up at OLD, as far as `make up` can see. What it starts and ends is
    written down; `register` fails."""
    from deployments import up

    made = Installation(tmp_path / "state")
    made.login()
    made.port_file.write_text("4321\n")
    done: list[str] = []

    def start(_: Installation, used: Server) -> Began:
        done.append(f"start {used.api_url}")
        return Began()

    def fails(*_: object) -> str:
        raise TorporError("a team has a deployment of that name")

    monkeypatch.setenv("TORPOR_STATE", str(made.folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(up.parent, "start", start)
    monkeypatch.setattr(up.parent, "stop", lambda began: done.append(type(began).__name__))
    monkeypatch.setattr(up, "register", fails)
    with made.locked(LOCK):
        Supervision(os.getpid(), OLD, own=True).write(made.folder)
        yield {"installation": made, "done": done}


@pytest.mark.rule(20)
@pytest.mark.parametrize("how", ["another port", "the user's own server"])
def test_up_ends_nothing_and_says_what_to_do_where_another_server_is_wanted(
    ran: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from deployments import up

    port = ["--port", str(free_ports(1)[0])] if how == "another port" else []
    if not port:
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert up.main(port) == 1
    said = capfd.readouterr().err
    assert "torpor is up at http://127.0.0.1:4321: run `torpor down` first" in said
    assert ran["done"] == []
    assert ran["installation"].port_file.read_text() == "4321\n"


def test_up_shows_at_a_terminal_what_it_waits_for(
    ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import up

    @contextmanager
    def waiting(words: str) -> Iterator[None]:
        ran["done"].append(words)
        yield
        ran["done"].append("over")

    monkeypatch.setattr(up, "Waiting", waiting)
    (ran["installation"].folder / "supervision.json").unlink()  # none runs
    port = free_ports(1)[0]
    assert up.main(["--port", str(port)]) == 1
    assert ran["done"][:4] == [
        "starting the Prefect server",
        f"start http://127.0.0.1:{port}/api",
        "over",
        "registering blocks, store and flows",
    ]


@pytest.mark.rule(20)
@pytest.mark.parametrize("registered", [False, True], ids=["first", "after a crash"])
def test_an_up_that_cannot_register_ends_the_supervisor_that_nobody_had_before(
    ran: dict[str, Any], registered: bool
) -> None:
    """One that comes back after a crash stays: its workers look after machines."""
    from deployments import up

    made, port = ran["installation"], free_ports(1)[0]
    (made.folder / "supervision.json").unlink()  # none runs
    if registered:
        made.registered_file.write_text(f"http://127.0.0.1:{port}/api")
    assert up.main(["--port", str(port)]) == 1
    assert ran["done"][1:] == ([] if registered else ["Began"])
