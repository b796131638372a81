"""The GCP block opens with a service account's key or this host's login, and refuses what Google
does not write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from blocks import GcpProvider
from blocks.reference import load_named
from deployments.market import described
from deployments.server import Server
from tests.markets.gcp import PROJECT, ZONES, FakeGcp, gcp_prices
from torpor.shared.errors import InvalidInput, ProviderDenied
from torpor.shared.values import Want
from torpor.shared.wire.job import NoticeSource

PLAIN: dict[str, Any] = {
    "project": PROJECT, "zones": [*ZONES], "prices": {"g2-standard-4": 0.7},
    "disk_usd_gib_month": 0.1,
}  # fmt: skip


@pytest.fixture
def fake() -> Iterator[FakeGcp]:
    fake = FakeGcp()
    yield fake
    fake.close()


def test_saved_and_loaded_it_shows_what_the_project_may_rent(
    prefect_server: Server, fake: FakeGcp
) -> None:
    key = fake.service_account
    named = {**PLAIN, "prices": gcp_prices(fake.market.wares)}
    metadata_url = "http://169.254.169.254"
    GcpProvider(
        **named, service_account=SecretStr(key), url=fake.url, metadata_url=metadata_url
    ).save("gcp", overwrite=True)
    provider = load_named(GcpProvider, "gcp", of="test").open()
    assert provider.identity == f"gcp://{PROJECT}"
    assert provider.abilities.notices == (NoticeSource("gcp", metadata_url),)
    text = "\n".join(described(provider, Want(gpu="L4", disk_gib=20, spot="allowed")))
    assert f"Google Cloud project {PROJECT}" in text
    assert "NVIDIA_L4_GPUS 1" in text
    assert f"g2-standard-4/{ZONES[0]}/spot" in text
    assert fake.private_key[40:80] not in text
    assert fake.market.rented == []
    fake.new_service_account()
    block = load_named(GcpProvider, "gcp", of="test")
    with pytest.raises(ProviderDenied, match=r"gserviceaccount\.com: .*invalid_grant"):
        block.open().check()


def test_without_a_key_the_login_of_this_host_is_used(
    fake: FakeGcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tmp_path / "login.json"
    login.write_text(fake.service_account)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(login))
    assert GcpProvider(**PLAIN, url=fake.url).open().check().name
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing"))
    with pytest.raises(InvalidInput, match="no Google login"):
        GcpProvider(**PLAIN).open()


@pytest.mark.parametrize("key", ["not json", "{}", '{"private_key": "very-secret"}'])
def test_a_damaged_key_is_named_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidInput, match="JSON key of a Google service account") as told:
        GcpProvider(**PLAIN, service_account=SecretStr(key)).open()
    assert "very-secret" not in str(told.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"project": "My Project"},
        {"zones": []},
        {"zones": ["us-central1"]},
        {"prices": {"G2 Standard": 1.0}},
        {"prices": {"g2-standard-4": 0.0}},
        {"disk_usd_gib_month": 0},
        {"image": "ubuntu:24.04"},
        {"network": "global/networks/default"},
        {"ports": [8000]},
        {"ports": [22], "ssh_from": "203.0.113.7/32"},
        {"ssh_from": "203.0.113.7"},
        {"ssh_from": "203.0.113.7/24"},
        {"metadata_url": "https://metadata/computeMetadata"},
        {"url": "http://example.com"},
    ],
)
def test_what_google_does_not_write_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GcpProvider(**{**PLAIN, **fields})


def test_a_deadline_leaves_watch_the_time_to_renew_it() -> None:
    with pytest.raises(ValidationError, match="1 h is the least"):
        GcpProvider(**PLAIN, deadline_h=0.5)
    assert GcpProvider(**PLAIN).deadline_h == 0
    assert GcpProvider(**PLAIN, deadline_h=1).deadline_h == 1
