"""A run that a person cancels in the UI: what a worker's process leaves, and what it must not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from tests.fixtures.fault_proxy import Fault, FaultProxy
from torpor.providers.local_place import place_of

NAME = "cancelled"
WAIT_S = 60.0
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture
def slow_store(torpor_up: Server) -> Iterator[FaultProxy]:
    """The installation's store behind a proxy, in a workspace whose machine has been filled."""
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
    torpor_up: Server, installation: Installation, slow_store: FaultProxy
) -> None:
    create(NAME)
    (machine,) = list_machines(NAME)
    home = _home(installation)
    fill(home / "workspace")

    _hold(slow_store, "PUT", "/packs/")
    _cancel_when(torpor_up, "hibernate", lambda: _asked(slow_store, "PUT", "/packs/"))
    slow_store.clear()
    assert list_snapshots(NAME) == []
    assert [m.id for m in list_machines(NAME)] == [machine.id]
    assert (home / "workspace" / "README.txt").exists()

    report = hibernate(NAME)  # the cancelled run holds nothing any more
    assert report.destroyed
    assert list_machines(NAME) == []

    _hold(slow_store, "GET", "/packs/")
    _cancel_when(torpor_up, "wake", lambda: _asked(slow_store, "GET", "/packs/"))
    slow_store.clear()
    _until(lambda: list_machines(NAME) == [], "the machine of the cancelled wake is destroyed")
    assert [stored.snapshot for stored in list_snapshots(NAME)] == [report.snapshot]

    wake(NAME)
    assert (_home(installation) / "workspace" / "README.txt").exists()


def _home(installation: Installation) -> Path:
    (machine,) = list_machines(NAME)
    assert machine.label is not None
    return place_of(installation.machines, machine.label).home


def _hold(proxy: FaultProxy, verb: str, path: str) -> None:
    """Let no request of this kind come to an end while the test looks."""
    proxy.clear()
    held = Fault("timeout", when=lambda method, asked: method == verb and path in asked)
    proxy.add(replace(held, count=1000))


def _asked(proxy: FaultProxy, verb: str, path: str) -> bool:
    return any(method == verb and path in asked for method, asked in proxy.requests)


def _cancel_when(server: Server, deployment: str, ready: Callable[[], bool]) -> None:
    """Start a deployment as the UI does, cancel it once it is in the middle, see it end."""
    found = _post(server, f"deployments/name/{deployment}/{deployment}", None)
    run = _post(
        server,
        f"deployments/{found['id']}/create_flow_run",
        {"parameters": {"workspace": NAME}, "state": {"type": "SCHEDULED"}},
    )
    _until(ready, f"the run of {deployment} is in the middle")
    answer = _post(
        server,
        f"flow_runs/{run['id']}/set_state",
        {"state": {"type": "CANCELLING", "name": "Cancelling"}},
    )
    assert answer["status"] == "ACCEPT", answer

    def ended() -> bool:
        state = httpx.get(f"{server.api_url}/flow_runs/{run['id']}").json()["state_type"]
        return state in ENDED

    _until(ended, f"the cancelled run of {deployment} ends")
    state = httpx.get(f"{server.api_url}/flow_runs/{run['id']}").json()["state"]
    assert state["type"] == "CANCELLED", state


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
