"""Whose a deployment of one of our names is, in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tasks.own_deployments import read_own
from torpor.shared.errors import InvalidInput

OURS = "flows/backup.py:backup"


def _client(**there: Any) -> SyncPrefectClient:
    found = SimpleNamespace(**{"created_by": None, **there})
    return cast(
        SyncPrefectClient,
        SimpleNamespace(api_url="http://team/api", read_deployment_by_name=lambda name: found),
    )


@pytest.mark.parametrize(
    ("tags", "pool", "entrypoint"),
    [
        (["torpor", "snapshots"], "torpor", OURS),
        (["torpor"], None, OURS),  # its pool was deleted
        ([], "torpor", OURS),  # its user took the tags off
        (["torpor"], "my-pool", OURS),  # and moved it
        (["torpor"], "torpor-jobs", "flows/earlier.py:backup"),  # of an earlier version
    ],
)
def test_two_signs_of_three_make_a_deployment_ours(
    tags: list[str], pool: str | None, entrypoint: str
) -> None:
    read_own(_client(tags=tags, work_pool_name=pool, entrypoint=entrypoint), "backup/backup-all")


@pytest.mark.parametrize(
    ("tags", "pool", "entrypoint"),
    [
        (["team"], "team", "team/db.py:backup"),
        (["team"], "team", OURS),  # the same folder and file
        ([], None, OURS),
        (["torpor"], "team", "db.py:backup"),
    ],
)
def test_a_team_s_is_refused_with_what_it_is_and_what_to_do(
    tags: list[str], pool: str | None, entrypoint: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_own(_client(tags=tags, work_pool_name=pool, entrypoint=entrypoint), "backup/backup")
    said = str(refused.value)
    assert f"backup/backup (it runs {entrypoint} in the work pool {pool or 'none'}" in said
    assert "http://team/api" in said
    assert "a Prefect server of its own" in said
