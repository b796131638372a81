"""What a flow run has of its worker."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client import base
from prefect.settings import (
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    temporary_settings,
)

from deployments import worker
from deployments.installation import Installation
from deployments.server import Server


def test_a_run_asks_again_where_the_database_of_its_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def begin(_: object, role: str, argv: list[str], env: Mapping[str, str]) -> Any:
        given.update(env)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(worker, "begin", begin)
    server = Server("http://127.0.0.1:9/api", own=False)
    worker.begin_worker(Installation(tmp_path), server, worker.POOLS[0]).wait()
    answers = iter([500, 500, 200])
    monkeypatch.setattr(base, "time", SimpleNamespace(sleep=lambda _: None))
    codes = PREFECT_CLIENT_RETRY_EXTRA_CODES
    away = httpx.MockTransport(lambda _: httpx.Response(next(answers)))
    with (
        temporary_settings({codes: given[codes.name]}),
        base.PrefectHttpxSyncClient(transport=away) as client,
    ):
        assert client.get("http://127.0.0.1:9/api/health").status_code == 200


@pytest.mark.rule(20)
def test_a_run_outlives_ten_minutes_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that was killed has taken the server with it."""
    slept: list[float] = []
    away_s = 0.0

    def answer(request: httpx.Request) -> httpx.Response:
        if sum(slept) < away_s:
            raise httpx.ConnectError("Connection refused", request=request)
        return httpx.Response(200)

    monkeypatch.setattr(base, "time", SimpleNamespace(sleep=slept.append))
    env, given, *_ = worker.RUN_COMMAND.split()
    name, _, retries = given.partition("=")
    assert (env, name) == ("env", PREFECT_CLIENT_MAX_RETRIES.name)
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: int(retries)}),
        base.PrefectHttpxSyncClient(transport=httpx.MockTransport(answer)) as client,
    ):
        client.get("http://127.0.0.1:9/api/health")
        away_s = 600.0
        assert client.get("http://127.0.0.1:9/api/health").status_code == 200
