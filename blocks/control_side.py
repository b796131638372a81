"""Which control side this is: its Prefect server keeps the name, for the hosts of all its
workers."""

from __future__ import annotations

import re
import secrets
from typing import Final

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks.connection import server_in_use
from blocks.reference import loaded_once
from torpor.shared.errors import InvalidInput

_VARIABLE: Final = "torpor_control_side"
_TAG: Final = "torpor"
_NAME: Final = re.compile(r"[0-9a-f]{8}")


def own_side() -> str:
    """The name of this control side, made at the first use: 8 hexadecimal digits. A record in a
    bucket names by it who owns a workspace. Raises what the server's client raises: a run that does
    not know its own name must not take a workspace for nobody's."""
    return loaded_once(_VARIABLE, _own_side)


def _own_side() -> str:
    with get_client(sync_client=True) as client:
        found = client.read_variable_by_name(_VARIABLE)
        if found is None:
            made = VariableCreate(name=_VARIABLE, value=secrets.token_hex(4), tags=[_TAG])
            try:
                found = client.create_variable(made)
            except ObjectAlreadyExists:  # another run has made it meanwhile
                found = client.read_variable_by_name(_VARIABLE)
    value = found.value if found is not None else None
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidInput(
            f"the variable {_VARIABLE} of {server_in_use()} is no name of a control side: delete "
            "it there, and it is made again"
        )
    return value
