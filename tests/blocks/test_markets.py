"""The blocks of markets that know an account by an API key."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

import blocks

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
