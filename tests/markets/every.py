"""Every market at once: the fakes, whose machines boot, and a workspace to rent for.

A further market is one more row of ``ROWS``. The tests that walk over all markets take it from
there: the campaign, the walk from market to market, and the search for keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import boto3
import google.oauth2.credentials
import httpx
import pytest
from prefect.blocks.core import Block
from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

import blocks
from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import KeyPair
from tests.fixtures.stores import Server
from tests.markets.boot import BootedMachine, Kind, Machines
from tests.markets.ec2 import REGION, FakeEc2, ec2_wares
from tests.markets.gcp import (
    DISK_USD_GIB_MONTH,
    PROJECT,
    ZONES,
    FakeGcp,
    gcp_prices,
    gcp_wares,
)
from tests.markets.hostkey import FakeHostkey, hostkey_wares
from tests.markets.kubernetes import NAMESPACE, FakeKubernetes, kubeconfig, kubernetes_wares
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.market import Market
from tests.markets.runpod import FakeRunPod
from tests.markets.server import FakeMarket
from tests.markets.shop import lambda_wares, runpod_wares, vast_wares
from tests.markets.tensordock import FakeTensorDock, tensordock_wares
from tests.markets.vast import FIRST_INSTANCE, FakeVast
from torpor.control.providers.ec2.provider import Ec2Provider
from torpor.control.providers.gcp.client import GoogleLogin
from torpor.control.providers.gcp.provider import GcpProvider
from torpor.control.providers.hostkey.provider import HostkeyProvider
from torpor.control.providers.kubernetes.objects import Machines as ClusterMachines
from torpor.control.providers.kubernetes.provider import KubernetesProvider
from torpor.control.providers.lambda_cloud import LambdaProvider
from torpor.control.providers.runpod import RunpodProvider
from torpor.control.providers.seam import Provider
from torpor.control.providers.tensordock import TensorDockProvider
from torpor.control.providers.vast import VastProvider
from torpor.control.remote.ssh import Identity
from torpor.shared.values import Want, WorkspaceName, WorkspaceSpec

DEMO: Final = WorkspaceName("demo")


class Options(NamedTuple):
    """How an adapter asks its fake."""

    ssh_port: int  # of the fake's machines, where the market always has 22
    timeout_s: float
    sleep: Callable[[float], None] = lambda seconds: None
    """Called instead of a pause before what failed is repeated."""

    @property
    def timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s)


@dataclass(frozen=True)
class Row:
    """One market."""

    fake: Callable[[], FakeMarket]
    body: Kind
    connect: Callable[..., Provider]
    """Of a fake and Options; some adapters take more by name."""
    blocks: Callable[[Any, str], list[Block]]
    """What a user saves under this name, in this order."""
    by_hand: Callable[[int], str] | None = lambda number: f"{900_000 + number:032x}"
    """The id of a machine that is not ours. None: machines begin and end by requests only."""


def _vast(fake: FakeVast, options: Options) -> Provider:
    return VastProvider(fake.key, url=fake.url, timeout=options.timeout, sleep=options.sleep)


def _runpod(fake: FakeRunPod, options: Options) -> Provider:
    return RunpodProvider(fake.key, url=fake.url, timeout=options.timeout, sleep=options.sleep)


def _lambda(fake: FakeLambda, options: Options) -> Provider:
    return LambdaProvider(
        fake.key,
        url=fake.url,
        ssh_port=options.ssh_port,
        timeout=options.timeout,
        sleep=options.sleep,
    )


def _tensordock(fake: FakeTensorDock, options: Options) -> Provider:
    return TensorDockProvider(
        fake.key,
        url=fake.url,
        ssh_port=options.ssh_port,
        timeout=options.timeout,
        sleep=options.sleep,
    )


def _hostkey(fake: FakeHostkey, options: Options) -> Provider:
    return HostkeyProvider(
        fake.key,
        url=fake.url,
        ssh_port=options.ssh_port,
        timeout=options.timeout,
        sleep=options.sleep,
    )


def _ec2(fake: FakeEc2, options: Options, **more: Any) -> Provider:
    return Ec2Provider(
        boto3.Session(fake.key, fake.secret),
        fake.account,
        REGION,
        url=fake.url,
        ssh_port=options.ssh_port,
        timeout_s=max(options.timeout_s, 1.0),  # moto takes its time
        sleep=options.sleep,
        **more,
    )


def _kubernetes(fake: FakeKubernetes, options: Options, **more: Any) -> Provider:
    (ware,) = kubernetes_wares()
    return KubernetesProvider(
        kubeconfig(fake.url, fake.key),
        NAMESPACE,
        ClusterMachines(price_usd_h=ware.usd_h, gpu=ware.gpu, **more),
        ssh_port=options.ssh_port,
        timeout=options.timeout,
        sleep=options.sleep,
    )


def _kubernetes_blocks(fake: FakeKubernetes, name: str) -> list[Block]:
    (ware,) = kubernetes_wares()
    return [
        blocks.KubernetesProvider(
            kubeconfig=SecretStr(kubeconfig(fake.url, fake.key)),
            namespace=NAMESPACE,
            gpu=ware.gpu,
            price_usd_h=ware.usd_h,
        )
    ]


def _keyed(kind: Callable[..., Block]) -> Callable[[FakeMarket, str], list[Block]]:
    """The block of a market that knows an account by one key."""
    return lambda fake, name: [kind(api_key=SecretStr(fake.key), url=fake.url)]


def _ec2_blocks(fake: FakeEc2, name: str) -> list[Block]:
    login = AwsCredentials(
        aws_access_key_id=fake.key,
        aws_secret_access_key=SecretStr(fake.secret),
        aws_client_parameters=AwsClientParameters(endpoint_url=fake.url),
    )
    account = blocks.Ec2Provider(
        account=fake.account, credentials=f"aws-credentials/{name}", region=REGION
    )
    return [login, account]


def _gcp(fake: FakeGcp, options: Options, **more: Any) -> Provider:
    return GcpProvider(
        GoogleLogin(google.oauth2.credentials.Credentials(fake.key)),
        more.pop("project", PROJECT),
        more.pop("zones", ZONES),
        more.pop("prices", gcp_prices(fake.market.wares)),
        DISK_USD_GIB_MONTH,
        url=fake.url,
        ssh_port=options.ssh_port,
        timeout=options.timeout,
        sleep=options.sleep,
        **more,
    )


def _gcp_blocks(fake: FakeGcp, name: str) -> list[Block]:
    return [
        blocks.GcpProvider(
            project=PROJECT,
            service_account=SecretStr(fake.service_account),
            zones=[*ZONES],
            prices=gcp_prices(fake.market.wares),
            disk_usd_gib_month=DISK_USD_GIB_MONTH,
            url=fake.url,
        )
    ]


ROWS: Final[dict[str, Row]] = {
    "vast": Row(
        lambda: FakeVast(Market(wares=vast_wares())),
        "container",
        _vast,
        _keyed(blocks.VastProvider),
        by_hand=lambda number: str(FIRST_INSTANCE + number),
    ),
    "runpod": Row(
        lambda: FakeRunPod(Market(wares=runpod_wares())),
        "container",
        _runpod,
        _keyed(blocks.RunpodProvider),
    ),
    "lambda": Row(
        lambda: FakeLambda(Market(wares=lambda_wares())),
        "vm",
        _lambda,
        _keyed(blocks.LambdaProvider),
    ),
    "ec2": Row(
        lambda: FakeEc2(Market(wares=ec2_wares())),
        "vm",
        _ec2,
        _ec2_blocks,
        by_hand=None,  # its listing comes from moto, which knows instances only by their create
    ),
    "gcp": Row(
        lambda: FakeGcp(Market(wares=gcp_wares())),
        "vm",
        _gcp,
        _gcp_blocks,
        by_hand=lambda number: f"by-hand-{number}.{ZONES[0]}",
    ),
    "kubernetes": Row(
        lambda: FakeKubernetes(Market(wares=kubernetes_wares())),
        "container",
        _kubernetes,
        _kubernetes_blocks,
    ),
    "tensordock": Row(
        lambda: FakeTensorDock(Market(wares=tensordock_wares())),
        "vm",
        _tensordock,
        _keyed(blocks.TensordockProvider),
    ),
    "hostkey": Row(
        lambda: FakeHostkey(Market(wares=hostkey_wares())),
        "vm",
        _hostkey,
        _keyed(blocks.HostkeyProvider),
        by_hand=lambda number: str(7_900_000 + number),
    ),
}
"""The name is also that of the provider's address, and of its block: ``NAME-provider``."""
NAMES: Final = tuple(ROWS)
BODIES: Final[dict[str, Kind]] = {name: row.body for name, row in ROWS.items()}


def new_fakes() -> dict[str, FakeMarket]:
    """Each knows a key that no other text contains."""
    fakes = {name: row.fake() for name, row in ROWS.items()}
    for fake in fakes.values():
        fake.key = f"AK{secrets.token_hex(9).upper()}"  # an AWS access key has 20 characters
    return fakes


@dataclass
class Markets:
    """Each market has the name of its row."""

    fakes: dict[str, FakeMarket]
    machines: Machines

    def provider(self, name: str, timeout_s: float = 30.0) -> Provider:
        """The adapter, connected to the fake. It repeats what failed without a pause."""
        return ROWS[name].connect(self.fakes[name], Options(self.machines.port, timeout_s))

    def blocks(self, name: str, saved: str) -> list[Block]:
        """What a user saves under the name ``saved``."""
        return ROWS[name].blocks(self.fakes[name], saved)

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
    for name, fake in fakes.items():
        kind = BODIES[name]
        fake.market.boot = lambda command, kind=kind: machines.boot(command, kind)
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
        key=secrets.token_bytes(32),
    )
