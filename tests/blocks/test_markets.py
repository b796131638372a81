"""The blocks of markets that know an account by an API key."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

import blocks
from blocks import markets
from torpor.shared.errors import InvalidInput

KEYED = [
    blocks.VastProvider,
    blocks.RunpodProvider,
    blocks.LambdaProvider,
    blocks.TensordockProvider,
    blocks.HostkeyProvider,
]


@pytest.mark.parametrize("kind", KEYED)
def test_a_changed_key_changes_no_account_that_its_block_names(
    kind: type[blocks.VastProvider],
) -> None:
    before = kind(api_key=SecretStr("one")).open().identity
    assert kind(api_key=SecretStr("two")).open().identity != before
    assert kind(api_key=SecretStr("two"), account=f" {before} ").open().identity == before


def test_an_account_is_named_as_reconcile_names_it() -> None:
    with pytest.raises(ValidationError, match="copy it from reconcile"):
        blocks.VastProvider(api_key=SecretStr("one"), account="me@example.com")


def test_a_name_that_another_block_has_or_is_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, other = SecretStr("old"), SecretStr("other")
    name = blocks.VastProvider(api_key=old).open().identity
    saved = {"mine": blocks.VastProvider(api_key=old)}
    monkeypatch.setattr(
        markets, "saved_names", lambda kind: [*saved] if kind is blocks.VastProvider else []
    )
    monkeypatch.setattr(markets, "load_named", lambda kind, name, of: saved[name])
    claims = blocks.VastProvider(api_key=other, account=name)
    with pytest.raises(InvalidInput, match="is the account of the block vast-provider/mine"):
        markets.check_account_name(claims)
    saved["mine"] = blocks.VastProvider(api_key=SecretStr("third"), account=name)
    with pytest.raises(InvalidInput, match="of one account alone"):
        markets.check_account_name(claims)
    saved["mine"] = claims  # its own record, or a second block of the same key
    markets.check_account_name(claims)
    assert claims.open().claimed
    assert not blocks.VastProvider(api_key=old, account=name).open().claimed
