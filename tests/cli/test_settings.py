"""`torpor edit`, with a real Prefect server and a real store."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate

import blocks
from blocks import Workspace
from tests.fixtures.rentals import handed_over
from tests.fixtures.world import World
from torpor.shared.errors import InvalidInput, StoreError, WorkspaceAwake
from torpor_cli import setup
from torpor_cli.settings import edit

NAME = "to-edit"


@pytest.fixture
def asleep(world: World, prefect_server: object) -> World:
    named = world.named(NAME)
    named.access.save_blocks(NAME)
    return named


def test_edit_shows_all_settings_and_changes_those_that_are_named(
    asleep: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Workspace.load(NAME)
    edit(NAME)
    assert f"store            {NAME}" in capsys.readouterr().out
    edit(NAME, "gpu=RTX 4090, L40S", "max_price_usd_h=0.6", "paths=~/a", "paths=~/b c")
    said = capsys.readouterr().out
    assert "max_price_usd_h" in said and "RTX 4090, L40S" in said and "identity" not in said
    after = Workspace.load(NAME)
    assert (after.gpu, after.max_price_usd_h, after.paths) == (
        "RTX 4090, L40S", 0.6, ["~/a", "~/b c"],
    )  # fmt: skip
    assert (after.store, after.tuning) == (before.store, before.tuning)
    edit(f"workspace/{NAME}", "max_price_usd_h=", "gpu=")
    assert (Workspace.load(NAME).gpu, Workspace.load(NAME).max_price_usd_h) == ("", None)
    edit(NAME, "gpu=")
    assert "it has these settings already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (["max_price=1"], "do you mean max_price_usd_h"),
        (["gpu"], "has no value: write NAME=VALUE"),
        (["gpu=24 potatoes"], "not understood"),
        (["gpu=L40S", "gpu=A100"], "given twice and takes one value"),
        (["max_price_usd_h=cheap"], "max_price_usd_h"),
        (["paths=relative"], "not a path on a machine"),
        (["name=another"], "cannot be changed"),
        (["store=nosuch"], "no block object-store/nosuch"),
        (["provider=vast-provider/nosuch"], "no block vast-provider/nosuch"),
        (["identity=nosuch"], "no block ssh-identity/nosuch"),
        (["tuning=nosuch"], "no block tuning/nosuch"),
        (["idle=nosuch"], "no block idleness/nosuch"),
    ],
)
def test_edit_refuses_what_does_not_fit_and_changes_nothing(
    asleep: World, setting: list[str], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        edit(NAME, "disk_gib=7", *setting)
    assert Workspace.load(NAME).disk_gib == 0.0


def test_edit_warns_of_a_home_that_the_shell_has_put_in(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    edit(NAME, "paths=/home/somebody/work", "paths=~/data")
    assert "write ~ in quotes: '~/work'" in capsys.readouterr().err


def test_while_it_is_awake_edit_keeps_how_torpor_finds_its_machine(asleep: World) -> None:
    machine, _ = handed_over(asleep.opened)
    asleep.named("elsewhere").access.save_blocks("elsewhere")
    blocks.Tuning(owner="another").save("another", overwrite=True)
    for change in ("store=elsewhere", "identity=elsewhere", "tuning=another"):
        with pytest.raises(
            WorkspaceAwake, match=f"was not changed, as it has machine {machine.id}"
        ):
            edit(NAME, change)
    edit(NAME, "disk_gib=7")
    assert Workspace.load(NAME).disk_gib == 7
    asleep.named("elsewhere").lose_machines()


@pytest.mark.parametrize("known", [True, False])
def test_edit_puts_the_old_settings_back_where_something_began_meanwhile_or_nobody_can_say(
    asleep: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    known: bool,
) -> None:
    asleep.named("elsewhere").access.save_blocks("elsewhere")
    real = setup.try_store

    def meanwhile(store: str) -> None:
        real(store)
        if known:
            handed_over(asleep.opened)  # a wake from another terminal
        else:
            monkeypatch.setattr("tasks.in_use.listed", _fails)

    monkeypatch.setattr(setup, "try_store", meanwhile)
    why = "as it has machine" if known else "nobody can say .* no answer"
    with pytest.raises(WorkspaceAwake, match=f"was not changed.* {why}"):
        edit(NAME, "store=elsewhere")
    assert Workspace.load(NAME).store == NAME
    assert f"block workspace/{NAME} is there as it was" in capsys.readouterr().err
    asleep.lose_machines()


def _fails(*_: object, **__: object) -> object:
    raise StoreError("no answer")


def test_edit_says_what_the_block_was_where_it_cannot_be_put_back(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asleep.named("elsewhere").access.save_blocks("elsewhere")

    def away(*_: object) -> object:
        monkeypatch.setattr(Workspace, "save", _fails)
        raise StoreError("no answer")

    real = setup.try_store

    def meanwhile(store: str) -> None:
        real(store)
        monkeypatch.setattr("tasks.in_use.listed", away)

    monkeypatch.setattr(setup, "try_store", meanwhile)
    with pytest.raises(WorkspaceAwake, match="nobody can say"):
        edit(NAME, "store=elsewhere")
    said = capsys.readouterr().err
    assert "could not be saved again as it was (StoreError('no answer'))" in said
    assert f"the store {NAME} and the identity {NAME}" in said


def test_edit_refuses_a_change_that_it_could_not_take_back(asleep: World) -> None:
    asleep.named("elsewhere").access.save_blocks("elsewhere")
    with get_client(sync_client=True) as client:
        saved = client.read_block_document_by_name(NAME, "workspace")
        older = BlockDocumentUpdate(data={"gpu": "24 potatoes"}, merge_existing_data=True)
        client.update_block_document(saved.id, older)
    with pytest.raises(InvalidInput, match="could not be saved again"):
        edit(NAME, "store=elsewhere", "gpu=L40S")
    assert Workspace.load(NAME).store == NAME
    edit(NAME, "gpu=L40S")
    assert Workspace.load(NAME).gpu == "L40S"
