"""The Azure block opens with an application's secret or this host's login, and refuses what Azure
does not write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from blocks import AzureProvider
from blocks.reference import load_named
from deployments.market import described
from deployments.server import Server
from tests.markets.azure import APPLICATION, SUBSCRIPTION, TENANT, FakeAzure
from torpor.shared.errors import InvalidInput, ProviderDenied
from torpor.shared.values import Want
from torpor.shared.wire.job import NoticeSource

PLAIN: dict[str, Any] = {
    "subscription": SUBSCRIPTION, "regions": ["eastus"], "ssh_from": "203.0.113.7/32",
}  # fmt: skip
LOGIN: dict[str, Any] = {"tenant": TENANT, "application": APPLICATION, "secret": "very-secret"}


@pytest.fixture
def fake() -> Iterator[FakeAzure]:
    with FakeAzure() as fake:
        yield fake


def test_saved_and_loaded_it_shows_what_the_subscription_may_rent(
    prefect_server: Server, fake: FakeAzure
) -> None:
    metadata_url = "http://127.0.0.1:8000"
    AzureProvider(**fake.settings(), **fake.login(), metadata_url=metadata_url).save(
        "azure", overwrite=True
    )
    block = load_named(AzureProvider, "azure", of="test")
    provider = block.open()
    assert provider.identity == f"azure://{SUBSCRIPTION}"
    assert provider.abilities.notices == (NoticeSource("azure", metadata_url),)
    text = "\n".join(described(provider, Want(gpu="T4", disk_gib=20, spot="allowed")))
    assert "Azure subscription Pay-As-You-Go" in text
    assert "standardNCASv3_T4Family 0 of 8 vCPUs" in text
    assert "Standard_NC4as_T4_v3/eastus/spot" in text
    assert fake.secret not in text + repr(block) + repr(provider)
    assert fake.market.rented == []
    fake.secret = "another"
    with pytest.raises(ProviderDenied, match="AADSTS7000215"):
        block.open().check()


def test_without_a_secret_the_login_of_this_host_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.core.exceptions", None)
    with pytest.raises(InvalidInput, match=r"'\.\[azure\]'"):
        AzureProvider(**PLAIN).open()
    assert AzureProvider(**PLAIN, **LOGIN).open().identity == f"azure://{SUBSCRIPTION}"


@pytest.mark.parametrize("missing", [*LOGIN])
def test_a_login_is_whole_and_no_error_shows_it(missing: str) -> None:
    with pytest.raises(ValidationError, match="fill in all three, or none") as told:
        AzureProvider(**PLAIN, **{**LOGIN, missing: ""})
    assert "very-secret" not in str(told.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"subscription": "Pay-As-You-Go"},
        {"tenant": "example.com"},
        {"regions": []},
        {"regions": ["East US"]},
        {"sizes": ["NC4as T4 v3"]},
        {"sizes": ["Standard_NV6ads_A10_v5"]},
        {"image": "ubuntu:24.04"},
        {"ssh_from": ""},
        {"ssh_from": "203.0.113.7"},
        {"ports": [22]},
        {"metadata_url": "https://metadata/scheduledevents"},
        {"url": "http://example.com"},
        {"login_url": "http://example.com"},
        {"prices_url": "http://example.com"},
    ],
)
def test_what_azure_does_not_write_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AzureProvider(**{**PLAIN, **LOGIN, **fields})
