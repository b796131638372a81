"""``make up``, really run; ``make down`` in tests/ui/test_first_click.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
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
from torpor.shared.errors import TorporError

pytestmark = pytest.mark.together("automations and make up")

ROLES = ("supervisor", "server", *worker.ROLES, "register")


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


def test_up_again_changes_nothing(torpor_up: Server, installation: Installation) -> None:
    before = _longest_running(installation)
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
    assert _longest_running(installation) == before
    assert _document(torpor_up, "object-store", "default")["data"]["endpoint_url"] == endpoint
    assert _document(torpor_up, "ssh-identity", "default") == identity
    assert machines_of(installation, "demo") == machines
    assert torpor_up.ui_url in printed
    assert "hibernate" in printed


def _longest_running(installation: Installation) -> list[psutil.Process]:
    """The server and the workers themselves; flow runs of the worker's come and go."""
    roles = ("server", *worker.ROLES)
    return [min(running(installation, role), key=lambda p: p.create_time()) for role in roles]


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
        f"(process {os.getpid()}): end it, or choose another port, such as `make up PORT=" in said
    )
    assert not running(Installation(tmp_path / "state"), *ROLES)


@pytest.mark.usefixtures("needs_server")
def test_a_port_that_is_taken_while_the_server_starts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "is_free", lambda _: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _up(tmp_path, port) == 1
    assert f"port {port} on 127.0.0.1 is taken by " in capfd.readouterr().err


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
    assert "another `make up` or `make down` uses" in capfd.readouterr().err
    down(made)  # the lock died with its holder


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


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An installation whose server and supervisor run, as far as `make up` can see; what it ends
    and starts is written down."""
    from deployments import up

    made = Installation(tmp_path / "state")
    made.login()
    made.port_file.write_text("4321\n")
    done: list[str] = []
    alive = {"supervisor", "server"}
    old = {"PREFECT_API_URL": "http://127.0.0.1:4321/api"}
    seen: dict[str, Any] = {"installation": made, "done": done, "alive": alive}

    def running(_: Installation, role: str, **__: Any) -> list[Any]:
        return [SimpleNamespace(environ=lambda: old)] if role in alive else []

    def act(what: str, *, then: bool, role: str) -> Callable[..., bool]:
        def note(*_: Any, **__: Any) -> bool:
            done.append(what)
            (alive.add if then else alive.discard)(role)
            return True

        return note

    def end(_: Installation, role: str, **__: Any) -> int:
        return int(act(f"end {role}", then=False, role=role)())

    monkeypatch.setenv("TORPOR_STATE", str(made.folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(up, "running", running)
    monkeypatch.setattr(server, "running", running)
    monkeypatch.setattr(server, "end", end)
    monkeypatch.setattr(up.supervisor, "end", end)
    start = act("start supervisor", then=True, role="supervisor")
    monkeypatch.setattr(up.supervisor, "start", start)
    monkeypatch.setattr(up.worker, "kill_others", lambda *_: None)
    yield seen


def test_up_to_a_port_that_is_taken_ends_nothing(
    ran: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from deployments import up

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert up.main(["--port", str(taken.getsockname()[1])]) == 1
    assert "is taken by" in capfd.readouterr().err
    assert (ran["done"], ran["alive"]) == ([], {"supervisor", "server"})
    assert ran["installation"].port_file.read_text() == "4321\n"


def test_up_to_a_server_of_the_users_own_that_does_not_answer_ends_nothing(
    ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import up

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert up.main([]) == 1
    assert ran["done"] == []


@pytest.mark.parametrize("port", [[], ["--port"]], ids=["the same port", "another port"])
def test_what_ran_before_runs_again_after_an_up_that_fails(
    ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch, port: list[str]
) -> None:
    from deployments import up

    def fails(installation: Installation, used: Server) -> None:
        installation.port_file.write_text(used.ui_url.rpartition(":")[2])
        raise TorporError("the server has ended")

    monkeypatch.setattr(server, "start", fails)
    assert up.main([*port, *(str(free_ports(1)[0]) for _ in port)]) == 1
    assert ran["installation"].port_file.read_text().strip() == "4321"
    assert ran["done"][-1] == "start supervisor"
    assert ("end server" in ran["done"]) == bool(port)  # of the other port; it is started again


def test_a_server_that_is_halted_for_a_while_is_not_ended(
    ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, False, True]
    monkeypatch.setattr(server, "answers", lambda _: answers.pop(0))
    monkeypatch.setattr(server.time, "sleep", lambda _: None)
    used = server.server_of(ran["installation"])
    assert not server.start(ran["installation"], used)
    assert (ran["done"], answers) == ([], [])
