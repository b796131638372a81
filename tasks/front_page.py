"""Keeps torpor's page in Prefect's UI: one artifact that is renewed, so that its address stays."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey

from torpor.control.front_page import KEY

_DESCRIPTION: Final = "What is awake, what it costs, and what to do next"


def renew_front_page(markdown: str) -> None:
    """Replace torpor's page in Prefect's UI. Raises what Prefect's client raises."""
    with get_client(sync_client=True) as client:
        if (there := _page(client)) is None:
            _make(client, markdown)
        else:
            changed = {"data": markdown}
            client.request("PATCH", "/artifacts/{id}", path_params={"id": there}, json=changed)


def make_front_page(markdown: str) -> None:
    """Make torpor's page in Prefect's UI if there is none."""
    with get_client(sync_client=True) as client:
        if _page(client) is None:
            _make(client, markdown)


def _page(client: SyncPrefectClient) -> UUID | None:
    wanted = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[KEY]))
    found = client.read_latest_artifacts(artifact_filter=wanted, limit=1)
    return found[0].latest_id if found else None


def _make(client: SyncPrefectClient, markdown: str) -> None:
    artifact = {"key": KEY, "type": "markdown", "description": _DESCRIPTION, "data": markdown}
    client.request("POST", "/artifacts/", json=artifact)
