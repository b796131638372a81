"""`torpor edit` and `torpor delete`, with a real Prefect server and a real store."""

from __future__ import annotations

from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Completed, Running

import blocks
from blocks import Workspace
from blocks.reference import saved_names
from flows import hibernate, list_snapshots
from tests.fixtures.rentals import handed_over
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import World
from torpor.shared.errors import InvalidInput, RunCancelled, SnapshotKept, WorkspaceAwake
from torpor_cli.exit_codes import REFUSED, explained
from torpor_cli.workspaces import delete, edit

NAME = "front-door"


@pytest.fixture
def asleep(world: World, prefect_server: object) -> World:
    named = world.named(NAME)
    named.access.save_blocks(NAME)
    return named


def _with_snapshots(world: World, count: int) -> None:
    home = world.workspace(world.rent().id)
    home.mkdir()
    for number in range(count):
        (home / f"work-{number}").write_bytes(b"mine")
        hibernate(NAME, destroy=number == count - 1)


def test_edit_shows_all_settings_and_changes_those_that_are_named(
    asleep: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Workspace.load(NAME)
    edit(NAME)
    assert "store            front-door" in capsys.readouterr().out
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
        (["max_price=1"], "is it max_price_usd_h"),
        (["gpu"], "no NAME=VALUE"),
        (["gpu=24 potatoes"], "not understood"),
        (["gpu=L40S", "gpu=A100"], "there twice"),
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


def test_while_it_is_awake_edit_keeps_how_torpor_finds_its_machine_and_delete_refuses(
    asleep: World,
) -> None:
    machine, _ = handed_over(asleep.opened)
    asleep.named("elsewhere").access.save_blocks("elsewhere")
    blocks.Tuning(owner="another").save("another", overwrite=True)
    for change in ("store=elsewhere", "identity=elsewhere", "tuning=another"):
        with pytest.raises(
            WorkspaceAwake, match=f"was not changed, as it has machine {machine.id}"
        ):
            edit(NAME, change)
    edit(NAME, "disk_gib=7")
    for snapshots in (False, True):
        with pytest.raises(WorkspaceAwake, match=str(machine.id)) as refused:
            delete(NAME, snapshots=snapshots, yes=True)
    assert explained(refused.value)[0] == REFUSED
    assert Workspace.load(NAME).disk_gib == 7
    asleep.named("elsewhere").lose_machines()


def test_delete_refuses_where_nobody_can_say_what_is_rented(asleep: World) -> None:
    asleep.access.save_blocks(NAME)
    store = blocks.ObjectStore.load(NAME)
    store.endpoint_url, store.patience_min = "http://127.0.0.1:1", 0
    store.save(NAME, overwrite=True)
    with pytest.raises(WorkspaceAwake, match="nobody can say whether machines are rented"):
        delete(NAME, yes=True)
    assert NAME in saved_names(Workspace)


def test_delete_asks_and_keeps_the_snapshots(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_snapshots(asleep, 1)
    with pytest.raises(InvalidInput, match="add --yes"):
        delete(NAME)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: "")
    with pytest.raises(RunCancelled, match="nothing was deleted"):
        delete(NAME)
    assert NAME in saved_names(Workspace)
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    delete(NAME)
    assert NAME not in saved_names(Workspace)
    assert NAME in saved_names(blocks.ObjectStore)
    assert f"`torpor init {NAME} --store {NAME}` brings it back" in capsys.readouterr().out
    asleep.access.save_blocks(NAME)
    assert len(list_snapshots(NAME)) == 1


def test_delete_takes_the_snapshots_too_where_its_user_says_its_name(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_snapshots(asleep, 3)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    with pytest.raises(RunCancelled):
        delete(NAME, snapshots=True)
    assert len(list_snapshots(NAME)) == 3
    monkeypatch.setattr("builtins.input", lambda asked: NAME)
    delete(NAME, snapshots=True)
    assert NAME not in saved_names(Workspace)
    asleep.access.save_blocks(NAME)
    assert list_snapshots(NAME) == []


def test_no_snapshot_goes_where_one_is_pinned_or_another_block_is_the_same_workspace(
    asleep: World,
) -> None:
    from flows import pin

    _with_snapshots(asleep, 2)
    oldest = list_snapshots(NAME)[-1].snapshot
    pin(NAME, oldest, "the paper")
    with pytest.raises(SnapshotKept, match="is pinned"):
        delete(NAME, snapshots=True, yes=True)
    pin(NAME, oldest, remove=True)
    same = Workspace.load(NAME)
    Workspace(**{name: getattr(same, name) for name in Workspace.model_fields}).save(
        "same", overwrite=True
    )
    with pytest.raises(InvalidInput, match="workspace/same is workspace"):
        delete(NAME, snapshots=True, yes=True)
    Workspace.delete("same")
    assert len(list_snapshots(NAME)) == 2


def test_delete_refuses_under_a_budget_that_names_it(asleep: World) -> None:
    blocks.Budget(usd_month=1.0, workspaces=[NAME]).save(NAME, overwrite=True)
    try:
        with pytest.raises(InvalidInput, match=f"budget/{NAME} names it"):
            delete(NAME, yes=True)
        assert NAME in saved_names(Workspace)
    finally:
        blocks.Budget.delete(NAME)


@flow(name="of-a-user")
def of_a_user(workspace: str) -> None:
    """A flow of the user's own."""


def test_delete_ends_its_schedules_and_refuses_while_a_run_of_it_goes_on(asleep: World) -> None:
    with get_client(sync_client=True) as client:
        mine = _deployed(client, NAME)
        others = _deployed(client, "another")
        run = client.create_flow_run(of_a_user, parameters={"workspace": NAME}, state=Running())
        with pytest.raises(WorkspaceAwake, match=f"run {run.name}"):
            delete(NAME, yes=True)
        client.set_flow_run_state(run.id, Completed(), force=True)
        delete(f"workspace/{NAME}", yes=True)
        assert NAME not in saved_names(Workspace)
        assert client.read_deployment_schedules(mine) == []
        assert len(client.read_deployment_schedules(others)) == 1
        for one in (mine, others):
            client.delete_deployment(one)


def _deployed(client: SyncPrefectClient, workspace: str) -> UUID:
    return client.create_deployment(
        flow_id=client.create_flow(of_a_user),
        name=f"nightly-{workspace}",
        parameters={"workspace": workspace},
        schedules=[
            DeploymentScheduleCreate(
                schedule=IntervalSchedule(interval=PATIENCE_S), active=False, slug="nightly"
            )
        ],
    )
