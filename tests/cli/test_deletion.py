"""`torpor delete`, with a real Prefect server and a real store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentUpdate, DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Completed, Running

import blocks
from blocks import Workspace
from blocks.reference import saved_names
from flows import pin
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.rentals import handed_over
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import World
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import (
    InvalidInput,
    RunCancelled,
    SnapshotKept,
    StoreError,
    WorkspaceAwake,
)
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor_cli.deletion import delete
from torpor_cli.exit_codes import REFUSED, explained
from torpor_cli.settings import edit

NAME = "to-delete"


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
        hibernate_plainly(world.opened, destroy=number == count - 1)


def _stored(world: World, workspace: str = NAME) -> list[SnapshotId]:
    """Oldest first."""
    return snapshot_ids(world.opened.store, WorkspaceName(workspace))


def test_delete_refuses_while_a_machine_is_rented(asleep: World) -> None:
    machine, _ = handed_over(asleep.opened)
    for snapshots in (False, True):
        with pytest.raises(WorkspaceAwake, match=str(machine.id)) as refused:
            delete(NAME, snapshots=snapshots, yes=True)
    assert explained(refused.value)[0] == REFUSED
    assert NAME in saved_names(Workspace)
    asleep.lose_machines()


@pytest.mark.parametrize("known", [True, False])
def test_delete_saves_the_block_again_where_something_began_meanwhile_or_nobody_can_say(
    asleep: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    known: bool,
) -> None:
    _with_snapshots(asleep, 1)
    before = Workspace.load(NAME)

    def meanwhile() -> None:
        if known:
            handed_over(asleep.opened)  # a wake from another terminal
        else:
            monkeypatch.setattr("tasks.in_use.listed", _fails)

    _before_it_goes(monkeypatch, meanwhile)
    why = "as it has machine" if known else "nobody can say .* no answer"
    with pytest.raises(WorkspaceAwake, match=f"was not deleted.* {why}"):
        delete(NAME, snapshots=True, yes=True)
    after = Workspace.load(NAME)
    assert all(getattr(after, one) == getattr(before, one) for one in Workspace.model_fields)
    assert f"block workspace/{NAME} is there as it was" in capsys.readouterr().err
    assert len(_stored(asleep)) == 1
    asleep.lose_machines()


def _before_it_goes(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do that right before the block is deleted, once."""
    real = SyncPrefectClient.delete_block_document

    def meanwhile(client: SyncPrefectClient, block: UUID) -> None:
        monkeypatch.setattr(SyncPrefectClient, "delete_block_document", real)
        act()
        real(client, block)

    monkeypatch.setattr(SyncPrefectClient, "delete_block_document", meanwhile)


def _fails(*_: object) -> object:
    raise StoreError("no answer")


def test_delete_leaves_a_block_that_somebody_has_saved_under_its_name_meanwhile(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def meanwhile() -> None:
        Workspace.delete(NAME)
        other = Workspace(name=NAME, store=NAME, paths=["~/another"])
        other.save(NAME)
        monkeypatch.setattr("tasks.in_use.listed", _fails)

    _before_it_goes(monkeypatch, meanwhile)
    with pytest.raises(WorkspaceAwake):
        delete(NAME, yes=True)
    assert Workspace.load(NAME).paths == ["~/another"]
    assert "was saved anew by somebody meanwhile, and stays so" in capsys.readouterr().err


def test_delete_does_nothing_where_somebody_has_changed_the_settings_before_the_answer(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the snapshots of the store that it had go, and the block that names another one."""
    _with_snapshots(asleep, 1)

    def edited(_: str) -> str:
        store = blocks.ObjectStore.load(NAME)
        store.prefix = "other/"
        store.save("to-delete-other", overwrite=True)
        edit(NAME, "store=to-delete-other")
        return NAME

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", edited)
    with pytest.raises(WorkspaceAwake, match="somebody has changed its settings meanwhile"):
        delete(NAME, snapshots=True)
    assert Workspace.load(NAME).store == "to-delete-other"
    asleep.access.save_blocks(NAME)
    assert len(_stored(asleep)) == 1


def test_a_delete_that_is_the_second_one_brings_nothing_back(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the answer to the first request is lost, and the client sends it again."""
    _before_it_goes(monkeypatch, lambda: Workspace.delete(NAME))  # from another terminal
    delete(NAME, yes=True)
    assert NAME not in saved_names(Workspace)


def test_nothing_is_deleted_where_the_block_went_before_the_answer(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: str) -> str:
        Workspace.delete(NAME)
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", gone)
    with pytest.raises(InvalidInput, match="somebody has deleted it meanwhile"):
        delete(NAME)
    assert NAME not in saved_names(Workspace)


def test_nothing_is_deleted_where_a_snapshot_is_pinned_before_the_answer(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_snapshots(asleep, 2)
    newest = _stored(asleep)[-1]

    def pinned(_: str) -> str:
        run_plainly(asleep.opened, pin, newest, "the paper")
        return NAME

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", pinned)
    with pytest.raises(SnapshotKept, match=newest):
        delete(NAME, snapshots=True)
    assert NAME in saved_names(Workspace)
    assert len(_stored(asleep)) == 2
    run_plainly(asleep.opened, pin, newest, remove=True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_delete_whose_terminal_is_closed_saves_the_block_again(
    asleep: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    _with_snapshots(asleep, 2)
    ours = signal.signal(number, signal.SIG_DFL)  # nohup's Python ignores a SIGHUP
    monkeypatch.setattr("tasks.retention.tell_of_deletion", lambda *_: os.kill(os.getpid(), number))
    save = Workspace.save

    def hurried(block: Workspace, name: str, **how: Any) -> Any:
        os.kill(os.getpid(), number)  # a terminal says it twice
        return save(block, name, **how)

    monkeypatch.setattr(Workspace, "save", hurried)
    try:
        with pytest.raises(SystemExit):
            delete(NAME, snapshots=True, yes=True)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, ours)
    assert NAME in saved_names(Workspace)
    assert "Some of its snapshots may be deleted" in capsys.readouterr().err
    assert len(_stored(asleep)) == 1


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
    assert (
        f"`torpor init {NAME} --store {NAME}` brings its snapshots back" in capsys.readouterr().out
    )
    asleep.access.save_blocks(NAME)
    assert len(_stored(asleep)) == 1


def test_delete_takes_the_snapshots_too_where_its_user_says_its_name(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_snapshots(asleep, 2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    with pytest.raises(RunCancelled):
        delete(NAME, snapshots=True)
    assert len(_stored(asleep)) == 2
    monkeypatch.setattr("builtins.input", lambda asked: NAME)
    blocks.Workspace(name="beside", store=NAME).save("beside", overwrite=True)
    delete(NAME, snapshots=True)
    Workspace.delete("beside")
    assert NAME not in saved_names(Workspace)
    packs = [one.key for one in asleep.direct.list(packs_prefix(WorkspaceName(NAME)))]
    said = capsys.readouterr().out
    assert packs and f"below workspaces/{NAME}/packs/" in said
    assert "torpor prune" not in said and "empty" not in said
    asleep.access.save_blocks(NAME)
    assert _stored(asleep) == []


def test_delete_names_what_is_stored_of_a_home_beside_the_workspace(
    asleep: World, capsys: pytest.CaptureFixture[str]
) -> None:
    access = msgspec.structs.replace(asleep.access, store_key="ab" * 32, prefix="sealed/")
    sealed = replace(asleep, access=access)
    access.save_blocks(NAME)
    machine = sealed.rent().id
    (sealed.home(machine) / "train.py").write_bytes(b"mine")
    sealed.workspace(machine).mkdir()
    (sealed.workspace(machine) / "work").write_bytes(b"mine")
    hibernate_plainly(sealed.opened)
    assert len(_stored(sealed, f"home--{NAME}")) == 1
    delete(NAME, yes=True)
    (row,) = [one for one in capsys.readouterr().out.splitlines() if f"home--{NAME}" in one]
    assert row.split() == ["snapshots", "of", f"home--{NAME}:", "1", "kept"]
    access.save_blocks(NAME)
    delete(NAME, snapshots=True, yes=True)
    assert f"and workspaces/home--{NAME}/packs/" in capsys.readouterr().out
    access.save_blocks(NAME)
    assert _stored(sealed) == _stored(sealed, f"home--{NAME}") == []


def test_a_delete_that_is_stopped_is_finished_by_a_second_one(
    asleep: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_snapshots(asleep, 3)
    began = []

    def stopped(*at: object) -> None:
        began.append((NAME in saved_names(Workspace), at))
        if len(began) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tasks.retention.tell_of_deletion", stopped)
        with pytest.raises(KeyboardInterrupt):
            delete(NAME, snapshots=True, yes=True)
    assert [there for there, _ in began] == [False, False]  # no wake finds what is being deleted
    assert "is there as it was. Some of its snapshots may be deleted" in capsys.readouterr().err
    assert len(_stored(asleep)) == 1
    delete(NAME, snapshots=True, yes=True)
    asleep.access.save_blocks(NAME)
    assert _stored(asleep) == []


def test_delete_refuses_a_block_that_it_could_not_save_again(asleep: World) -> None:
    with get_client(sync_client=True) as client:
        saved = client.read_block_document_by_name(NAME, "workspace")
        newer = BlockDocumentUpdate(data={"newer": 1}, merge_existing_data=True)
        client.update_block_document(saved.id, newer)
    with pytest.raises(InvalidInput, match="no setting 'newer'"):
        delete(NAME, yes=True)
    assert NAME in saved_names(Workspace)
    Workspace.delete(NAME)  # of the tests that follow, none is about a newer version


def test_no_snapshot_goes_where_one_is_pinned_or_another_block_is_the_same_workspace(
    asleep: World,
) -> None:
    _with_snapshots(asleep, 2)
    oldest = _stored(asleep)[0]
    run_plainly(asleep.opened, pin, oldest, "the paper")
    with pytest.raises(SnapshotKept, match=f"nothing was deleted.*{oldest}"):
        delete(NAME, snapshots=True, yes=True)
    run_plainly(asleep.opened, pin, oldest, remove=True)
    same = Workspace.load(NAME)
    Workspace(**{name: getattr(same, name) for name in Workspace.model_fields}).save(
        "same", overwrite=True
    )
    with pytest.raises(InvalidInput, match="workspace/same is workspace"):
        delete(NAME, snapshots=True, yes=True)
    Workspace.delete("same")
    assert len(_stored(asleep)) == 2


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


def test_delete_leaves_the_schedules_of_another_block_of_the_same_workspace(asleep: World) -> None:
    of = Workspace.load(NAME)
    same = Workspace(**{name: getattr(of, name) for name in Workspace.model_fields})
    same.save("same", overwrite=True)
    with get_client(sync_client=True) as client:
        nightly = _deployed(client, NAME)
        try:
            delete("same", yes=True)
            assert len(client.read_deployment_schedules(nightly)) == 1
        finally:
            client.delete_deployment(nightly)


@pytest.mark.parametrize("by_schedule", [True, False])
def test_delete_refuses_under_a_schedule_that_lists_it(asleep: World, by_schedule: bool) -> None:
    listed = {"workspaces": ["another", f"workspace/{NAME}"]}
    with get_client(sync_client=True) as client:
        watch = _scheduled(
            client, "watch-two", {} if by_schedule else listed, listed if by_schedule else {}
        )
        try:
            with pytest.raises(InvalidInput, match="of-a-user/watch-two has it in `workspaces`"):
                delete(NAME, yes=True)
        finally:
            client.delete_deployment(watch)
    assert NAME in saved_names(Workspace)


def test_delete_does_nothing_where_its_schedules_changed_before_the_answer(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    with get_client(sync_client=True) as client:

        def meanwhile(asked: str) -> str:
            made.append(_deployed(client, NAME))
            return "y"

        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", meanwhile)
        with pytest.raises(WorkspaceAwake, match="schedules or its snapshots are others by now"):
            delete(NAME)
        assert len(client.read_deployment_schedules(made[0])) == 1
        client.delete_deployment(made[0])
    assert NAME in saved_names(Workspace)


def _deployed(client: SyncPrefectClient, workspace: str) -> UUID:
    return _scheduled(client, f"nightly-{workspace}", {"workspace": workspace}, {})


def _scheduled(
    client: SyncPrefectClient, name: str, parameters: dict[str, Any], scheduled: dict[str, Any]
) -> UUID:
    schedule = DeploymentScheduleCreate(
        schedule=IntervalSchedule(interval=PATIENCE_S),
        active=False,
        slug="nightly",
        parameters=scheduled,
    )
    return client.create_deployment(
        flow_id=client.create_flow(of_a_user),
        name=name,
        parameters=parameters,
        schedules=[schedule],
    )
