"""`torpor recover`, with a real Prefect server and a real store: a host that is gone is one whose
blocks are gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncssh
import msgspec
import pytest
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect_aws import AwsCredentials, MinIOCredentials

import blocks
from blocks import Budget, Idleness, ObjectStore, SSHIdentity, Tuning, VastProvider, Workspace
from blocks.reference import load_named, saved_names
from flows import prune
from tasks.workspace import OpenWorkspace
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.stores import RECORDS_KEY, Server
from tests.fixtures.world import World, make_world
from torpor.control.own_server import state_folder
from torpor.control.store.workspace_records import Settings, WorkspaceRecord, WorkspaceRecords
from torpor.shared.errors import InvalidInput, Recovered, StoreDenied
from torpor.shared.format.names import settings_key
from torpor.shared.values import WorkspaceName
from torpor_cli import setup
from torpor_cli.deletion import delete
from torpor_cli.exit_codes import FAILED
from torpor_cli.recovery import KEY_VARIABLE, recover

pytestmark = pytest.mark.rule(24)

NAME, MORE = "burnt-down", "burnt-more"
OTHER = "00000000"
KINDS: tuple[type[Block], ...] = (
    Budget, Workspace, SSHIdentity, Tuning, Idleness, VastProvider, blocks.LocalProvider,
    ObjectStore, MinIOCredentials, AwsCredentials,
)  # fmt: skip


@pytest.fixture(params=[True, False], ids=["sealed", "plain"])
def world(
    request: pytest.FixtureRequest, seaweed: Server, own_prefect_server: object
) -> Iterator[World]:
    with make_world(seaweed, sealed=request.param) as made:
        named = made.named(NAME)
        _burn()
        named.access.save_blocks(NAME)
        _as_torpor_made_it()
        Idleness(idle_minutes=77).save(NAME)
        change(NAME, idle=NAME)
        Budget(usd_month=70, workspaces=[NAME]).save(NAME)
        try:
            yield named
        finally:
            _burn()
            named.lose_machines()


@pytest.fixture
def sealed(seaweed: Server, own_prefect_server: object) -> Iterator[World]:
    with _sealed(seaweed) as made:
        yield made


@contextmanager
def _sealed(server: Server) -> Iterator[World]:
    with make_world(server, sealed=True) as made:
        named = made.named(NAME)
        _burn()
        named.access.save_blocks(NAME)
        _as_torpor_made_it()
        try:
            yield named
        finally:
            _burn()
            named.lose_machines()


def _as_torpor_made_it() -> None:
    """The key of the tests is kept as one that `torpor up` has made."""
    identity = SSHIdentity.load(NAME)
    identity.on_record = True
    identity.save(NAME, overwrite=True)


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
    for file in (state_folder() / "keys").rglob(NAME):
        file.unlink()


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


def _records(world: World) -> dict[WorkspaceName, WorkspaceRecord]:
    records = WorkspaceRecords(world.direct, world.opened.store_key)
    return records.read_all([WorkspaceName(one) for one in (NAME, MORE)], {})


def _kept(world: World) -> Settings:
    """What is on record of the workspace."""
    found = _records(world)[WorkspaceName(NAME)].settings
    assert found is not None
    return found


def _owned(world: World, side: str = OTHER) -> None:
    """Another control side recovers the workspace."""
    records = WorkspaceRecords(world.direct, world.opened.store_key)
    records.take(WorkspaceName(NAME), side, "elsewhere")


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
    said = msgspec.json.encode(_kept(world)).decode()
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
    SSHIdentity(private_key=text, passphrase="OPEN-SESAME", on_record=True).save(
        NAME, overwrite=True
    )
    before = _dumped(SSHIdentity, NAME)
    setup.keep_on_record(NAME)
    assert "OPEN-SESAME" not in str(_kept(sealed))
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    variable = "TORPOR_SSH_IDENTITY_BURNT_DOWN_PASSPHRASE"
    assert variable in capsys.readouterr().out
    assert NAME not in saved_names(SSHIdentity)
    monkeypatch.setenv(variable, "OPEN-SESAME")
    assert recover(store=NAME) == 0
    assert _dumped(SSHIdentity, NAME) == before
    SSHIdentity(private_key=text, passphrase="OPEN-SESAME").save(NAME, overwrite=True)
    setup.keep_on_record(NAME)  # a key of the user's own: only what torpor made is kept
    assert "PRIVATE KEY" not in str(_kept(sealed))


def test_an_address_of_a_market_that_is_not_its_own_is_shown_before_its_key_is_asked_for(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    VastProvider(api_key="KEY-OF-MARKET", url="https://gateway.example").save(NAME)
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    VastProvider.delete(NAME)  # type: ignore[unused-coroutine, unused-ignore]
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    monkeypatch.setenv("TORPOR_VAST_PROVIDER_BURNT_DOWN_API_KEY", "ANOTHER-KEY")
    sent: list[bool] = []
    monkeypatch.setattr(
        "torpor.control.providers.vast.VastProvider.check", lambda *_: sent.append(True)
    )
    assert recover(store=NAME) == FAILED  # nobody is at the terminal
    assert "https://gateway.example" in capsys.readouterr().out
    assert NAME not in saved_names(VastProvider)
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for says in (False, True):
        monkeypatch.setattr(
            "torpor_cli.recovery.agrees",
            lambda question: asked.append(question) or says,  # noqa: B023
        )
        assert recover(store=NAME) == (0 if says else FAILED)
        assert sent == [True] * says
    assert f"vast-provider/{NAME} sends its api_key to https://gateway.example" in asked[0]


def test_without_the_key_of_a_market_the_rest_is_made_and_the_command_again_makes_it_whole(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"HF_TOKEN": "TOKEN-OF-HUB"}  # which no line of text fills in
    VastProvider(api_key="KEY-OF-MARKET", ports=[8000], env=env).save(NAME)
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    said = capsys.readouterr().out
    variable = "TORPOR_VAST_PROVIDER_BURNT_DOWN_API_KEY"
    assert f"vast-provider/{NAME}: its api_key" in said
    assert variable in said
    assert Workspace.load(NAME).more_providers == [f"vast-provider/{NAME}"]
    assert f"{NAME} is not owned by this host yet: it has no vast-provider/{NAME}" in said
    assert _records(sealed)[WorkspaceName(NAME)].owner is None  # it cannot end its machines
    monkeypatch.setattr("torpor.control.providers.vast.VastProvider.check", lambda *_: None)
    _burn()
    here: list[list[str]] = []

    def asked(_: str) -> str:
        here.append([kind.__name__ for kind in KINDS if NAME in saved_names(kind)])
        return "ANOTHER-KEY"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", asked)
    assert _recover(sealed, monkeypatch, flavour="seaweedfs") == 0
    assert here == [[]]  # all is asked for before the first block is made
    made = VastProvider.load(NAME)
    assert (made.api_key.get_secret_value(), made.ports) == ("ANOTHER-KEY", [8000])
    assert f"vast-provider/{NAME} had env" in capsys.readouterr().out
    assert _records(sealed)[WorkspaceName(NAME)].owner is not None


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
        if NAME in saved_names(Workspace):  # which rents nothing without its budget
            assert NAME in saved_names(Budget)
        assert _recover(sealed, monkeypatch) == 0
        assert {kind: _dumped(kind, NAME) for kind in kinds} == before
    assert number > len(kinds)


def test_a_block_that_is_here_with_other_content_stays(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workspace's own, its identity, and a budget of that name, which would limit another."""
    Budget(usd_month=70, workspaces=[NAME]).save(NAME)
    setup.keep_on_record(NAME)
    old = SSHIdentity.load(NAME).private_key
    Budget.delete(NAME)  # type: ignore[unused-coroutine, unused-ignore]
    Budget(usd_month=7000, project="another").save(NAME)
    SSHIdentity.generate().save(NAME, overwrite=True)
    other = SSHIdentity.load(NAME).private_key
    change(NAME, paths=["~/another"])
    assert recover(store=NAME) == FAILED
    said = capsys.readouterr().out
    assert "with another identity, paths than the record" in said
    assert f"{NAME} is not owned by this host yet" in said
    here = Workspace.load(NAME)
    assert (here.paths, here.identity) == (["~/another"], NAME)
    Workspace.delete(NAME)  # type: ignore[unused-coroutine, unused-ignore]
    assert recover(store=NAME) == 0
    here = Workspace.load(NAME)
    assert here.paths == ["~/workspace"]
    assert here.identity.startswith(f"{NAME}-")  # beside the other one
    assert SSHIdentity.load(here.identity).private_key == old
    assert SSHIdentity.load(NAME).private_key == other
    budgets = [load_named(Budget, one, of="") for one in saved_names(Budget) if NAME in one]
    assert sorted((one.usd_month, *one.workspaces) for one in budgets) == [(70, NAME), (7000,)]


def test_a_workspace_that_is_made_on_a_new_host_first_leaves_what_the_lost_host_has_kept(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torpor init` there, with another identity and other paths: the machines that stand let only
    the old one in, and only the old paths have all of the work."""
    setup.keep_on_record(NAME)
    kept = _kept(sealed)
    side, old = OpenWorkspace.of(NAME).side, SSHIdentity.load(NAME).private_key
    _named(monkeypatch, OTHER)
    SSHIdentity.generate().save(NAME, overwrite=True)
    new = SSHIdentity.load(NAME).private_key
    change(NAME, paths=["~/another"])
    setup.keep_on_record(NAME)
    assert f"(control side {side}) wrote, and they stay" in capsys.readouterr().err
    assert recover(store=NAME) == FAILED
    assert "with another identity, paths than the record" in capsys.readouterr().out
    setup.keep_on_record(NAME)
    assert _kept(sealed) == kept
    delete(NAME, yes=True)
    assert recover(store=NAME) == 0
    setup.keep_on_record(NAME)
    assert Workspace.load(NAME).paths == ["~/workspace"]
    on_record = [fields.get("private_key") for fields in _kept(sealed).blocks.values()]
    here = [SSHIdentity.load(one).private_key for one in saved_names(SSHIdentity) if NAME in one]
    assert old.get_secret_value() in on_record
    assert {one.get_secret_value() for one in here} == {
        old.get_secret_value(),
        new.get_secret_value(),
    }


def test_a_key_that_is_here_under_another_name_is_not_made_again(sealed: World) -> None:
    """As where the other host gave it a name of its own, and this one takes the workspace back."""
    key = SSHIdentity.load(NAME).private_key
    SSHIdentity(private_key=key, on_record=True).save(MORE)
    change(NAME, identity=MORE)
    setup.keep_on_record(NAME)
    change(NAME, identity=NAME)
    SSHIdentity.delete(MORE)  # type: ignore[unused-coroutine, unused-ignore]
    _owned(sealed)
    assert recover(store=NAME) == 0
    assert [one for one in saved_names(SSHIdentity) if one in (NAME, MORE)] == [NAME]
    assert Workspace.load(NAME).identity == NAME


def test_two_workspaces_whose_blocks_had_one_name_both_come_back(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two hosts; the budget of the second one is for it."""
    setup.keep_on_record(NAME)
    change(NAME, name=MORE)
    Budget(usd_month=70, workspaces=[NAME]).save(NAME)
    setup.keep_on_record(NAME)
    _burn()
    assert _recover(sealed, monkeypatch) == 0
    names = {one: load_named(Workspace, one, of="") for one in saved_names(Workspace)}
    assert sorted(str(names[one].name) for one in names if NAME in one) == [NAME, MORE]
    before = sorted(names)
    assert recover(store=NAME) == 0
    assert sorted(saved_names(Workspace)) == before


def test_whoever_recovers_owns_the_workspace_and_a_look_changes_nothing(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.keep_on_record(NAME)
    _owned(sealed)
    with pytest.raises(Recovered, match=f"by elsewhere on .*torpor recover {NAME} --store {NAME}"):
        run_plainly(OpenWorkspace.of(NAME), prune, dry_run=False)
    with pytest.raises(Recovered):
        delete(NAME, yes=True, snapshots=True)
    assert NAME in saved_names(Workspace)
    before = _stored(sealed)
    capsys.readouterr()
    assert recover(NAME, store=NAME, dry_run=True) == 0
    assert "elsewhere since" in capsys.readouterr().out
    assert _stored(sealed) == before
    assert recover(NAME, store=NAME) == 0
    run_plainly(OpenWorkspace.of(NAME), prune, dry_run=False, without_snapshots=True)
    _burn()
    assert _recover(sealed, monkeypatch, dry_run=True) == 0
    assert NAME not in saved_names(Workspace)


def test_what_cannot_be_read_is_named_and_the_others_come_back(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Workspace(name=MORE, store=NAME, provider=f"local-provider/{NAME}", identity=NAME).save(MORE)
    setup.keep_on_record(NAME)
    setup.keep_on_record(MORE)
    key = settings_key(WorkspaceName(MORE))
    newer = msgspec.json.encode({"format": 2, "written_unix": time.time(), "later": True})
    sealed.direct.put(key, sealed.direct.signer.sign(key, newer))
    _burn()
    assert _recover(sealed, monkeypatch) == FAILED
    said = capsys.readouterr()
    assert f"{key} in " in said.err
    assert "format 2" in said.err
    assert [one for one in (NAME, MORE) if one in saved_names(Workspace)] == [NAME]


def test_a_record_that_cannot_be_written_leaves_the_others_to_be_owned(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nobody is left to believe that somebody looks after them: no `watch` runs here yet."""
    Workspace(name=MORE, store=NAME, provider=f"local-provider/{NAME}", identity=NAME).save(MORE)
    setup.keep_on_record(NAME)
    setup.keep_on_record(MORE)
    _burn()
    real = WorkspaceRecords.take

    def take(records: WorkspaceRecords, name: WorkspaceName, *by: str) -> None:
        if name == NAME:
            raise StoreDenied("the login may not write there")
        real(records, name, *by)

    monkeypatch.setattr(WorkspaceRecords, "take", take)
    assert _recover(sealed, monkeypatch) == FAILED
    said = capsys.readouterr().out
    assert f"{NAME} is not owned by this host yet: the login may not write there" in said
    assert f"owned here  {MORE}\n" in said
    assert "`torpor up --idle hibernate`" in said.partition("owned here")[2].splitlines()[1]
    owners = {name: record.owner for name, record in _records(sealed).items()}
    assert [name for name, owner in owners.items() if owner is not None] == [MORE]


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


def test_a_record_goes_with_the_snapshots_and_stays_without(sealed: World) -> None:
    setup.keep_on_record(NAME)
    before = _dumped(Workspace, NAME)
    delete(NAME, yes=True)
    assert [*_records(sealed)] == [NAME]
    assert recover(store=NAME) == 0
    assert _dumped(Workspace, NAME) == before
    delete(NAME, yes=True, snapshots=True)
    assert _records(sealed) == {}


def test_a_block_of_the_store_that_is_another_one_than_the_options_say_is_not_used(
    sealed: World,
) -> None:
    setup.keep_on_record(NAME)
    for options in (
        {"bucket": "another"},
        {"endpoint": "http://127.0.0.1:1"},
        {"prefix": "another"},
        {"plain": True},
    ):
        with pytest.raises(InvalidInput, match=f"another {next(iter(options))}"):
            recover(store=NAME, **options)  # type: ignore[arg-type]


def test_a_project_s_budget_names_what_it_does_not_count(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After only one of its workspaces was recovered."""
    change(NAME, project="p")
    more = Workspace(name=MORE, store=NAME, provider=f"local-provider/{NAME}", identity=NAME)
    more.project = "p"
    more.save(MORE)
    Budget(usd_month=70, project="p").save(NAME)
    setup.keep_on_record(NAME)
    setup.keep_on_record(MORE)
    _burn()
    assert _recover(sealed, monkeypatch, NAME) == FAILED
    assert f"does not count what workspace {MORE} costs" in capsys.readouterr().out
    assert recover(MORE, store=NAME) == 0


def test_fields_that_a_newer_torpor_kept_are_named(
    sealed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else of the record this one can make."""
    opened = OpenWorkspace.of(NAME)
    settings = opened.settings()
    assert settings is not None
    fields = settings.blocks[settings.reference] | {"hovers": True}
    newer = msgspec.structs.replace(settings, blocks=settings.blocks | {settings.reference: fields})
    records = WorkspaceRecords(sealed.direct, opened.store_key)
    records.keep(WorkspaceName(NAME), newer, OTHER, "newer", _raise)
    _burn()
    assert _recover(sealed, monkeypatch) == 0
    assert "does not know its setting hovers" in capsys.readouterr().out


def _raise(error: Exception) -> None:
    raise error


def test_a_market_s_block_that_is_here_may_be_of_another_account(
    sealed: World, capsys: pytest.CaptureFixture[str]
) -> None:
    VastProvider(api_key="KEY-OF-MARKET").save(NAME)
    change(NAME, more_providers=[f"vast-provider/{NAME}"])
    setup.keep_on_record(NAME)
    assert recover(store=NAME) == 0
    assert f"vast-provider/{NAME} is here already, and whether its api_key" in (
        capsys.readouterr().out
    )


def test_a_control_side_that_cannot_say_its_name_opens_no_workspace(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variable at the Prefect server was changed by hand; where it is missing, it is made, or
    has been made meanwhile."""
    name = OpenWorkspace.of(NAME).side
    assert len(name) == 8
    _named(monkeypatch, "no name")
    with pytest.raises(InvalidInput, match="torpor_control_side"):
        OpenWorkspace.of(NAME)
    monkeypatch.undo()
    _named(monkeypatch, None)
    assert OpenWorkspace.of(NAME).side == name


def _named(monkeypatch: pytest.MonkeyPatch, side: str | None) -> None:
    """The next look at the variable that names this control side finds this, and with None, nothing
    once. The variable itself is all tests' of this server."""
    real, first = SyncPrefectClient.read_variable_by_name, [True]

    def read(client: SyncPrefectClient, name: str) -> Any:
        found = real(client, name)
        if side is None:
            return None if first and first.pop() else found
        assert found is not None
        return found.model_copy(update={"value": side})

    monkeypatch.setattr(SyncPrefectClient, "read_variable_by_name", read)
