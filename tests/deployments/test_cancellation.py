"""A run that a person cancels in the UI: what a worker's process leaves, and what it must not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blocks import ObjectStore, Workspace
from blocks.reference import load_named
from deployments.first_machine import fill
from deployments.installation import Installation
from deployments.server import Server
from flows import create, hibernate, list_machines, list_snapshots, wake
from tasks.place import open_place
from tests.fixtures.fault_proxy import Fault, FaultProxy
from torpor.measure.scratch import machines_name
from torpor.providers.local import LocalProvider
from torpor.providers.local_place import place_of
from torpor.values import BENCHMARK, Machine, WorkspaceName

pytestmark = pytest.mark.timeout(600)

NAME = "cancelled"
MEASURED = machines_name(WorkspaceName(NAME))
WAIT_S = 120.0
SMALL = {"machines": [2], "rounds": 1, "content_mib": 8, "other_tools": False}
"""A benchmark that rents two machines and would not take long."""
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture
def slow_store(torpor_up: Server) -> Iterator[FaultProxy]:
    """The installation's store behind a proxy, in a workspace of its own."""
    usual = load_named(ObjectStore, "default", of="the test")
    proxy = FaultProxy(usual.endpoint_url)
    try:
        slow = usual.model_copy(update={"endpoint_url": proxy.endpoint_url})
        slow.save(NAME, overwrite=True)
        Workspace(name=NAME, store=NAME).save(NAME, overwrite=True)
        yield proxy
    finally:
        proxy.clear()
        proxy.close()


def test_a_cancelled_run_destroys_only_what_it_created(
    torpor_up: Server, installation: Installation, slow_store: FaultProxy, tmp_path: Path
) -> None:
    create(NAME)
    (machine,) = list_machines(NAME)
    home = _home(installation)
    fill(home / "workspace")

    _hold(slow_store, ("PUT", "/packs/"))
    _cancel_when(torpor_up, "hibernate", lambda: _asked(slow_store, "PUT", "/packs/"))
    slow_store.clear()
    assert list_snapshots(NAME) == []
    assert [m.id for m in list_machines(NAME)] == [machine.id]
    assert (home / "workspace" / "README.txt").exists()

    report = hibernate(NAME)  # the cancelled run holds nothing any more
    assert report.destroyed
    assert list_machines(NAME) == []

    _hold(slow_store, ("GET", "/packs/"))
    _cancel_when(torpor_up, "wake", lambda: _asked(slow_store, "GET", "/packs/"))
    slow_store.clear()
    _until(lambda: list_machines(NAME) == [], "the machine of the cancelled wake is destroyed")
    assert [stored.snapshot for stored in list_snapshots(NAME)] == [report.snapshot]

    _hold(slow_store, ("GET", "/packs/"), ("PUT", "/storage/"))
    fleet = _start(torpor_up, "replicate", count=2)
    measuring = _start(torpor_up, "benchmark", folder=str(tmp_path), **SMALL)
    _until(
        lambda: len(_rented(installation, NAME)) == 2 and _asked(slow_store, "GET", "/packs/"),
        "the replicate is in the middle",
    )
    _until(lambda: _asked(slow_store, "PUT", "/storage/"), "the benchmark is in the middle")
    assert len(_rented(installation, MEASURED)) == 2
    _cancel(torpor_up, fleet)
    _cancel(torpor_up, measuring)
    _see_cancelled(torpor_up, fleet)
    _see_cancelled(torpor_up, measuring)
    slow_store.clear()
    _until(lambda: _left(installation) == [], "both leave nothing")
    assert [stored.snapshot for stored in list_snapshots(NAME)] == [report.snapshot]

    wake(NAME)
    assert (_home(installation) / "workspace" / "README.txt").exists()


def _left(installation: Installation) -> list[str]:
    """Machines that are rented, leases of none, and what a benchmark stored."""
    place = open_place(NAME)
    machines = [*_rented(installation, NAME), *_rented(installation, MEASURED)]
    leases = place.ledger.unfinished(place.provider.identity)
    return [
        *(machine.id for machine in machines),
        *(lease.label.lease for lease in leases),
        *(found.key for found in place.store.list(f"workspaces/{BENCHMARK}")),
    ]


def _rented(installation: Installation, workspace: str) -> list[Machine]:
    return [
        machine
        for machine in LocalProvider(installation.machines).list_own()
        if machine.label is not None and machine.label.workspace == workspace
    ]


def _home(installation: Installation) -> Path:
    (machine,) = list_machines(NAME)
    assert machine.label is not None
    return place_of(installation.machines, machine.label).home


def _hold(proxy: FaultProxy, *kinds: tuple[str, str]) -> None:
    """Let no request of these verbs and places come to an end while the test looks."""
    proxy.clear()

    def held(method: str, asked: str) -> bool:
        return any(method == verb and path in asked for verb, path in kinds)

    proxy.add(Fault("timeout", held, count=1000))


def _asked(proxy: FaultProxy, verb: str, path: str) -> bool:
    return any(method == verb and path in asked for method, asked in proxy.requests)


def _cancel_when(server: Server, deployment: str, ready: Callable[[], bool]) -> None:
    """Start a deployment, cancel it once it is in the middle, see it end."""
    run = _start(server, deployment)
    _until(ready, f"the run of {deployment} is in the middle")
    _cancel(server, run)
    _see_cancelled(server, run)


def _start(server: Server, deployment: str, **parameters: Any) -> str:
    """A run of a deployment, asked for as the UI does; returns its id."""
    found = _post(server, f"deployments/name/{deployment}/{deployment}", None)
    run = _post(
        server,
        f"deployments/{found['id']}/create_flow_run",
        {"parameters": {"workspace": NAME, **parameters}, "state": {"type": "SCHEDULED"}},
    )
    return str(run["id"])


def _cancel(server: Server, run: str) -> None:
    answer = _post(
        server,
        f"flow_runs/{run}/set_state",
        {"state": {"type": "CANCELLING", "name": "Cancelling"}},
    )
    assert answer["status"] == "ACCEPT", answer


def _see_cancelled(server: Server, run: str) -> None:
    def state() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{server.api_url}/flow_runs/{run}").json()["state"]
        return found

    _until(lambda: state()["type"] in ENDED, f"the cancelled run {run} ends")
    assert state()["type"] == "CANCELLED", state()


def _post(server: Server, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    url = f"{server.api_url}/{path}"
    answer = httpx.get(url) if body is None else httpx.post(url, json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.2)
