"""The blocks of markets that know an account by an API key."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.types import SecretDict
from pydantic import SecretStr, ValidationError

import blocks
from blocks import markets
from blocks.reference import load_named
from deployments.server import Server
from tests.markets.every import KEYED, Keyed
from torpor.shared.errors import InvalidInput


@pytest.mark.parametrize("keyed", KEYED)
def test_a_changed_key_changes_no_account_that_its_block_names(keyed: Keyed) -> None:
    before = keyed(api_key=SecretStr("one")).open().identity
    assert keyed(api_key=SecretStr("two")).open().identity != before
    assert keyed(api_key=SecretStr("two"), account=f" {before} ").open().identity == before


def test_an_account_is_named_as_reconcile_names_it() -> None:
    with pytest.raises(ValidationError, match="copy it from reconcile"):
        blocks.VastProvider(api_key=SecretStr("one"), account="me@example.com")


@pytest.mark.rule(5)
def test_a_name_that_another_block_has_or_is_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, other = SecretStr("old"), SecretStr("other")
    name = blocks.VastProvider(api_key=old).open().identity
    saved = {"mine": blocks.VastProvider(api_key=old)}
    monkeypatch.setattr(
        markets, "saved_names_of", lambda kinds: [(blocks.VastProvider, one) for one in saved]
    )
    monkeypatch.setattr(markets, "load_named", lambda kind, name, of: saved[name])
    claims = blocks.VastProvider(api_key=other, account=name)
    with pytest.raises(InvalidInput, match="is the account of the block vast-provider/mine"):
        markets.check_account_name(claims)
    saved["mine"] = blocks.VastProvider(api_key=SecretStr("third"), account=name)
    with pytest.raises(InvalidInput, match="two accounts cannot share a name"):
        markets.check_account_name(claims)
    saved["mine"] = claims  # its own record, or a second block of the same key
    markets.check_account_name(claims)
    assert claims.open().claimed
    assert not blocks.VastProvider(api_key=old, account=name).open().claimed


CANARY = "canary-value"
CONTAINERS: list[tuple[Any, dict[str, Any]]] = [
    (blocks.VastProvider, {"api_key": SecretStr("one")}),
    (blocks.RunpodProvider, {"api_key": SecretStr("one")}),
    (blocks.KubernetesProvider, {"kubeconfig": SecretStr("none"), "price_usd_h": 1.0}),
]


@pytest.mark.parametrize(("kind", "needed"), CONTAINERS)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"env": {"PATH": CANARY}}, "env: a container cannot be given the variable 'PATH'"),
        ({"env": {"TOKEN": f"{CANARY}\n"}}, "the value of TOKEN must be one line"),
        ({"ports": [22]}, "SSH has it"),
        ({"ports": [70000]}, "from 1 to 65535"),
        ({"volumes": ["12345:data"]}, "is no volume"),
        ({"volumes": ["12345:/etc"]}, "hides a folder of the system"),
    ],
)
def test_what_a_container_cannot_have_is_refused_without_its_value(
    kind: Any, needed: dict[str, Any], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told) as raised:
        kind(**needed, **given)
    assert CANARY not in str(raised.value)


def test_a_login_that_docker_does_not_take_is_refused_without_its_text() -> None:
    key = SecretStr("one")
    with pytest.raises(ValidationError, match="as docker login takes it") as raised:
        blocks.VastProvider(api_key=key, image_login=SecretStr(CANARY))
    assert CANARY not in str(raised.value)
    assert blocks.VastProvider(api_key=key, image_login=SecretStr(" ")).image_login is None


def test_a_volume_of_vast_has_a_number() -> None:
    with pytest.raises(ValidationError, match="the number of the volume"):
        blocks.VastProvider(api_key=SecretStr("one"), volumes=["my-data:/data"])
    block = blocks.VastProvider(api_key=SecretStr("one"), volumes=["12345:/data"])
    assert block.open().volumes == ["/data"]
    with pytest.raises(ValidationError, match="at most 1"):
        blocks.RunpodProvider(api_key=SecretStr("one"), volumes=["a:/data", "b:/more"])


def test_a_saved_block_keeps_its_variables_as_secrets(prefect_server: Server) -> None:
    block = blocks.VastProvider(
        api_key=SecretStr("one"),
        env=SecretDict({"TOKEN": CANARY}),
        image_login=SecretStr(f"-u me -p {CANARY}"),
        ports=[8000],
    )
    block.save("canary", overwrite=True)
    try:
        with get_client(sync_client=True) as client:
            shown = client.read_block_document_by_name("canary", "vast-provider", False)
        assert CANARY not in shown.model_dump_json() + repr(block)
        loaded = load_named(blocks.VastProvider, "canary", of="this test")
        assert loaded.env.get_secret_value() == {"TOKEN": CANARY}
        assert CANARY not in repr(vars(loaded.open()))
    finally:
        blocks.VastProvider.delete("canary", _sync=True)  # type: ignore[call-arg, unused-ignore]
