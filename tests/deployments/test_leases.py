"""How long a lease of a concurrency slot lasts at our own server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.server.concurrency.lease_storage import get_concurrency_lease_storage
from prefect.settings import (
    PREFECT_HOME,
    PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE,
    temporary_settings,
)

from deployments import server
from deployments.installation import Installation
from torpor.control.ports import free_ports


@pytest.mark.rule(20)
@pytest.mark.parametrize("renewed", [False, True])
def test_the_slot_of_a_run_outlives_ten_minutes_without_a_server(
    renewed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect asks for five minutes, and cancels a run whose lease was over when the server came
    back."""
    given: dict[str, str] = {}

    def begin(_: object, role: str, argv: list[str], env: Mapping[str, str]) -> None:
        given.update(env)

    monkeypatch.setattr(server, "begin", begin)
    made = Installation(tmp_path)
    url = f"http://127.0.0.1:{free_ports(1)[0]}/api"
    server.begin_server(made, server.Server(url, own=True, login="torpor:secret"))
    of_the_server = {
        setting: given[setting.name]
        for setting in (PREFECT_HOME, PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE)
    }

    async def expires() -> datetime:
        with temporary_settings(of_the_server):
            leases = get_concurrency_lease_storage()
            lease = await leases.create_lease([uuid4()], timedelta(minutes=5))
            if renewed:
                assert await leases.renew_lease(lease.id, timedelta(minutes=5))
            found = await get_concurrency_lease_storage().read_lease(lease.id)
        assert found
        return found.expiration

    least = datetime.now(UTC) + timedelta(seconds=225 + 600)  # a run renews every 225 s
    assert asyncio.run(expires()) > least
