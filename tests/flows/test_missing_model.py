"""A deploy that could serve no model is refused before anything is rented."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from blocks import Stack
from flows import deploy
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import run_plainly
from torpor.shared.errors import InvalidInput

SETUP: dict[str, Any] = {"setup": ["true"], "environment": ["~/stack"], "port": 8000}


@pytest.mark.parametrize(
    "given",
    [
        {"fetch": ["fetch", "{model}"]},
        {"server": ["serve", "--name={model}"]},
        {"proof_body": '{"model": "{model}"}'},
    ],
)
def test_a_stack_whose_commands_use_a_model_names_one(lab: Lab, given: dict[str, Any]) -> None:
    stack = Stack(**SETUP | {"server": ["serve"], "proof_answer": "a"} | given)
    with pytest.raises(InvalidInput, match=r"names no model, and its commands use \{model\}"):
        run_plainly(lab.opened, deploy, stack)
    assert lab.market.orders == []


def test_a_model_that_nothing_fetches_must_be_in_the_workspace(lab: Lab) -> None:
    stack = Stack(port=8000, server=["serve", "{model_path}"], proof_answer="a")
    with pytest.raises(InvalidInput, match="has no snapshot with one: put a model there first"):
        run_plainly(lab.opened, deploy, stack, strategy="official")
    assert lab.market.orders == []


def test_an_image_of_one_s_own_may_have_the_model(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    module = import_module("flows.deploy")
    monkeypatch.setattr(module, "deploy_stack", lambda *given: begun.append(given[2]))
    stack = Stack(port=8000, server=["serve", "{model_path}"], proof_answer="a")
    run_plainly(lab.opened, deploy, stack, strategy="own")
    assert begun == ["own"]


@pytest.mark.parametrize("name", ["fetch", "setup"])  # which may know the place by itself
def test_a_model_that_a_command_may_bring_need_not_be_there(name: str) -> None:
    given = {**SETUP, "server": ["serve", "{model_path}"], name: ["sh", "get-it"]}
    assert not Stack(**given, proof_answer="a").value().needs_model_there
