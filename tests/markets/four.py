"""The four markets at once: their fakes, whose machines boot, and a workspace to rent for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import boto3
import httpx
import pytest

from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import KeyPair
from tests.fixtures.stores import Server
from tests.markets.boot import BootedMachine, Kind, Machines
from tests.markets.ec2 import REGION, FakeEc2, ec2_wares
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.market import Market
from tests.markets.runpod import FakeRunPod
from tests.markets.server import FakeMarket
from tests.markets.shop import lambda_wares, runpod_wares, vast_wares
from tests.markets.vast import FakeVast
from torpor.control.providers.ec2 import Ec2Provider
from torpor.control.providers.lambda_cloud import LambdaProvider
from torpor.control.providers.runpod import RunpodProvider
from torpor.control.providers.seam import Provider
from torpor.control.providers.vast import VastProvider
from torpor.control.remote.ssh import Identity
from torpor.shared.values import Want, WorkspaceName, WorkspaceSpec

DEMO: Final = WorkspaceName("demo")
NAMES: Final = ("vast", "runpod", "lambda", "ec2")
BODIES: Final[dict[str, Kind]] = {
    "vast": "container", "runpod": "container", "lambda": "vm", "ec2": "vm"
}  # fmt: skip


def new_fakes() -> dict[str, FakeMarket]:
    """Each knows a key that no other text contains."""
    fakes: dict[str, FakeMarket] = {
        "vast": FakeVast(Market(wares=vast_wares())),
        "runpod": FakeRunPod(Market(wares=runpod_wares())),
        "lambda": FakeLambda(Market(wares=lambda_wares())),
        "ec2": FakeEc2(Market(wares=ec2_wares())),
    }
    for fake in fakes.values():
        fake.key = f"AK{secrets.token_hex(9).upper()}"  # an AWS access key has 20 characters
    return fakes


@dataclass
class FourMarkets:
    """Each market has the name of its fake. ``aws_secret`` is the other half of EC2's login."""

    fakes: dict[str, FakeMarket]
    machines: Machines
    aws_secret: str = field(default_factory=lambda: secrets.token_hex(20))

    def provider(self, name: str, timeout_s: float = 30.0) -> Provider:
        """The adapter, connected to the fake. It repeats what failed without a pause."""
        fake, port = self.fakes[name], self.machines.port
        timeout = httpx.Timeout(timeout_s)

        def sleep(seconds: float) -> None:
            pass

        if isinstance(fake, FakeEc2):
            session = boto3.Session(fake.key, self.aws_secret)
            return Ec2Provider(
                session,
                fake.account,
                REGION,
                url=fake.url,
                ssh_port=port,
                timeout_s=timeout_s,
                sleep=sleep,
            )
        if isinstance(fake, FakeLambda):
            return LambdaProvider(
                fake.key, url=fake.url, ssh_port=port, timeout=timeout, sleep=sleep
            )
        if isinstance(fake, FakeRunPod):
            return RunpodProvider(fake.key, url=fake.url, timeout=timeout, sleep=sleep)
        return VastProvider(fake.key, url=fake.url, timeout=timeout, sleep=sleep)

    def alive(self) -> list[str]:
        """The markets of the machines that cost money now."""
        return [name for name, fake in self.fakes.items() for _ in fake.market.alive()]

    def body(self, name: str) -> BootedMachine:
        """What the market's only machine runs on."""
        (machine,) = self.fakes[name].market.alive()
        assert isinstance(machine.body, BootedMachine)
        return machine.body

    def workspace(self, name: str) -> Path:
        """The workspace's folder on the market's only machine."""
        return self.body(name).root / "root/workspace"


@contextmanager
def opened_four(machines: Machines) -> Iterator[FourMarkets]:
    """The four, until the context ends; their machines boot."""
    fakes = new_fakes()
    for name, fake in fakes.items():
        kind = BODIES[name]
        fake.market.boot = lambda command, kind=kind: machines.boot(command, kind)
    yield FourMarkets(fakes, machines)
    for fake in fakes.values():
        fake.close()


@pytest.fixture
def four_markets(booted_machines: Machines) -> Iterator[FourMarkets]:
    with opened_four(booted_machines) as four:
        yield four


@pytest.fixture
def rented_workspace(seaweed: Server, identity_key: KeyPair) -> OpenWorkspace:
    """A workspace with a fresh store, and no provider yet."""
    return OpenWorkspace(
        spec=WorkspaceSpec(DEMO, ["~/workspace"], want=Want(gpu="H100", disk_gib=20), parts=4),
        store=seaweed.store(),
        providers=(),
        identity=Identity(identity_key.private),
        owner="tests",
        key=secrets.token_bytes(32),
    )
