"""Which control side this is, and what it remembers: its Prefect server keeps both, for the hosts
of all its workers."""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import count
from typing import Final

import msgspec
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from blocks.connection import server_in_use
from torpor.control.store.settings_memory import Remembered
from torpor.shared.errors import InvalidInput
from torpor.shared.values import learned

_VARIABLE: Final = "torpor_control_side"
_TAG: Final = "torpor"
_MEMORY_TAG: Final = "torpor-settings"
_PAGE: Final = 200


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


class SideMemory:
    """What this control side remembers of block records, as variables of its Prefect server. See
    ``torpor.control.store.settings_memory.SettingsMemory``."""

    def remembered(self) -> list[Remembered]:
        found: list[Remembered] = []
        asked = {"variables": {"tags": {"all_": [_MEMORY_TAG]}}, "sort": "NAME_ASC", "limit": _PAGE}
        with get_client(sync_client=True) as client:
            for offset in count(0, _PAGE):
                answer = client.request(
                    "POST", "/variables/filter", json=asked | {"offset": offset}
                )
                page = answer.json()
                for one in page:
                    with suppress(msgspec.MsgspecError):  # of another version: seen again
                        found.append(msgspec.convert(one["value"], learned(Remembered)))
                if len(page) < _PAGE:
                    break
        return found

    def remember(self, one: Remembered) -> None:
        name, value = _memory_of(one), msgspec.to_builtins(one)
        with get_client(sync_client=True) as client:
            if client.read_variable_by_name(name) is None:
                with suppress(ObjectAlreadyExists):  # another run has made it meanwhile
                    made = VariableCreate(name=name, value=value, tags=[_TAG, _MEMORY_TAG])
                    client.create_variable(made)
                    return
            client.update_variable(VariableUpdate(name=name, value=value))

    def forget(self, one: Remembered) -> None:
        with get_client(sync_client=True) as client, suppress(ObjectNotFound):
            client.delete_variable_by_name(_memory_of(one))


def _memory_of(one: Remembered) -> str:
    return f"torpor_settings_{sha256('|'.join(one.place).encode()).hexdigest()[:16]}"
