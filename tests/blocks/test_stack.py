"""Stacks: what a form may say, and what commands become of it."""

from __future__ import annotations

import json
import traceback
from typing import Any

import msgspec
import pytest
from prefect.blocks.system import Secret
from pydantic import ValidationError

from blocks import Stack, Workspace
from deployments.stacks import ready_made
from tests.fixtures.market import Market
from torpor.control.deploy.stack import (
    STRATEGIES,
    EnvironmentFacts,
    StackPaths,
    base_name,
    check_apart,
    sharers,
    strategy_named,
)
from torpor.shared.errors import InvalidInput
from torpor.shared.values import BASE, WorkspaceName

HERE = "lambda://here"
FACTS = EnvironmentFacts((3, 11), "2.36", "x86_64", 12, "/root")


def _stack(**changes: Any) -> Stack:
    given = {"server": ["serve"], "port": 8080, "proof_answer": "version", **changes}
    return Stack(**given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": ["~"]}, "is not a path on a machine"),
        ({"environment": ["~/"]}, "is not a directory of an environment"),
        ({"environment": ["/usr"]}, "is not a directory of an environment"),
        ({"environment": ["relative/path"]}, "is not a path on a machine"),
        ({"environment": ["~/a/../b"]}, "goes up"),
        ({"model_path": "../elsewhere"}, "is not below the workspace"),
        ({"model_path": "/models"}, "is not below the workspace"),
        ({"server": []}, "at least 1 item"),
        ({"server": ["", "x"]}, "first item is the program"),
        ({"secrets": ["HF_TOKEN"]}, "each secret is NAME=BLOCK"),
        ({"secrets": ["TORPOR_JOB=a-block"]}, "each secret is NAME=BLOCK"),
        ({"secrets": [" TORPOR_JOB=a-block"]}, "each secret is NAME=BLOCK"),
        ({"secrets": ["A=a", " A=b"]}, "each variable of the secrets is named once"),
        ({"secrets": ["A=a"], "bearer": "B"}, "'B' is not a variable of the secrets"),
        ({"port": 80}, "greater than or equal to 1024"),
        ({"health": "health"}, "is not the path of a URL"),
        ({"health": "/a b"}, "is not the path of a URL"),
        ({"proof_path": "/a\r\nHost: x"}, "is not the path of a URL"),
        ({"proof_body": "{"}, "the body is not JSON"),
        ({"proof_answer": ""}, "at least 1 character"),
    ],
)
def test_a_form_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        _stack(**changes)


@pytest.mark.rule(9)
def test_a_secret_is_named_and_never_in_a_stack_or_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError) as pasted:
        _stack(secrets=["HF_TOKEN=hf_AbCdEf"])
    assert "hf_AbCdEf" not in pasted.value.errors(include_input=False)[0]["msg"]
    monkeypatch.setattr(
        "blocks.secret_variables.load_named", lambda *_, **__: Secret(value="hf_AbCdEf")
    )
    block = _stack(secrets=[" HF_TOKEN=hugging-face "], bearer="HF_TOKEN")
    stack = block.value()
    assert stack.secrets.variables == {"HF_TOKEN": "hf_AbCdEf"}
    assert stack.secrets.token == "hf_AbCdEf"
    assert "hf_AbCdEf" not in f"{block!r} {block.model_dump()} {stack!r} {stack.secrets!r}"
    assert stack.secrets.hidden_in("a hf_AbCdEf b") == "a *** b"
    assert base_name(stack, FACTS, HERE) == base_name(_stack().value(), FACTS, HERE)
    monkeypatch.setattr(
        "blocks.secret_variables.load_named", lambda *_, **__: Secret(value=["a", "list"])
    )
    with pytest.raises(InvalidInput, match="secret/hugging-face of HF_TOKEN must hold a text"):
        block.value()


@pytest.mark.rule(9)
@pytest.mark.parametrize("value", ["hf_AbCdEf\n", "hf_AbCdEf\r\nHost: x", "hf_AbCdEfü"])
def test_what_cannot_be_a_bearer_token_is_refused_unseen(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr("blocks.secret_variables.load_named", lambda *_, **__: Secret(value=value))
    assert _stack(secrets=["KEY=a"]).value().secrets.variables == {"KEY": value}
    with pytest.raises(InvalidInput, match="value of KEY cannot be a bearer token") as refused:
        _stack(secrets=["KEY=a"], bearer="KEY").value()
    assert "AbCdEf" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.rule(17)
def test_no_workspace_has_the_name_of_an_environment() -> None:
    with pytest.raises(ValidationError, match="reserved"):
        Workspace(name=f"{BASE}{'0' * 32}")


@pytest.mark.rule(17)
def test_names_are_filled_into_single_items() -> None:
    stack = _stack(
        environment=["~/env"],
        model="an owner/$(rm -rf /)",
        model_path="models/m",
        server=["{bin}serve", "{model}", "{model_path}:{port}", "{workspace}", "{other}"],
        proof_body='{"model": "{model}", "n": [1, "{port}"]}',
    ).value()
    place = StackPaths(stack, "/home/me", "~/work", sets_up=True)
    assert place.filled(stack.server) == [
        "/home/me/env/bin/serve",
        "an owner/$(rm -rf /)",
        "/home/me/work/models/m:8080",
        "/home/me/work",
        "{other}",
    ]
    assert place.body(stack.proof.body) == {"model": "an owner/$(rm -rf /)", "n": [1, "8080"]}
    assert StackPaths(stack, "/root", "/w", sets_up=False).filled(["{bin}serve"]) == ["serve"]


def test_the_key_of_an_environment_is_all_that_it_depends_on() -> None:
    stack = _stack(setup=["make"], environment=["~/env"]).value()
    name = base_name(stack, FACTS, HERE)
    assert name.startswith(BASE) and len(name) <= 63
    others = [
        base_name(msgspec.structs.replace(stack, setup=["make", "more"]), FACTS, HERE),
        base_name(msgspec.structs.replace(stack, minimal_image="debian:12"), FACTS, HERE),
        base_name(msgspec.structs.replace(stack, environment=["~/other"]), FACTS, HERE),
        base_name(stack, EnvironmentFacts((3, 12), "2.36", "x86_64", 12, "/root"), HERE),
        base_name(stack, EnvironmentFacts((3, 11), "2.39", "x86_64", 12, "/root"), HERE),
        base_name(stack, EnvironmentFacts((3, 11), "2.36", "aarch64", 12, "/root"), HERE),
        base_name(stack, EnvironmentFacts((3, 11), "2.36", "x86_64", 13, "/root"), HERE),
        base_name(stack, EnvironmentFacts((3, 11), "2.36", "x86_64", 12, "/home/me"), HERE),
    ]
    assert len({name, *others}) == 9
    same = msgspec.structs.replace(stack, server=["another"], model="m", port=9000, name="other")
    assert base_name(same, FACTS, HERE) == name
    moved = msgspec.structs.replace(stack, relocatable=True)
    elsewhere = EnvironmentFacts((3, 11), "2.36", "x86_64", 12, "/home/me")
    assert base_name(moved, FACTS, HERE) == base_name(moved, elsewhere, HERE)


@pytest.mark.rule(17)
def test_an_environment_is_of_one_account_or_of_those_that_are_trusted_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = WorkspaceName("one"), WorkspaceName("other")
    stack = _stack(setup=["make"], environment=["~/env"]).value()

    def shared(at: str, by: WorkspaceName, many_owners: bool = False) -> WorkspaceName:
        return base_name(stack, FACTS, sharers(stack, at, many_owners, by))

    assert shared(HERE, one) == shared(HERE, other) != shared("gcp://there", one)
    of_many = [shared("vast://x", by, many_owners=True) for by in (one, other)]
    assert len({*of_many, shared(HERE, one)}) == 3
    assert shared("vast://x", one, many_owners=True) == of_many[0]
    alone = shared(HERE, one)
    opened = {"lambda-provider/mine": Market(HERE), "vast-provider/mine": Market("vast://x")}
    monkeypatch.setattr("blocks.stack.open_provider", lambda name, of: opened[name])
    stack = _stack(setup=["make"], environment=["~/env"], trusts=[*opened]).value()
    alike = shared(HERE, one)
    assert alike == shared("vast://x", other, many_owners=True) != alone
    assert shared("gcp://there", one) not in (alike, alone)


def test_strategies_say_what_they_need() -> None:
    with pytest.raises(InvalidInput, match="'E' is not a strategy: use one of official, setup"):
        strategy_named("E")
    bare = _stack().value()
    for name in ("official", "setup", "own"):
        with pytest.raises(InvalidInput, match=r"has no (own )?image"):
            bare.image_for(STRATEGIES[name])
    with pytest.raises(InvalidInput, match="no setup command or no environment path"):
        bare.check(STRATEGIES["stored"])
    whole = _stack(setup=["make"], environment=["~/env"], image="i", own_image="o").value()
    for strategy in STRATEGIES.values():
        whole.check(strategy)
    images = [whole.image_for(STRATEGIES[name]) for name in STRATEGIES]
    assert images == ["i", "i", "o", ""]


@pytest.mark.rule(7)
@pytest.mark.parametrize(("environment", "workspace"), [("/r/w", "/r/w"), ("/r/w/e", "/r/w"),
                                                        ("/r/w/e", "/r//w/"), ("/r//w/e", "/r/w"),
                                                        ("/r/./w", "/r/w/"),
                                                        ("/r/w", "/r/w/data")])  # fmt: skip
def test_an_environment_within_a_workspace_is_refused(environment: str, workspace: str) -> None:
    """However the paths are written: blocks from before hold them as they were typed."""
    with pytest.raises(InvalidInput, match="overlap"):
        check_apart([environment], [workspace])
    check_apart(["/r/we"], ["/r/w"])


@pytest.mark.parametrize("name", list(ready_made()))
def test_a_ready_made_stack_is_whole(name: str) -> None:
    block = ready_made()[name]
    stack = block.value()
    stack.check(STRATEGIES["stored"])
    if stack.image:
        stack.check(STRATEGIES["official"])
        assert ":" in stack.image and not stack.image.endswith(":latest")
    assert any("==" in item or item.count(".") == 2 for item in stack.setup), "pinned"
    place = StackPaths(stack, "/root", "~/workspace", sets_up=True)
    commands = [place.filled(argv) for argv in (stack.setup, stack.fetch, stack.server)]
    assert not any("{" in item for command in commands[:1] for item in command if "\n" not in item)
    assert str(stack.port) in " ".join(commands[2])
    assert "127.0.0.1" in " ".join(commands[2])
    assert "{" not in json.dumps(place.body(stack.proof.body)).replace('{"', "")
