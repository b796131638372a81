"""The names of blocks that runs refer to by their ids."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound


class BlockNames:
    """The names of Workspace blocks that runs refer to by their ids."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client
        self._names: dict[str, str] = {}

    def in_place(self, value: Any) -> Any:
        """The block's name if ``value`` refers to a block; else ``value``."""
        if not (isinstance(value, dict) and isinstance(value.get("$ref"), dict)):
            return value
        block = str(value["$ref"].get("block_document_id"))
        if block not in self._names:
            self._names[block] = self._read(block)
        return self._names[block]

    def _read(self, block: str) -> str:
        try:
            found = self._client.read_block_document(UUID(block), include_secrets=False)
        except (ObjectNotFound, ValueError):
            return f"a block that was deleted ({block})"
        return found.name or block
