"""Workspace blocks of an earlier version: they mean what they meant, and `make up` moves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import flow

from blocks import Idleness, Tuning, Workspace
from blocks.reference import load_named
from blocks.workspace import SETTINGS
from deployments import moved_settings, register
from deployments.moved_settings import move_settings
from deployments.server import Server
from tests.fixtures.prefect_api import ask
from torpor.shared.errors import InvalidInput
from torpor.shared.values import (
    MIB,
    Compression,
    GpuUse,
    IdleRules,
    Want,
    WorkspaceName,
    WorkspaceSpec,
)

NAME = "of-before"
KEPT: dict[str, Any] = {
    "name": "before",
    "paths": ["/data", "~/work"],
    "exclude": ["*.pyc"],
    "first": ["venv"],
    "save_minutes": 5,
    "store": "s3",
    "provider": "vast-provider/v",
    "more_providers": ["runpod-provider/r"],
    "identity": "mine",
    "gpu": "H100",
    "gpu_count": 2,
    "disk_gib": 100.5,
    "max_price_usd_h": 3.5,
    "regions": ["eu"],
    "spot": "allowed",
    "cuda": "12.4",
    "driver": "550.54.14",
    "image": "ubuntu",
    "quiesce": ["stop"],
    "resume": ["go"],
    "accept_changed": ["*.log"],
    "accept_lost": ["/cache"],
    "when_idle": "report",
    "project": "vision",
}
NEWER: dict[str, Any] = {"move_aside": False}
"""Of the Tuning block, and of no earlier Workspace."""
TUNING: dict[str, Any] = {
    "min_reliability": 0.9,
    "rank": "order",
    "quiesce_timeout_s": 12.5,
    "left_behind": "refuse",
    "left_behind_gib": 2.5,
    "parts": 7,
    "part_mib": 8,
    "smallest": True,
    "gpu_encodes": True,
    "gpu_python": "/opt/python",
    "gpu_install": True,
    "owner": "team-a",
}
IDLENESS: dict[str, Any] = {
    "idle_minutes": 120.0,
    "idle_share": 0.75,
    "idle_gpu_percent": 6.0,
    "idle_cpu_percent": 7.0,
    "idle_network_kib_s": 8.0,
    "idle_disk_kib_s": 9.0,
    "idle_people": False,
    "when_left": "continue",
}
MEANT = WorkspaceSpec(
    name=WorkspaceName("before"),
    paths=["/data", "~/work"],
    exclude=["*.pyc"],
    first=["venv"],
    want=Want(
        "H100",
        2,
        100.5,
        3.5,
        ["eu"],
        "allowed",
        "order",
        0.9,
        "ubuntu",
        cuda=(12, 4),
        driver=(550, 54, 14),
    ),
    quiesce=["stop"],
    resume=["go"],
    quiesce_timeout_s=12.5,
    accept_changed=["*.log"],
    accept_lost=["/cache"],
    save_minutes=5,
    left_behind="refuse",
    left_behind_gib=2.5,
    parts=7,
    part_bytes=8 * MIB,
    compression=Compression(smallest=True, gpu=GpuUse("/opt/python", install=True)),
    idle=IdleRules(120.0, 6.0, 0.75, 7.0, 8.0, 9.0, people=False, hibernate=False),
    when_left="continue",
)


@pytest.fixture
def saved(prefect_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of a block with all of that, as the version before saved it; none is left."""
    # Others share the server, and their runs may be open.
    monkeypatch.setattr(moved_settings, "has_open_runs", lambda client: False)
    register.register_types()
    register.make_pools()
    yield _save_as_before(prefect_server, NAME, {**KEPT, **TUNING, **IDLENESS})
    for kind in (Workspace, *SETTINGS.values()):
        for name in (NAME, f"{NAME}-2"):
            if register.exists(kind, name):
                kind.delete(name)


def _save_as_before(server: Server, name: str, data: dict[str, Any]) -> str:
    api = server.api_url
    kind = ask("GET", f"{api}/block_types/slug/workspace")["id"]
    fields = {"type": "object", "properties": {field: {"title": field} for field in data}}
    schema = ask("POST", f"{api}/block_schemas/", {"block_type_id": kind, "fields": fields})
    document = {"block_type_id": kind, "block_schema_id": schema["id"], "name": name, "data": data}
    return str(ask("POST", f"{api}/block_documents/", document)["id"])


def _document(server: Server) -> dict[str, Any]:
    by_name = f"/block_types/slug/workspace/block_documents/name/{NAME}"
    return dict(ask("GET", server.api_url + by_name))


def test_the_names_of_settings_are_those_of_one_block_each() -> None:
    assert {*TUNING, *NEWER} == {*Tuning.model_fields} and {*IDLENESS} == {*Idleness.model_fields}
    assert {*KEPT} | {*SETTINGS} == {*Workspace.model_fields}


def test_a_block_of_before_means_the_same_until_it_is_moved_and_after(
    saved: str, prefect_server: Server
) -> None:
    @flow
    def takes(workspace: Workspace | str) -> None:
        """Never run here."""

    before = Workspace.of(NAME)
    form = {"workspace": {"$ref": {"block_document_id": saved}}}
    inline = {"workspace": json.loads(before.model_dump_json())}
    for block in (before, *(takes.validate_parameters(one)["workspace"] for one in (form, inline))):
        assert block.spec() == MEANT
        assert block.open_tuning().owner == "team-a"
    with pytest.raises(InvalidInput, match=r"idle_minutes.*make up"):
        before.save("elsewhere")

    said = "\n".join(move_settings())
    for field, kind in SETTINGS.items():
        moved = load_named(kind, NAME, of="test").model_dump(include={*kind.model_fields})
        assert moved == ({**TUNING, **NEWER} if kind is Tuning else IDLENESS)
        assert f"is in the block {kind.get_block_type_slug()}/{NAME} now" in said, field
    document = _document(prefect_server)
    assert document["data"] == {**KEPT, "idle": NAME, "tuning": NAME}
    assert document["id"] == saved
    assert {"idle", "tuning"} <= document["block_schema"]["fields"]["properties"].keys()
    after = Workspace.of(NAME)
    assert after.spec() == MEANT
    assert after.open_tuning().owner == "team-a"
    after.save(NAME, overwrite=True)
    assert move_settings() == []


def test_an_interrupted_move_is_ended_with_the_blocks_that_it_had_made(
    saved: str, prefect_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(moved_settings, "BlockDocumentUpdate", killed)
        move_settings()
    assert register.exists(Tuning, NAME)
    assert Workspace.of(NAME).spec() == MEANT
    move_settings()
    assert _document(prefect_server)["data"] == {**KEPT, "idle": NAME, "tuning": NAME}
    assert Workspace.of(NAME).spec() == MEANT


@pytest.mark.usefixtures("saved")
def test_a_block_that_has_the_name_already_stays_as_it_is() -> None:
    Tuning(parts=3).save(NAME)
    move_settings()
    assert Workspace.of(NAME).tuning == f"{NAME}-2"
    assert Workspace.of(NAME).spec() == MEANT
    assert load_named(Tuning, NAME, of="test").parts == 3


def test_defaults_move_without_a_word(saved: str, prefect_server: Server) -> None:
    plain = {**Tuning().model_dump(), **Idleness().model_dump()}
    del plain["block_type_slug"]
    _change(prefect_server, saved, {**KEPT, **plain})
    assert move_settings() == []
    assert _document(prefect_server)["data"] == KEPT
    assert not register.exists(Tuning, NAME) and not register.exists(Idleness, NAME)


def test_a_named_block_counts_and_what_no_longer_counts_is_said(
    saved: str, prefect_server: Server
) -> None:
    Idleness(idle_minutes=60).save(NAME)
    _change(prefect_server, saved, {**KEPT, "idle": NAME, "idle_minutes": 120.0})
    with pytest.raises(InvalidInput, match=f"names the Idleness block {NAME} and also says"):
        Workspace.of(NAME).spec()
    assert move_settings() == [
        f"workspace {NAME}: idle_minutes=120.0 no longer counts: the workspace names {NAME}"
    ]
    assert _document(prefect_server)["data"] == {**KEPT, "idle": NAME}
    assert Workspace.of(NAME).spec().idle.minutes == 60


def test_nothing_moves_while_runs_are_open_or_where_a_block_cannot_be_used(
    saved: str, prefect_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the earlier version would take a moved `left_behind` for its default."""
    monkeypatch.undo()
    api = prefect_server.api_url
    owner = ask("POST", f"{api}/flows/", {"name": "of-before"})["id"]
    of_pool = {"name": "d", "flow_id": owner, "work_pool_name": "torpor"}
    deployment = ask("POST", f"{api}/deployments/", of_pool)["id"]
    running = {"state": {"type": "RUNNING", "name": "Running"}}
    run = ask("POST", f"{api}/deployments/{deployment}/create_flow_run", running)["id"]
    before = _document(prefect_server)["data"]
    (said,) = move_settings()
    ask("DELETE", f"{api}/flow_runs/{run}")
    ask("DELETE", f"{api}/deployments/{deployment}")
    assert "parts=7" in said and "Run `make up` again" in said
    assert _document(prefect_server)["data"] == before

    _change(prefect_server, saved, {**before, "parts": 1000})
    (said,) = move_settings()
    assert "less than or equal to 64" in said and "were not moved" in said
    assert _document(prefect_server)["data"]["parts"] == 1000


def _change(server: Server, document: str, data: dict[str, Any]) -> None:
    changed = {"data": data, "merge_existing_data": False}
    ask("PATCH", f"{server.api_url}/block_documents/{document}", changed)
