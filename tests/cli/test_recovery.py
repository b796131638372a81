"""`torpor recover`, with a real Prefect server and a real store: a host that is gone is one whose
blocks are gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import asyncssh
import msgspec
import pytest
from prefect.blocks.core import Block
from prefect.variables import Variable
from prefect_aws import AwsCredentials, MinIOCredentials

import blocks
from blocks import Budget, Idleness, ObjectStore, SSHIdentity, Tuning, VastProvider, Workspace
from blocks.reference import load_named, saved_names
from flows import hibernate, watch
from tasks.workspace import OpenWorkspace
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over
from tests.fixtures.stores import RECORDS_KEY, Server
from tests.fixtures.world import World, make_world
from torpor.control.own_server import state_folder
from torpor.control.store.block_records import (
    DAY_S,
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
)
from torpor.shared.errors import InvalidInput, StoreUnavailable, UnsavedWork
from torpor.shared.values import StoredObject, WorkspaceName
from torpor_cli import setup
from torpor_cli.deletion import delete
from torpor_cli.exit_codes import FAILED
from torpor_cli.recovery import KEY_VARIABLE, recover
from torpor_cli.settings import edit

pytestmark = pytest.mark.rule(24)

NAME, MORE = "burnt-down", "burnt-more"
OTHER = "00000000"
KINDS: tuple[type[Block], ...] = (
    Budget, Workspace, SSHIdentity, Tuning, Idleness, VastProvider, blocks.LocalProvider,
    ObjectStore, MinIOCredentials, AwsCredentials,
)  # fmt: skip


@pytest.fixture(params=[True, False], ids=["sealed", "plain"])
def world(
    request: pytest.FixtureRequest, seaweed: Server, prefect_server: object
) -> Iterator[World]:
    with make_world(seaweed, sealed=request.param) as made:
        named = made.named(NAME)
        _burn()
        named.access.save_blocks(NAME)
        Idleness(idle_minutes=77).save(NAME)
        change(NAME, idle=NAME)
        Budget(usd_month=70, workspaces=[NAME]).save(NAME)
        try:
            yield named
        finally:
            _burn()
            named.lose_machines()


@pytest.fixture
def sealed(seaweed: Server, prefect_server: object) -> Iterator[World]:
    with _sealed(seaweed) as made:
        yield made


@contextmanager
def _sealed(server: Server) -> Iterator[World]:
    with make_world(server, sealed=True) as made:
        named = made.named(NAME)
        _burn()
        named.access.save_blocks(NAME)
        try:
            yield named
        finally:
            _burn()
            named.lose_machines()


def change(name: str, /, **settings: Any) -> None:
    block = Workspace.load(name)
    for field, value in settings.items():
        setattr(block, field, value)
    block.save(name, overwrite=True)


def _burn(keep: tuple[type[Block], ...] = ()) -> None:
    """The host is gone with all of its blocks."""
    for kind in KINDS:
        names = [one for one in saved_names(kind) if one.startswith((NAME, MORE))]
        for name in names if kind not in keep else []:
            kind.delete(name)
    with suppress(FileNotFoundError):
        (state_folder() / "keys" / NAME).unlink()


def _recover(world: World, monkeypatch: pytest.MonkeyPatch, *names: str, **options: Any) -> int:
    """As somebody does who has the bucket's address, its login and its key."""
    access = world.access
    monkeypatch.setenv(setup.STORE_VARIABLE, access.secret_key)
    monkeypatch.setenv(KEY_VARIABLE, access.store_key or RECORDS_KEY.hex())
    given: dict[str, Any] = {
        "store": NAME,
        "bucket": access.bucket,
        "endpoint": access.endpoint_url,
        "prefix": access.prefix,
        "access_key": access.access_key,
        "plain": access.store_key is None,
        **options,
    }
    return recover(*names, **given)


def _stored(world: World) -> bytes:
    """All that the bucket has of settings."""
    return b"".join(
        world.direct.get(one.key, max_bytes=1 << 20) for one in world.direct.list("settings/")
    )


def _counted(world: World) -> list[str]:
    """The workspaces that have settings on record, as `recover` finds them."""
    return [record.workspace for record in _records(world)]


def _records(world: World) -> list[BlockRecord]:
    records = BlockRecords(world.direct, world.opened.store_key)
    names = [WorkspaceName(one) for one in (NAME, MORE)]
    return [*records.read_all(records.listed(*names), {}).values()]


def _dumped(kind: type[Block], name: str) -> dict[str, Any]:
    block = load_named(kind, name, of="")
    return {field: str(getattr(block, field)) for field in kind.model_fields}


def test_a_bare_host_has_the_workspace_again_and_its_machine_ends_with_proof(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = world.rent()
    home = world.workspace(machine.id)
    home.mkdir()
    (home / "work").write_bytes(b"mine")
    setup.keep_on_record(NAME)
    before = {kind: _dumped(kind, NAME) for kind in (Workspace, Idleness, Budget, Tuning)}
    key = SSHIdentity.load(NAME).private_key
    _burn(keep=() if world.access.store_key else (SSHIdentity,))
    assert _recover(world, monkeypatch) == 0
    after = {kind: _dumped(kind, NAME) for kind in before}
    assert after == before
    assert SSHIdentity.load(NAME).private_key == key
    opened = OpenWorkspace.of(NAME)
    hibernate_plainly(opened)
    assert world.machines() == []
    woken = wake_plainly(opened)
    assert (world.workspace(woken.machine) / "work").read_bytes() == b"mine"  # type: ignore[arg-type]


def test_no_secret_but_the_login_to_machines_is_in_a_bucket_and_that_only_sealed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    VastProvider(api_key="KEY-OF-MARKET", env={"HF_TOKEN": "TOKEN-OF-HUB"}).save(NAME)
    change(NAME, programs=["serve --token TOKEN-IN-LINE"], more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    bucket = _stored(world)
    assert bucket
    found = BlockRecords(world.direct, OpenWorkspace.of(NAME).store_key)
    (record,) = found.read_all(found.listed(WorkspaceName(NAME)), {}).values()
    said = msgspec.json.encode(record).decode()
    access = world.access
    never = [access.secret_key, access.records_key.hex(), "KEY-OF-MARKET", "TOKEN-OF-HUB"]
    assert not [one for one in never if one in said or one.encode() in bucket]
    only_sealed = ["PRIVATE KEY", "TOKEN-IN-LINE"]
    assert not [one for one in only_sealed if one.encode() in bucket]
    assert [one in said for one in only_sealed] == 2 * [access.store_key is not None]


def test_the_passphrase_of_an_identity_is_asked_for_and_its_key_stays_away_on_request(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    text = key.export_private_key(passphrase="OPEN-SESAME").decode()
    SSHIdentity(private_key=text, passphrase="OPEN-SESAME").save(NAME, overwrite=True)
    before = _dumped(SSHIdentity, NAME)
    setup.keep_on_record(NAME)
    (settings,) = (one.settings for one in _records(sealed))
    assert "OPEN-SESAME" not in str(settings)
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    variable = "TORPOR_SSH_IDENTITY_BURNT_DOWN_PASSPHRASE"
    assert variable in capsys.readouterr().out
    assert NAME not in saved_names(SSHIdentity)
    monkeypatch.setenv(variable, "OPEN-SESAME")
    assert recover(store=NAME) == 0
    assert _dumped(SSHIdentity, NAME) == before
    own = SSHIdentity.load(NAME)
    own.on_record = False
    own.save(NAME, overwrite=True)
    setup.keep_on_record(NAME)
    (settings,) = (one.settings for one in _records(sealed))
    assert "PRIVATE KEY" not in str(settings)


def test_an_address_of_a_market_that_is_not_its_own_is_shown_before_its_key_is_asked_for(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    VastProvider(api_key="KEY-OF-MARKET", url="https://gateway.example").save(NAME)
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    VastProvider.delete(NAME)  # type: ignore[unused-coroutine, unused-ignore]
    shown: list[str] = []

    def asked(prompt: str) -> str:
        shown.append(capsys.readouterr().out)
        return ""

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", asked)
    assert recover(store=NAME) == FAILED
    assert f"vast-provider/{NAME} sends what you give to https://gateway.example" in shown[0]


def test_without_the_key_of_a_market_the_rest_is_made_and_the_command_again_makes_it_whole(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    VastProvider(api_key="KEY-OF-MARKET", ports=[8000]).save(NAME)
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    said = capsys.readouterr().out
    variable = "TORPOR_VAST_PROVIDER_BURNT_DOWN_API_KEY"
    assert f"vast-provider/{NAME}: its api_key" in said
    assert variable in said
    assert Workspace.load(NAME).more_providers == [f"vast-provider/{NAME}"]
    assert _stored(sealed)  # what only the record knows is still there
    monkeypatch.setenv(variable, "ANOTHER-KEY")
    monkeypatch.setattr("torpor.control.providers.vast.VastProvider.check", lambda *_: None)
    assert recover(store=NAME) == 0
    made = VastProvider.load(NAME)
    assert (made.api_key.get_secret_value(), made.ports) == ("ANOTHER-KEY", [8000])


def test_what_no_option_gives_is_asked_with_the_questions_of_init(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.keep_on_record(NAME)
    _burn()
    answers = {"Address": sealed.access.endpoint_url, "Id of": sealed.access.access_key}
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        (given,) = [text for begin, text in answers.items() if question.startswith(begin)]
        return given

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("torpor_cli.setup.answer", answer)
    assert _recover(sealed, monkeypatch, endpoint="", access_key="", flavour="minio") == 0
    assert [question.split()[0] for question in asked] == ["Address,", "Id"]
    assert NAME in saved_names(Workspace)


def test_killed_at_each_save_the_command_again_makes_it_whole(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Budget(usd_month=70, workspaces=[NAME]).save(NAME)
    setup.keep_on_record(NAME)
    kinds = (Workspace, SSHIdentity, Tuning, blocks.LocalProvider, Budget)
    before = {kind: _dumped(kind, NAME) for kind in kinds}
    real = Block.save
    number, killed = 0, True
    while killed:
        number += 1
        count = 0
        _burn()

        def dies(block: Block, *asked: Any, **how: Any) -> Any:
            nonlocal count
            count += 1
            done = real(block, *asked, **how)
            if count == number:  # noqa: B023
                raise KeyboardInterrupt
            return done

        with monkeypatch.context() as patch:
            patch.setattr(Block, "save", dies)
            killed = False
            try:
                _recover(sealed, monkeypatch)
            except KeyboardInterrupt:
                killed = True
        assert _recover(sealed, monkeypatch) == 0
        assert {kind: _dumped(kind, NAME) for kind in kinds} == before
    assert number > len(kinds)


def test_a_block_that_is_here_with_other_content_stays(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.keep_on_record(NAME)
    before = OpenWorkspace.of(NAME).settings()
    assert before is not None
    old = SSHIdentity.load(NAME).private_key
    SSHIdentity.generate().save(NAME, overwrite=True)
    other = SSHIdentity.load(NAME).private_key
    change(NAME, paths=["~/another"])
    assert recover(store=NAME) == FAILED
    assert "paths" in capsys.readouterr().out
    here = Workspace.load(NAME)
    assert (here.paths, here.identity) == (["~/another"], NAME)
    assert SSHIdentity.load(NAME).private_key == other
    delete(NAME, yes=True)
    _kept_elsewhere(sealed, before)  # as the host that lives writes it
    assert recover(store=NAME) == 0
    here = Workspace.load(NAME)
    assert here.paths == ["~/workspace"]
    assert here.identity.startswith(f"{NAME}-")  # beside the other one
    assert SSHIdentity.load(here.identity).private_key == old
    assert SSHIdentity.load(NAME).private_key == other


def _kept_elsewhere(world: World, settings: Settings, side: str = OTHER) -> None:
    """What another control side records."""
    records = BlockRecords(world.direct, world.opened.store_key)
    records.keep(WorkspaceName(NAME), settings, side, "elsewhere")


def test_recover_changes_nothing_in_the_bucket_of_a_host_that_lives(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.keep_on_record(NAME)
    _burn()
    before = {one.key: sealed.direct.get(one.key, max_bytes=1 << 20) for one in _all(sealed)}
    assert _recover(sealed, monkeypatch) == 0
    after = {one.key: sealed.direct.get(one.key, max_bytes=1 << 20) for one in _all(sealed)}
    assert after == before


def _all(world: World) -> list[StoredObject]:
    return [*world.direct.list("")]


def test_what_cannot_be_read_is_named_and_the_others_come_back(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Workspace(name=MORE, store=NAME, provider=f"local-provider/{NAME}", identity=NAME).save(MORE)
    setup.keep_on_record(NAME)
    setup.keep_on_record(MORE)
    key = record_key(WorkspaceName(MORE), OpenWorkspace.of(MORE).side, MORE)
    newer = msgspec.json.encode({"format": 2, "written_unix": time.time(), "later": True})
    sealed.direct.put(key, sealed.direct.signer.sign(key, newer))
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    said = capsys.readouterr()
    assert f"{key} in " in said.err
    assert "format 2" in said.err
    assert [one for one in (NAME, MORE) if one in saved_names(Workspace)] == [NAME]


def test_a_budget_for_a_workspace_that_is_nowhere_lets_nothing_be_rented(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Workspace(name=MORE, store=NAME, provider=f"local-provider/{NAME}", identity=NAME).save(MORE)
    Budget(usd_month=70, workspaces=[NAME, MORE]).save(NAME)
    setup.keep_on_record(NAME)
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    assert MORE in capsys.readouterr().out
    assert MORE in Budget.load(NAME).open().trouble


def test_a_wrong_key_is_refused_before_anything_is_saved(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.keep_on_record(NAME)
    _burn()
    wrong = msgspec.structs.replace(sealed.access, store_key=bytes(32).hex())
    sealed.access = wrong
    with pytest.raises(InvalidInput, match="has signed none"):
        _recover(sealed, monkeypatch)
    assert not [kind for kind in KINDS if NAME in saved_names(kind)]


def test_a_deleted_workspace_and_one_that_went_to_another_store_do_not_come_back(
    sealed: World, seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_world(seaweed, sealed=True) as second:
        second.named(MORE).access.save_blocks(MORE)
        setup.keep_on_record(NAME)
        edit(NAME, f"store={MORE}")
        assert _counted(sealed) == []
        assert _counted(second) == [NAME]
        edit(NAME, f"store={NAME}")
        assert (_counted(sealed), _counted(second)) == ([NAME], [])
        late = OpenWorkspace.of(NAME)
        _kept_elsewhere(sealed, msgspec.structs.replace(_settings(late), block="theirs"))
        delete(NAME, yes=True)
        assert _counted(sealed) == [NAME]  # the other host's


def _settings(opened: OpenWorkspace) -> Settings:
    found = opened.settings()
    assert found is not None
    return found


def test_a_deletion_goes_on_where_the_settings_cannot_be_withdrawn(
    sealed: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.keep_on_record(NAME)
    side = OpenWorkspace.of(NAME).side
    with monkeypatch.context() as patch:
        patch.setattr(BlockRecords, "withdraw", _away)
        delete(NAME, yes=True)
    assert NAME not in saved_names(Workspace)
    assert f"`torpor recover {NAME} --store {NAME} --retire {side}` does" in caplog.text
    assert recover(NAME, store=NAME, retire=side) == 0
    assert _counted(sealed) == []


def test_an_edit_goes_on_where_the_settings_cannot_be_withdrawn_from_the_store_that_is_left(
    sealed: World,
    seaweed: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_world(seaweed, sealed=True) as second:
        second.named(MORE).access.save_blocks(MORE)
        setup.keep_on_record(NAME)
        side = OpenWorkspace.of(NAME).side
        monkeypatch.setattr(BlockRecords, "withdraw", _away)
        edit(NAME, f"store={MORE}")
        assert Workspace.load(NAME).store == MORE
        assert f"`torpor recover {NAME} --store {NAME} --retire {side}` does" in caplog.text
        assert (_counted(sealed), _counted(second)) == ([NAME], [NAME])


def _away(*_: object) -> None:
    raise StoreUnavailable("it is away")


def test_a_control_side_without_a_readable_name_writes_nothing_and_says_so(
    sealed: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its variable at the Prefect server was changed by hand."""
    name = OpenWorkspace.of(NAME).side
    Variable.set("torpor_control_side", "no name", overwrite=True)
    try:
        setup.keep_on_record(NAME)
        assert (OpenWorkspace.of(NAME).side, _counted(sealed)) == ("", [])
        assert "torpor_control_side" in caplog.text
    finally:
        Variable.set("torpor_control_side", name, overwrite=True)
    setup.keep_on_record(NAME)
    assert [one.side for one in _records(sealed)] == [name]


def test_the_last_workspace_of_a_store_that_was_deleted_on_the_page_blocks_does_not_come_back(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store has no other one."""
    setup.keep_on_record(NAME)
    Workspace.delete(NAME)  # type: ignore[unused-coroutine, unused-ignore]
    watch(dry_run=False)
    assert _counted(sealed) == [NAME]
    now = time.time
    monkeypatch.setattr("tasks.block_record.time.time", lambda: now() + DAY_S + 1)
    watch(dry_run=False)
    assert _counted(sealed) == []


def test_a_block_that_was_renamed_on_the_page_blocks_comes_back_as_it_was_last(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.keep_on_record(NAME)
    change(NAME, name=MORE)
    setup.keep_on_record(NAME)
    _burn()
    assert _recover(sealed, monkeypatch) == 0
    assert Workspace.load(NAME).name == MORE


def test_a_host_with_other_settings_ends_no_machine_until_its_user_has_chosen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old host still runs, and the new one has edited what is stored."""
    setup.keep_on_record(NAME)
    machine, _ = handed_over(world.opened)
    world.workspace(machine.id).mkdir()
    (world.workspace(machine.id) / "work").write_bytes(b"mine")
    opened = OpenWorkspace.of(NAME)
    settings = _settings(opened)
    theirs = msgspec.structs.replace(
        settings, stored=settings.stored | {"paths": ["~/workspace", "/data"]}
    )
    _kept_elsewhere(world, theirs)
    with pytest.raises(UnsavedWork, match=r"other settings .*\(paths\)"):
        run_plainly(opened, hibernate)
    assert len(world.machines()) == 1
    assert len(world.snapshots()) == 1  # what it knows is stored
    assert recover(store=NAME, retire=OTHER) == 0
    run_plainly(opened, hibernate)
    assert world.machines() == []
