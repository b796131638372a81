"""`torpor init`: names that people use, answers checked at once, and nothing left after a no."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect_aws import AwsCredentials

import blocks
from blocks import ObjectStore, Workspace
from blocks.reference import saved_names
from deployments.installation import secret_file
from deployments.server import Server
from tests.fixtures.world import World
from torpor.control.own_server import FOLDER_VARIABLE, state_folder
from torpor.shared.errors import InvalidInput, ProviderDenied, RunCancelled, TorporError
from torpor_cli import setup

NAME = "first-evening"


@pytest.fixture
def nothing(prefect_server: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server without blocks of that name, before and after."""
    monkeypatch.setenv(setup.STORE_VARIABLE, "wrong")
    _forget()
    yield
    _forget()


def _forget() -> None:
    for kind in (Workspace, ObjectStore, AwsCredentials):
        with suppress(ValueError):
            kind.delete(NAME)
    with suppress(ValueError):
        blocks.VastProvider.delete("default")
    for key in _keys():
        key.unlink()


def _left() -> list[str]:
    kinds: list[Any] = [Workspace, ObjectStore, AwsCredentials]
    found = [kind.__name__ for kind in kinds if NAME in saved_names(kind)]
    if "default" in saved_names(blocks.VastProvider):
        found.append("VastProvider")
    return found


def _of(world: World) -> dict[str, Any]:
    return {
        "flavour": "other",
        "bucket": world.access.bucket,
        "endpoint": world.access.endpoint_url,
        "access_key": world.access.access_key,
        "path": ["~/w"],
        "gpu": "none",
    }


def test_a_refused_key_of_a_market_leaves_no_block_of_the_store(
    nothing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    monkeypatch.setenv(setup.MARKET_VARIABLE, "refused")

    def refused(image: str) -> None:
        raise ProviderDenied("Vast.ai refuses the key")

    market = SimpleNamespace(check=refused)
    monkeypatch.setattr("blocks.VastProvider.open", lambda block: market)
    with pytest.raises(ProviderDenied, match="refuses the key"):
        setup.init(NAME, market="vast", **_of(world))
    assert _left() == []


def test_a_refused_store_and_an_interrupt_leave_no_block(
    nothing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TorporError):
        setup.init(NAME, market="local", **_of(world))  # the secret is wrong
    assert _left() == []
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)

    monkeypatch.setattr("torpor_cli.setup.try_market", partial(_raise, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        setup.init(NAME, market="local", **_of(world))
    assert _left() == []


def test_the_key_of_a_refused_store_stays_for_whoever_has_stored_with_it(
    nothing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another terminal may have made a workspace of that store meanwhile, and hibernated it."""
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    with monkeypatch.context() as patch:
        patch.setattr("torpor_cli.setup.try_market", partial(_raise, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            setup.init(NAME, market="local", **_of(world))
    (key,) = _keys()
    made = key.read_text()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr("torpor_cli.setup.try_market", partial(_raise, KeyboardInterrupt))
        setup.init(NAME, market="local", **_of(world))
    assert key.read_text() == made


@pytest.mark.rule(9)
def test_a_server_elsewhere_never_gets_a_key_that_this_host_has_for_another_one(
    nothing: None,
    prefect_server: Server,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its users could read what this host's own store, or another server's, has under the name. Nor
    is another key made beside it: earlier versions kept the keys of each server there."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    own = secret_file(tmp_path / "keys" / NAME, _new_key)
    answers: dict[str, Any] = {"provider": _local(world), "max_price": 0.0, **_of(world)}
    monkeypatch.setattr("torpor_cli.setup.answer", partial(_raise, AssertionError))
    with pytest.raises(InvalidInput, match=f"{tmp_path / 'keys' / NAME} is a key"):
        setup.init(NAME, **{**answers, "bucket": ""})  # before anything is asked
    assert _left() == []
    (tmp_path / "keys" / NAME).rename(tmp_path / "moved")
    with pytest.raises(TorporError):
        setup.init(NAME, **answers)  # the secret is wrong
    assert _keys() == []  # else no other try of that name would do
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    setup.init(NAME, **answers)
    sealed = ObjectStore.load(NAME).encryption_key
    assert sealed is not None and sealed.get_secret_value() != own
    (file,) = (tmp_path / "keys").glob(f"*/{NAME}")
    assert file.read_text().strip() == sealed.get_secret_value()
    for kind in (Workspace, ObjectStore, AwsCredentials):
        kind.delete(NAME)
    # With `ssh -L`, another server may have the same address of this host now.
    kept = {"api_url": prefect_server.api_url, "login": prefect_server.login}
    (tmp_path / "connection").write_text(json.dumps(kept))
    monkeypatch.setattr(setup, "connected", nullcontext)  # it is already
    with pytest.raises(InvalidInput, match=f"{file} is a key"):
        setup.init(NAME, **answers)
    assert _left() == []


def _keys() -> list[Path]:
    return [*(state_folder() / "keys").rglob(NAME)]


def _new_key() -> str:
    return ObjectStore.new_encryption_key().get_secret_value()


def test_nothing_stays_where_the_answer_to_a_save_of_a_block_cannot_be_read(
    nothing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    real = Workspace.save

    def unread(block: Workspace, name: str, **how: Any) -> None:
        real(block, name, **how)
        raise ValueError("the answer is no JSON")

    monkeypatch.setattr(Workspace, "save", unread)
    with pytest.raises(ValueError, match="no JSON"):
        setup.init(NAME, provider=_local(world), max_price=0.0, **_of(world))
    assert _left() == []


def test_a_workspace_that_somebody_has_just_saved_under_the_name_stays(
    nothing: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setup.STORE_VARIABLE, world.access.secret_key)
    real = Workspace.save

    def late(block: Workspace, name: str, **how: Any) -> None:
        real(Workspace(name=NAME, paths=["~/of-another-terminal"]), name)
        real(block, name, **how)

    monkeypatch.setattr(Workspace, "save", late)
    with pytest.raises(InvalidInput, match=f"somebody has just saved a block workspace/{NAME}"):
        setup.init(NAME, provider=_local(world), max_price=0.0, **_of(world))
    assert _left() == ["Workspace"]
    assert Workspace.load(NAME).paths == ["~/of-another-terminal"]


def _local(world: World) -> str:
    blocks.LocalProvider(folder=world.access.machines).save(f"{NAME}-here", overwrite=True)
    return f"local-provider/{NAME}-here"


def _raise(error: type[BaseException], *_: object) -> None:
    raise error


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The answers of a person at the terminal, in this order; the input ends after the last."""
    answers: list[str] = []

    def answered(question: str) -> str:
        print(question)
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr("torpor_cli.setup.connected", nullcontext)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answered)
    return answers


def test_each_answer_that_does_not_do_is_asked_again_at_once(
    answering: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answering += ["My Work", "mywork", "floppy", "r2", "b", "my-bucket"]
    answering += ["https://example.com", f"https://{'a' * 32}.r2.cloudflarestorage.com", ""]
    with pytest.raises(RunCancelled, match="the input ended before an answer"):
        setup.init()
    said = "".join(capsys.readouterr())
    assert "'My Work'" in said
    assert "'floppy' is none of s3" in said
    assert "'b' is not the name of a bucket" in said
    assert "an answer is needed" in said
    assert "example.com is not a host of flavour cloudflare-r2" in said
    assert "https://dash.cloudflare.com" in said
    assert "Id of the access key" in said


@pytest.mark.parametrize(
    ("given", "asks"),
    [("b2", "backblaze.com"), ("S3", "aws.amazon.com"), ("wasabi", "wasabisys.com")],
)
def test_a_kind_of_store_by_its_short_name_says_where_its_keys_are_made(
    answering: list[str], capsys: pytest.CaptureFixture[str], given: str, asks: str
) -> None:
    with pytest.raises(RunCancelled):
        setup.init("mywork", flavour=given, bucket="my-bucket", region="us-west-004")
    assert asks in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("market", "asks"), [("vast.ai", "cloud.vast.ai/manage-keys"), ("Lambda", "cloud.lambda.ai")]
)
def test_a_market_by_another_name_says_where_its_key_is_made(
    answering: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    market: str,
    asks: str,
) -> None:
    def ended(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("getpass.getpass", ended)
    monkeypatch.setattr("torpor_cli.setup.try_store", lambda name: None)
    with pytest.raises(RunCancelled):
        setup.init("mywork", store="default", market=market)
    assert asks in "".join(capsys.readouterr())


def test_an_option_that_does_not_do_is_refused_without_a_question(answering: list[str]) -> None:
    for given, says in (
        ({"flavour": "floppy"}, "none of s3"),
        ({"flavour": "default"}, "none of s3"),
        ({"store": "default", "market": "flea"}, "none of vast"),
        (
            {"flavour": "r2", "bucket": "my-bucket", "endpoint": "https://example.com"},
            "not a host of",
        ),
        ({"flavour": "b2", "bucket": "my-bucket", "endpoint": "ftp://x"}, "not an endpoint"),
    ):
        with pytest.raises(InvalidInput, match=says), pytest.MonkeyPatch.context() as patch:
            patch.setattr("torpor_cli.setup.try_store", lambda name: None)
            setup.init("mywork", **given)  # type: ignore[arg-type]


def test_a_home_that_the_shell_has_put_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    setup.say_of_this_home(["~/a", "/data", f"{tmp_path}/work"])
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "write ~ in quotes: '~/work'" in said
