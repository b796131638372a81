"""Signs the records of every store as they are, whoever wrote them, where a user asks for it after
a key was lost (``--believe-records``). Otherwise a record that torpor did not sign is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blocks import ObjectStore, Workspace
from blocks.reference import load_named, saved_names
from torpor.control.upkeep.signing import sign_records
from torpor.shared.errors import TorporError
from torpor.shared.values import WorkspaceName, home_of, names_of

_NAMED: Final = 5  # most records that one line names


def sign_stores() -> list[str]:
    """Sign what is unsigned in every store that has a block; returns what was done, for people."""
    said = []
    for name in saved_names(ObjectStore):
        try:
            block = load_named(ObjectStore, name, of="make up")
            done = sign_records(block.open(), of=_workspaces_of(name, block))
        except TorporError as error:
            said.append(
                f"object-store/{name}: its records are not signed: {error}; run "
                "`torpor up --believe-records` again once that is mended"
            )
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
    return said


def _workspaces_of(name: str, block: ObjectStore) -> Callable[[WorkspaceName], bool]:
    """The workspaces whose records are signed with this block's key: where another block has the
    same bucket and prefix, only those whose block names this one."""
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
