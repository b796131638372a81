"""Settings that earlier versions saved in Workspace blocks move into Idleness and Tuning blocks.

Until then such a block means what it meant (blocks/workspace.py), so nothing is lost by waiting.
"""

from __future__ import annotations

from typing import Any, Final

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound

from blocks import Idleness, Tuning, Workspace
from blocks.reference import load_named, saved_names
from blocks.workspace import SETTINGS
from deployments.worker import POOLS
from torpor.shared.errors import InvalidInput

_MOVED: Final = {field for kind in SETTINGS.values() for field in kind.model_fields}
_OPEN: Final = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def move_settings() -> list[str]:
    """Move them, for each Workspace block that holds some; a sentence for each that people should
    know of. A block that cannot be used stays as it is."""
    said: list[str] = []
    for name in saved_names(Workspace):
        try:
            said += _move(name)
        except InvalidInput as error:
            said.append(f"{error}; its settings were not moved")
    return said


def _move(name: str) -> list[str]:
    """The new blocks first, then the Workspace block in one request: interrupted anywhere, it means
    what it meant, and the next `make up` uses the new blocks that are there."""
    me = f"workspace {name}"
    said = []
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document_by_name(name, Workspace.get_block_type_slug())
        except ObjectNotFound:
            return []  # somebody has deleted it meanwhile
        if not _MOVED & document.data.keys():
            return []
        block = load_named(Workspace, name, of="make up")
        own = {field: block.own(kind) for field, kind in SETTINGS.items()}
        if any(own.values()) and has_open_runs(client):
            return [
                f"{me}: its settings {_words(*own.values())} stay in the Workspace block while "
                "runs are open, which may be of the earlier version. Run `make up` again later"
            ]
        data = {key: value for key, value in document.data.items() if key not in _MOVED}
        for field, kind in SETTINGS.items():
            if not own[field]:
                continue
            if named := getattr(block, field):
                words = f"no longer counts: the workspace names {named}"
            else:
                data[field] = _saved(kind, name, own[field])
                words = f"is in the block {kind.get_block_type_slug()}/{data[field]} now"
            said.append(f"{me}: {_words(own[field])} {words}")
        Workspace.register_type_and_schema()  # after the load, which takes the document's schema
        changed = BlockDocumentUpdate(
            block_schema_id=Workspace._block_schema_id, data=data, merge_existing_data=False
        )
        client.update_block_document(document.id, changed)
    return said


def _saved(kind: type[Idleness | Tuning], name: str, settings: dict[str, Any]) -> str:
    """The name of a block with these settings: the workspace's, or with a number where a different
    block has that."""
    wanted, there = kind(**settings), saved_names(kind)
    one, number = name, 1
    while one in there:
        if _settings(load_named(kind, one, of="make up")) == _settings(wanted):
            return one
        number += 1
        one = f"{name}-{number}"
    wanted.save(one)
    return one


def _settings(block: Idleness | Tuning) -> dict[str, Any]:
    return block.model_dump(include={*type(block).model_fields})


def has_open_runs(client: SyncPrefectClient) -> bool:
    """Whether a run of this installation is open: the code of an earlier version would take a moved
    setting for the default."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN))
    pools = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool.name for pool in POOLS]))
    wanted = FlowRunFilter(state=state)
    return bool(client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=pools, limit=1))


def _words(*settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for one in settings for key, value in one.items())
