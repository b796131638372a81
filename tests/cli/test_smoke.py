"""`torpor smoke` from end to end: a saved block, a machine that boots, and its watchdog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prefect_aws import MinIOCredentials
from pydantic import SecretStr

from blocks import ObjectStore, VastProvider
from deployments.installation import CHECKOUT
from deployments.server import Server
from deployments.smoke_sleep import ToldProvider
from tests.fixtures.market import H100
from tests.fixtures.stores import Server as Store
from tests.markets.boot import Machines
from tests.markets.every import new_fakes
from tests.markets.server import FakeMarket
from torpor.control.measure.scratch import scratch_name
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.providers.provider import Order
from torpor.shared.values import Label, workspace_name

BLOCK = "vast-provider/smoke"


@pytest.fixture
def vast(prefect_server: Server, booted_machines: Machines) -> Iterator[FakeMarket]:
    fake = new_fakes()["vast"]
    fake.market.boot = booted_machines.boot
    VastProvider(api_key=SecretStr(fake.key), url=fake.url).save("smoke", overwrite=True)
    with fake:
        yield fake
    VastProvider.delete("smoke", _sync=True)  # type: ignore[call-arg, unused-ignore]


def _smoke(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torpor_cli", "smoke", BLOCK, *options],
        env={**os.environ, FOLDER_VARIABLE: str(state)},
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_smoke_logs_in_ends_the_machine_and_keeps_a_recording_without_secrets(
    vast: FakeMarket, tmp_path: Path
) -> None:
    unanswered = _smoke(tmp_path)
    assert (unanswered.returncode, vast.market.rented) == (2, [])
    assert "add --yes" in unanswered.stderr
    dear = _smoke(tmp_path, "--yes", "--max-usd", "0.01")
    assert (dear.returncode, vast.market.rented) == (3, [])
    assert "--max-usd is 0.01 $: nothing was rented" in dear.stderr

    done = _smoke(tmp_path, "--yes", "--json")
    assert done.returncode == 1, done.stderr  # a GPU was paid for, and this host shows none
    report = json.loads(done.stdout)
    assert [check["what"] for check in report["checks"] if check["differs"]] == ["GPUs"]
    assert report["fault"] == ""
    assert report["inside"]["python"].startswith("Python 3.")
    assert "PATH" in report["inside"]["variables"]
    assert (len(vast.market.rented), vast.market.alive()) == (1, [])

    folder = max((tmp_path / "smoke").glob("vast-*"))
    exchanges = [json.loads(file.read_bytes()) for file in folder.glob("[0-9]*.json")]
    assert any(exchange["method"] == "DELETE" for exchange in exchanges)
    assert "nothing is left to end" in (folder / "watchdog.log").read_text()
    written = "".join(file.read_text() for file in folder.iterdir())
    key = (tmp_path / "smoke" / "ssh_key").read_text().split("\n")
    for secret in (vast.key, *key[1:-2], "BEGIN OPENSSH", "AAAAC3Nza", "me@example.com"):
        assert secret not in written
    seen = psutil.process_iter(["cmdline"])  # of a process that ends meanwhile it knows nothing
    running = [" ".join(process.info["cmdline"] or ()) for process in seen]
    assert not [line for line in running if "smoke_watchdog" in line and BLOCK in line]


def test_the_market_ends_by_itself_what_the_flows_of_a_full_smoke_rent() -> None:
    orders: list[Order] = []
    told: list[str] = []

    def create(order: Order) -> SimpleNamespace:
        assert told == ["asked"]
        orders.append(order)
        return SimpleNamespace(id="i-1")

    ec2: Any = SimpleNamespace(identity="ec2:1", create=create)
    label = Label("tests", scratch_name(workspace_name("smoke")), "0123456789abcdef")
    order = Order(offer=H100, label=label, public_key="", host_key="", jump_host_key="")
    ToldProvider(ec2, lambda rental: told.append(rental.state), 900.0).create(order)
    assert [order.lifetime_s for order in orders] == [900.0]
    assert told == ["asked", "standing"]


def test_full_smoke_hibernates_wakes_and_leaves_nothing_in_the_store(
    vast: FakeMarket, seaweed: Store, tmp_path: Path
) -> None:
    MinIOCredentials(
        minio_root_user=seaweed.access_key, minio_root_password=SecretStr(seaweed.secret_key)
    ).save("smoke", overwrite=True)
    ObjectStore(
        flavour="seaweedfs",
        bucket=seaweed.bucket(),
        endpoint_url=seaweed.endpoint_url,
        credentials="minio-credentials/smoke",
    ).save("smoke", overwrite=True)

    done = _smoke(tmp_path, "--yes", "--json", "--full", "--store", "smoke", "--max-usd", "5")
    report = json.loads(done.stdout)
    seen = {check["what"]: check["seen"] for check in report["checks"]}
    assert report["fault"] == "", done.stderr
    assert seen["files after the wake"].startswith("identical, ")
    assert [check["what"] for check in report["checks"] if check["differs"]] == ["GPUs"]
    assert (len(vast.market.rented), vast.market.alive()) == (3, [])
    store = ObjectStore.load("smoke").open()  # type: ignore[union-attr]
    assert [found.key for found in store.list("") if not found.key.startswith("rentals/")] == []
