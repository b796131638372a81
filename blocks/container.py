"""The fields of provider blocks that rent containers, and fields that other ones share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_network
from typing import Annotated, Any

from prefect.types import SecretDict
from pydantic import AfterValidator, BaseModel, Field

from torpor.control.providers.container import Container, volume
from torpor.shared.errors import InvalidInput


def container(
    env: SecretDict, ports: Sequence[int], login: str = "", volumes: Sequence[str] = ()
) -> Container:
    """InvalidInput, without a secret."""
    return Container(
        env=env.get_secret_value(),
        ports=tuple(ports),
        login=login,
        volumes=tuple(map(volume, volumes)),
    )


def no_variables() -> SecretDict:
    return SecretDict({})


def _variables(env: SecretDict) -> SecretDict:
    _check(env, ())
    return env


def _open(ports: list[int]) -> list[int]:
    _check(no_variables(), ports)
    return ports


def _network(text: str) -> str:
    """ValueError also for an address that is not the first one of its network, which is a typo."""
    text = text.strip()
    if text and (ip_network(text).version != 4 or not re.search(r"/\d+$", text)):
        raise ValueError(f"{text!r} is no IPv4 network: write ADDRESS/32 for one host")
    return str(ip_network(text)) if text else ""


def _mounted(volumes: list[str]) -> list[str]:
    _check(no_variables(), (), volumes)
    return volumes


def _check(env: SecretDict, ports: Sequence[int], volumes: Sequence[str] = ()) -> None:
    try:
        container(env, ports, volumes=volumes)
    except InvalidInput as fault:
        raise ValueError(str(fault)) from None


Variables = Annotated[
    SecretDict,
    AfterValidator(_variables),
    Field(
        title="Environment variables",
        description=(
            "Environment variables of each machine, which all its sessions have: "
            '{"HF_TOKEN": "hf_..."}. The market sees them, and on a machine every program can read '
            "them."
        ),
    ),
]

Ports = Annotated[
    list[int],
    AfterValidator(_open),
    Field(
        title="Open ports",
        description=(
            "TCP ports of the machine that are reached from outside, beside SSH's. Vast.ai and "
            "RunPod choose the outer numbers; a machine finds them in VAST_TCP_PORT_8000 or "
            "RUNPOD_TCP_PORT_8000."
        ),
    ),
]

SshFrom = Annotated[
    str,
    AfterValidator(_network),
    Field(
        title="SSH from",
        description=(
            "The addresses from which SSH may come, as a CIDR: 203.0.113.7/32 for one host, "
            "0.0.0.0/0 for all. Empty: torpor opens no port."
        ),
    ),
]

DataCentresOnly = Annotated[
    bool,
    Field(
        title="Data centres only",
        description=(
            "Whether to rent from data centres only, and from no host of the community. What else "
            "is on sale is not shown."
        ),
    ),
]

Volumes = Annotated[list[str], AfterValidator(_mounted)]


class Containers(BaseModel):
    """The fields of a market of containers, which run on hosts of data centres and of others."""

    env: Variables = Field(default_factory=no_variables)

    ports: Ports = Field(default_factory=list)

    data_centres_only: DataCentresOnly = False

    volumes: Volumes = Field(
        default_factory=list,
        max_length=1,
        description=(
            "A volume of the account to mount, as ID:/PATH: 12345:/data. Machines are rented where "
            "it is. torpor leaves alone what is there: no snapshot holds it, and it outlives the "
            "machine. The path must be outside of the workspace's."
        ),
    )

    def terms(self, login: str) -> dict[str, Any]:
        """What the adapter takes of them, with the login to a private registry."""
        return {
            "container": container(self.env, self.ports, login, self.volumes),
            "data_centres_only": self.data_centres_only,
        }
