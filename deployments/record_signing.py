"""Signs the records of an installation that was made before torpor signed them: once, at the first
``up`` of this version, for the stores that have a block then. Later, unsigned records are refused.

What is still to be done is in a Prefect variable: a store that does not answer is tried again by
the next ``up``.
"""

from __future__ import annotations

from typing import Final

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate

from blocks import ObjectStore
from blocks.reference import load_named, saved_names
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import TorporError

PENDING: Final = "torpor_stores_to_sign"
"""The names of Object Store blocks, with spaces between; empty once all are done."""


def sign_stores(*, older: bool, believe: bool = False) -> list[str]:
    """Sign what is unsigned in the stores that are to be signed; returns what was done, for people.

    ``older``: the installation was there before this registration, so that its records may be
    unsigned. ``believe``: its user asks that every record of every store is believed as it is,
    after a key was lost.
    """
    pending = _pending()
    every = believe or (pending is None and older)
    wanted = saved_names(ObjectStore) if every else pending or []
    said, left = [], []
    if wanted:
        _set_pending(wanted)  # a kill from here on leaves them to the next `up`
    for name in wanted:
        try:
            store = load_named(ObjectStore, name, of="make up").open()
            signed = sign_records(store, whatever=believe)
        except TorporError as error:
            left.append(name)
            said.append(f"object-store/{name}: its records are not signed yet: {error}")
            continue
        if signed:
            said.append(
                f"object-store/{name}: {len(signed)} records were signed as they are; from now on, "
                "a record that torpor did not sign is refused"
            )
    if left or pending != []:
        _set_pending(left)
    return said


def _pending() -> list[str] | None:
    """None where no ``up`` of this version has asked before."""
    with get_client(sync_client=True) as client:
        found = client.read_variable_by_name(PENDING)
    return None if found is None else str(found.value).split()


def _set_pending(names: list[str]) -> None:
    value = " ".join(names)
    with get_client(sync_client=True) as client:
        if client.read_variable_by_name(PENDING) is None:
            client.create_variable(VariableCreate(name=PENDING, value=value))
        else:
            client.update_variable(VariableUpdate(name=PENDING, value=value))
