"""Every market at once: the fakes, whose machines boot, and a workspace to rent for.

A further market is one more row of ``FAKES``. The tests that walk over all markets take it from
there: the campaign, the walk from market to market, and the search for keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
from prefect.blocks.core import Block
from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

import blocks
from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import KeyPair
from tests.fixtures.stores import Server
from tests.fixtures.waiting import PATIENCE_S
from tests.markets.azure import FakeAzure
from tests.markets.boot import BootedMachine, Machines
from tests.markets.ec2 import REGION, FakeEc2
from tests.markets.gcp import FakeGcp
from tests.markets.hostkey import FakeHostkey
from tests.markets.kubernetes import FakeKubernetes
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.runpod import FakeRunPod
from tests.markets.server import FakeMarket
from tests.markets.tensordock import FakeTensorDock
from tests.markets.vast import FakeVast
from tests.markets.verda import FakeVerda
from torpor.control.providers.provider import Provider
from torpor.control.remote.ssh import Identity
from torpor.shared.values import Want, WorkspaceName, WorkspaceSpec

DEMO: Final = WorkspaceName("demo")


FAKES: Final[dict[str, type[FakeMarket]]] = {
    "vast": FakeVast,
    "runpod": FakeRunPod,
    "lambda": FakeLambda,
    "ec2": FakeEc2,
    "gcp": FakeGcp,
    "kubernetes": FakeKubernetes,
    "tensordock": FakeTensorDock,
    "hostkey": FakeHostkey,
    "verda": FakeVerda,
    "azure": FakeAzure,
}
"""The name is also that of the provider's address, and of its block: ``NAME-provider``."""
NAMES: Final = tuple(FAKES)


def block_of(name: str) -> Any:
    kinds = {kind.get_block_type_slug(): kind for kind in blocks.PROVIDERS}
    return kinds[f"{name}-provider"]


def _keyed(name: str) -> Keyed:
    """Makes the block of a market from its API key, with what else the block needs."""
    fields = block_of(name).model_fields.items()
    needed = {n: n for n, field in fields if field.is_required() and n != "api_key"}
    return partial(block_of(name), **needed)


Keyed: TypeAlias = Callable[..., Any]
KEYED: Final[list[Keyed]] = [_keyed(n) for n in NAMES if "api_key" in block_of(n).model_fields]


def _blocks(fake: FakeMarket, name: str) -> list[Block]:
    """What a user saves under this name, in this order."""
    if isinstance(fake, FakeEc2):
        login = AwsCredentials(
            aws_access_key_id=fake.key,
            aws_secret_access_key=SecretStr(fake.secret),
            aws_client_parameters=AwsClientParameters(endpoint_url=fake.url),
        )
        named = f"aws-credentials/{name}"
        account = blocks.Ec2Provider(account=fake.account, credentials=named, region=REGION)
        return [login, account]
    if isinstance(fake, FakeAzure):
        return [blocks.AzureProvider(**fake.settings(), **fake.login())]
    kind = next(kind for kind, fakes in FAKES.items() if isinstance(fake, fakes))
    return [block_of(kind)(**fake.settings())]


def new_fakes() -> dict[str, FakeMarket]:
    """Each knows a key that no other text contains."""
    fakes = {name: kind() for name, kind in FAKES.items()}
    for fake in fakes.values():
        fake.key = f"AK{secrets.token_hex(9).upper()}"  # an AWS access key has 20 characters
    return fakes


@dataclass
class Markets:
    """Each market has its name in ``FAKES``."""

    fakes: dict[str, FakeMarket]
    machines: Machines

    def provider(self, name: str, timeout_s: float = PATIENCE_S) -> Provider:
        """The adapter, connected to the fake."""
        found: Provider = self.fakes[name].connect(timeout_s=timeout_s, ssh_port=self.machines.port)
        return found

    def blocks(self, name: str, saved: str) -> list[Block]:
        """What a user saves under the name ``saved``."""
        return _blocks(self.fakes[name], saved)

    def delete_blocks(self, names: Iterable[str], saved: str) -> None:
        """What a user saved, providers before the logins that they name: runs of other tests load
        every provider of the server."""
        kinds = [type(block) for name in names for block in self.blocks(name, saved)]
        for kind in reversed(list(dict.fromkeys(kinds))):
            kind.delete(saved, _sync=True)  # type: ignore[call-arg, unused-ignore]

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
def opened_markets(machines: Machines) -> Iterator[Markets]:
    """All of them, until the context ends; their machines boot."""
    fakes = new_fakes()
    for fake in fakes.values():
        fake.market.boot = partial(machines.boot, kind=fake.body)
    yield Markets(fakes, machines)
    for fake in fakes.values():
        fake.close()


@pytest.fixture
def markets(booted_machines: Machines) -> Iterator[Markets]:
    with opened_markets(booted_machines) as opened:
        yield opened


@pytest.fixture
def rented_workspace(seaweed: Server, identity_key: KeyPair) -> OpenWorkspace:
    """A workspace with a fresh store, and no provider yet."""
    return OpenWorkspace(
        spec=WorkspaceSpec(DEMO, ["~/workspace"], want=Want(gpu="H100", disk_gib=20), parts=4),
        store=seaweed.store(),
        providers=(),
        identity=Identity(identity_key.private),
        owner="tests",
        sealing=secrets.token_bytes(32),
    )
