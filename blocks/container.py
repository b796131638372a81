"""The fields of provider blocks that rent containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from prefect.types import SecretDict
from pydantic import AfterValidator, Field

from torpor.control.providers.container import Container
from torpor.shared.errors import InvalidInput

_Value = TypeVar("_Value")


def container(env: SecretDict, ports: Sequence[int], login: str = "") -> Container:
    """InvalidInput, without a secret."""
    return Container(env=env.get_secret_value(), ports=tuple(ports), login=login)


def no_variables() -> SecretDict:
    return SecretDict({})


def _variables(env: SecretDict) -> SecretDict:
    return _checked(env, env, ())


def _open(ports: list[int]) -> list[int]:
    return _checked(ports, no_variables(), ports)


def _checked(value: _Value, env: SecretDict, ports: Sequence[int]) -> _Value:
    try:
        container(env, ports)
    except InvalidInput as fault:
        raise ValueError(str(fault)) from None
    return value


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
