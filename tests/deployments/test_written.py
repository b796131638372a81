"""Registering again writes only what is not as this very code has written it."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from deployments import register, written
from deployments.installation import Installation, code_version
from deployments.server import Server
from deployments.written import Written
from tests.fixtures.prefect_api import ask

FLOW = """
from prefect import flow

@flow
def rewritten(more: int = 1):
    pass
"""


class Clone:
    """A checkout with one flow, which is deployed and noted."""

    def __init__(self, folder: Path, server: Server, patch: pytest.MonkeyPatch) -> None:
        self.file, self.installation = folder / "flows" / "rewritten.py", Installation(folder)
        self._server = server
        name = f"again-{secrets.token_hex(4)}"  # other tests are at the same server
        self.name = f"rewritten/{name}"
        self.file.parent.mkdir()
        self.file.write_text(FLOW)
        wanted: dict[str, Any] = {
            "name": name,
            "entrypoint": "flows/rewritten.py:rewritten",
            "description": "It is as it was.",
            "tags": ["torpor"],
            "work_pool": {"name": "torpor"},
        }
        yaml = folder / "prefect.yaml"
        yaml.write_text(json.dumps({"deployments": [wanted]}))
        for module in (register, written):
            patch.setattr(module, "CHECKOUT", folder)
            patch.setattr(module, "prefect_file", lambda: yaml)
        self._patch = patch
        register.make_pools()
        flow = self.ask("POST", "flows/", {"name": "rewritten"})
        there = {**wanted, "flow_id": flow["id"], "work_pool_name": "torpor"}
        del there["work_pool"]
        self.url = "deployments/" + self.ask("POST", "deployments/", there)["id"]
        register.deploy(self.installation)
        Written.keep(self.installation, server.api_url, register.own_deployments()[0])

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        return ask(verb, f"{self._server.api_url}/{path}", body)

    def written(self) -> Written:
        return Written.read(self.installation, self._server.api_url)

    def loads_on_registering(self) -> bool:
        """Whether registering again loads the flow, as whoever writes it has to."""
        loaded: list[str] = []
        load = register.load_flow_from_entrypoint

        def noted(entrypoint: str, **how: Any) -> Any:
            loaded.append(entrypoint)
            return load(entrypoint, **how)

        with self._patch.context() as patch:
            patch.setattr(register, "load_flow_from_entrypoint", noted)
            register.deploy(self.installation, self.written())
        return loaded != []


@pytest.fixture
def clone(prefect_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    return Clone(tmp_path, prefect_server, monkeypatch)


def test_what_is_there_as_it_was_written_is_not_written_again(clone: Clone) -> None:
    assert clone.written().deployments.keys() == {clone.name}
    before = clone.ask("GET", clone.url)["updated"]
    assert clone.ask("GET", clone.url)["version"] == code_version()
    assert not clone.loads_on_registering()
    assert clone.ask("GET", clone.url)["updated"] == before


def test_a_pause_of_its_user_is_no_change_and_a_lost_schema_is(clone: Clone) -> None:
    clone.ask("PATCH", clone.url, {"paused": True})
    assert not clone.loads_on_registering()
    clone.ask("PATCH", clone.url, {"parameter_openapi_schema": {"properties": {}}})
    assert clone.loads_on_registering()
    assert [*clone.ask("GET", clone.url)["parameter_openapi_schema"]["properties"]] == ["more"]
    assert clone.ask("GET", clone.url)["paused"]


def test_a_deleted_work_pool_is_put_back(clone: Clone) -> None:
    clone.ask("PATCH", clone.url, {"work_pool_name": None, "work_queue_name": None})
    assert clone.loads_on_registering()
    assert clone.ask("GET", clone.url)["work_pool_name"] == "torpor"


def test_after_a_change_of_the_code_or_of_the_server_everything_is_written(clone: Clone) -> None:
    elsewhere = Written.read(clone.installation, "http://127.0.0.1:1/api")
    assert elsewhere.deployments == {}
    clone.file.write_text(FLOW.replace("more: int = 1", "more: int = 1234"))
    assert clone.loads_on_registering()
    more = clone.ask("GET", clone.url)["parameter_openapi_schema"]["properties"]["more"]
    assert more["default"] == 1234


def test_notes_that_cannot_be_read_count_as_none(clone: Clone) -> None:
    (clone.installation.folder / "registered.json").write_text("{")
    assert clone.written().deployments == {}
