"""Configuration and secrets, kept by Prefect: stores, providers, SSH identities, workspaces and
their settings, budgets, stacks.

``prefect block register -m blocks`` adds the block types to a server.
"""

from typing import Final, TypeAlias

from blocks.azure_provider import AzureProvider
from blocks.budget import Budget
from blocks.connection import connect
from blocks.ec2_provider import Ec2Provider
from blocks.gcp_provider import GcpProvider
from blocks.idleness import Idleness
from blocks.kubernetes_provider import KubernetesProvider
from blocks.local_provider import LocalProvider
from blocks.markets import (
    HostkeyProvider,
    LambdaProvider,
    RunpodProvider,
    TensordockProvider,
    VastProvider,
    VerdaProvider,
)
from blocks.object_store import ObjectStore
from blocks.ssh_identity import SSHIdentity
from blocks.stack import Stack
from blocks.tuning import Tuning
from blocks.workspace import Workspace

__all__ = [
    "AzureProvider",
    "Budget",
    "Ec2Provider",
    "GcpProvider",
    "HostkeyProvider",
    "Idleness",
    "KubernetesProvider",
    "LambdaProvider",
    "LocalProvider",
    "ObjectStore",
    "RunpodProvider",
    "SSHIdentity",
    "Stack",
    "TensordockProvider",
    "Tuning",
    "VastProvider",
    "VerdaProvider",
    "Workspace",
]

ProviderBlock: TypeAlias = (
    LocalProvider
    | VastProvider
    | RunpodProvider
    | LambdaProvider
    | Ec2Provider
    | GcpProvider
    | KubernetesProvider
    | TensordockProvider
    | HostkeyProvider
    | VerdaProvider
    | AzureProvider
)
PROVIDERS: Final[tuple[type[ProviderBlock], ...]] = (
    LocalProvider,
    VastProvider,
    RunpodProvider,
    LambdaProvider,
    Ec2Provider,
    GcpProvider,
    KubernetesProvider,
    TensordockProvider,
    HostkeyProvider,
    VerdaProvider,
    AzureProvider,
)
"""The provider blocks, the default first."""

connect()
