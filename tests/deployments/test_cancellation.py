"""A run that a person cancels in the UI: what a worker's process leaves, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks import ObjectStore, Workspace
from blocks.reference import load_named
from deployments.first_machine import fill
from deployments.installation import Installation
from flows import create, hibernate, list_machines, list_snapshots, wake
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace
from tests.fixtures.deployed import Deployed, machines_of, place_of
from tests.fixtures.fault_proxy import Fault, FaultProxy
from tests.fixtures.waiting import until
from torpor.control.measure.scratch import machines_name
from torpor.shared.values import BENCHMARK, WorkspaceName

NAME = "cancelled"
MEASURED = machines_name(WorkspaceName(NAME))
SMALL = {"rounds": 1}
"""A benchmark that would not take long."""


@pytest.fixture
def slow_store(deployed: Deployed) -> Iterator[FaultProxy]:
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
    deployed: Deployed, installation: Installation, slow_store: FaultProxy, tmp_path: Path
) -> None:
    create(NAME)
    (machine,) = list_machines(NAME)
    place = place_of(installation, NAME)
    fill(place)

    _cancel_at(deployed, slow_store, "hibernate", "PUT")
    assert list_snapshots(NAME) == []
    assert [m.id for m in list_machines(NAME)] == [machine.id]
    assert (place / "README.txt").exists()

    report = hibernate(NAME)  # the cancelled run holds nothing any more
    assert report.destroyed
    assert list_machines(NAME) == []

    _cancel_at(deployed, slow_store, "wake", "GET")
    until(
        lambda: list_machines(NAME) == [],
        "the machine of the cancelled wake is destroyed",
        every_s=1.0,
    )
    assert [stored.snapshot for stored in list_snapshots(NAME)] == [report.snapshot]

    _hold(slow_store, ("GET", "/packs/"), ("PUT", "/storage/"))
    fleet = deployed.start("replicate", {"workspace": NAME, "count": 2})
    measuring = deployed.start("benchmark", {"workspace": NAME, "folder": str(tmp_path), **SMALL})
    until(
        lambda: len(machines_of(installation, NAME)) == 2 and _asked(slow_store, "GET", "/packs/"),
        "the replicate is in the middle",
        every_s=0.2,
    )
    until(
        lambda: _asked(slow_store, "PUT", "/storage/"),
        "the benchmark is in the middle",
        every_s=0.2,
    )
    assert len(machines_of(installation, MEASURED)) == 1
    deployed.cancel(fleet)
    deployed.cancel(measuring)
    _see_cancelled(deployed, fleet)
    _see_cancelled(deployed, measuring)
    slow_store.clear()
    opened = open_workspace(NAME)
    until(lambda: _left(installation, opened) == [], "both leave nothing", every_s=0.2)
    assert [stored.snapshot for stored in list_snapshots(NAME)] == [report.snapshot]

    wake(NAME)
    assert (place_of(installation, NAME) / "README.txt").exists()


def _left(installation: Installation, opened: OpenWorkspace) -> list[str]:
    """Machines that are rented, rentals of none, and what a benchmark stored."""
    machines = [*machines_of(installation, NAME), *machines_of(installation, MEASURED)]
    rentals = [rental for rental in opened.rentals.open() if rental.state != "handed over"]
    return [
        *(machine.id for machine in machines),
        *(rental.label.rental for rental in rentals),
        *(
            found.key
            for found in opened.store.list(f"workspaces/{BENCHMARK}")
            if "/rentals/ended/" not in found.key
        ),
    ]


def _hold(proxy: FaultProxy, *kinds: tuple[str, str]) -> None:
    """Let no request of these verbs and places come to an end while the test looks."""
    proxy.clear()

    def held(method: str, asked: str) -> bool:
        return any(method == verb and path in asked for verb, path in kinds)

    proxy.add(Fault("timeout", held, count=1000))


def _asked(proxy: FaultProxy, verb: str, path: str) -> bool:
    return any(method == verb and path in asked for method, asked in proxy.requests)


def _cancel_at(deployed: Deployed, proxy: FaultProxy, deployment: str, verb: str) -> None:
    """Start a deployment, cancel it once it is at the packs, see it end."""
    _hold(proxy, (verb, "/packs/"))
    run = deployed.start(deployment, {"workspace": NAME})
    until(lambda: _asked(proxy, verb, "/packs/"), f"{deployment} is in the middle", every_s=0.2)
    deployed.cancel(run)
    _see_cancelled(deployed, run)
    proxy.clear()


def _see_cancelled(deployed: Deployed, run: str) -> None:
    ended = deployed.end(run)
    assert ended["state_type"] == "CANCELLED", ended["state"]
