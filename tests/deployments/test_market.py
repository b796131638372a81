"""The read-only command shows account, abilities and offers, and rents nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr, ValidationError

from deployments.market import described, main
from tests.markets.every import KEYED, Keyed
from tests.markets.server import KEY
from tests.markets.vast import FakeVast
from torpor.control.providers.vast import VastProvider as Vast
from torpor.shared.values import Want


@pytest.fixture
def fake() -> Iterator[FakeVast]:
    with FakeVast() as fake:
        yield fake


def test_it_shows_what_a_market_offers_and_changes_nothing(fake: FakeVast) -> None:
    provider = Vast(KEY, url=fake.url)
    lines = described(provider, Want(gpu="RTX 4090", spot="allowed", disk_gib=20), most=3)
    text = "\n".join(lines)
    assert f"provider  {provider.identity}" in lines
    assert "account   me@example.com, balance 100.00 $" in lines
    assert "ability   host_key = installed" in lines
    assert "offers    3 of 3 fit, 3 shown" in lines  # the market is asked for this GPU alone
    assert "1x RTX 4090  US" in text
    assert KEY not in text
    assert {method for method, path in fake.calls if "bundles" not in path} == {"GET"}
    assert fake.market.rented == []


def test_a_block_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["object-store/mine"]) == 1
    assert "must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("keyed", KEYED)
def test_keys_are_secret_and_accounts_differ_by_key(keyed: Keyed) -> None:
    block = keyed(api_key=SecretStr(" abc123 "))
    assert "abc123" not in repr(block)
    assert block.open().identity == keyed(api_key=SecretStr("abc123")).open().identity
    assert block.open().identity != keyed(api_key=SecretStr("abc124")).open().identity
    with pytest.raises(ValidationError):
        keyed(api_key=SecretStr("two words"))


@pytest.mark.parametrize("keyed", KEYED)
def test_a_key_is_sent_to_the_market_or_through_a_gateway_but_never_in_the_clear(
    keyed: Keyed,
) -> None:
    key = SecretStr("abc123")
    assert keyed(api_key=key).url.startswith("https://")
    assert keyed(api_key=key, url=" https://gateway.example/vast/ ").url.endswith("/vast")
    assert keyed(api_key=key, url="http://127.0.0.1:80").open()
    for url in (
        "http://vast.example",
        "vast.example",
        "https://",
        "ftp://127.0.0.1",
        "",
        "https://me:secret@gate.example",
    ):
        with pytest.raises(ValidationError, match="where a key may be sent"):
            keyed(api_key=key, url=url)
