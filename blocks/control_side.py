"""Which control side this is: a name that the Prefect server keeps for all hosts of its workers."""

from __future__ import annotations

import secrets
from functools import cache
from typing import Final

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks.connection import server_in_use
from torpor.shared.errors import InvalidInput

_VARIABLE: Final = "torpor_control_side"
_TAG: Final = "torpor"


def own_side() -> str:
    """The name of this control side, made at the first use: 8 hexadecimal digits. Records in a
    bucket say by it who wrote them."""
    return _own_side(server_in_use())


@cache
def _own_side(server: str) -> str:
    with get_client(sync_client=True) as client:
        found = client.read_variable_by_name(_VARIABLE)
        if found is None:
            made = VariableCreate(name=_VARIABLE, value=secrets.token_hex(4), tags=[_TAG])
            try:
                found = client.create_variable(made)
            except ObjectAlreadyExists:  # another run has made it meanwhile
                found = client.read_variable_by_name(_VARIABLE)
    value = found.value if found is not None else None
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"the variable {_VARIABLE} of {server} is no name of a control side: delete it there"
        )
    return value
