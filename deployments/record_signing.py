"""Signs the records of an installation that was made before torpor signed them: once, at the first
``up`` of this version, for the stores that have a block then. Later, unsigned records are refused.

What is still to be done is in a Prefect variable: a store that does not answer is tried again by
the next ``up``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate

from blocks import ObjectStore, Workspace
from blocks.reference import load_named, saved_names
from tasks.runs import TAG
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import WorkspaceName, home_of, learned, names_of

PENDING: Final = "torpor_records_to_sign"
_NAMED: Final = 5  # records, in a line


class Pending(msgspec.Struct, frozen=True):
    """The Object Store blocks whose records are still to be signed, and whether whatever they say
    is believed."""

    stores: list[str] = []
    believe: bool = False


def sign_stores(*, older: bool, believe: bool = False) -> list[str]:
    """Sign what is unsigned in the stores that are to be signed; returns what was done, for people.

    ``older``: the installation was there before this registration, so that its records may be
    unsigned. ``believe``: its user asks that every record of every store is believed as it is,
    after a key was lost.
    """
    pending = _pending()
    if believe or (pending is None and older):
        wanted = Pending(saved_names(ObjectStore), believe)
    else:
        wanted = pending or Pending()
    if wanted != pending:
        _keep(wanted)  # a kill from here on leaves them to the next `up`
    said, left = [], []
    for name in wanted.stores:
        try:
            block = load_named(ObjectStore, name, of="make up")
            of = _workspaces_of(name, block)
            done = sign_records(block.open(), whatever=wanted.believe, of=of)
        except TorporError as error:
            left.append(name)
            said.append(f"object-store/{name}: its records are not signed yet: {error}")
            continue
        if done.signed:
            said.append(
                f"object-store/{name}: {len(done.signed)} records were signed as they are; from "
                "now on, a record that torpor did not sign is refused"
            )
        said += [
            f"object-store/{name}: {key} was left as it is, and is refused: {why}"
            for key, why in [*done.left.items()][:_NAMED]
        ]
    if wanted.stores != left:
        _keep(Pending(left, wanted.believe and bool(left)))
    return said


def _workspaces_of(name: str, block: ObjectStore) -> Callable[[WorkspaceName], bool]:
    """Which workspaces' records are signed with this block's key: where another block is of the
    same bucket and prefix, those whose block names this one."""
    place = (block.bucket, block.prefix.strip("/"))
    others = [load_named(ObjectStore, one, of="make up") for one in saved_names(ObjectStore)]
    if sum((one.bucket, one.prefix.strip("/")) == place for one in others) < 2:
        return lambda workspace: True
    mine: set[WorkspaceName] = set()
    for one in saved_names(Workspace):
        workspace = load_named(Workspace, one, of="make up")
        if workspace.store.rpartition("/")[2] == name:
            owner = WorkspaceName(workspace.name)
            mine.update([*names_of(owner), home_of(owner)])
    return mine.__contains__


def _pending() -> Pending | None:
    """None where no ``up`` of this version has asked before."""
    with get_client(sync_client=True) as client:
        found = client.read_variable_by_name(PENDING)
    if found is None:
        return None
    try:
        return msgspec.convert(found.value, learned(Pending))
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"the Prefect variable {PENDING} holds what torpor does not write ({error}): set it to "
            '{"stores": [], "believe": false}'
        ) from None


def _keep(pending: Pending) -> None:
    value: dict[str, Any] = msgspec.to_builtins(pending)
    with get_client(sync_client=True) as client:
        if client.read_variable_by_name(PENDING) is None:
            client.create_variable(VariableCreate(name=PENDING, value=value, tags=[TAG]))
        else:
            client.update_variable(VariableUpdate(name=PENDING, value=value, tags=[TAG]))
