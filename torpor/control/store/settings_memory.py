"""What one control side remembers of the block records of its workspaces.

A bucket may be older than it was: whoever writes in it can delete a record, or put an older one
back. So each control side keeps, outside of the bucket, the highest number that it has seen of each
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from torpor.shared.values import ObjectKey, WorkspaceName


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one Workspace block in one store. ``workspace``, ``store``: the
    workspace and the Object Store block that it was recorded for, under the name ``side`` of this
    control side. ``kept_unix``: when its record was last compared. ``numbers``: the highest number
    seen of each block record of the workspace."""

    block: str
    side: str
    workspace: WorkspaceName
    store: str
    kept_unix: float = 0.0
    numbers: dict[ObjectKey, int] = {}

    @property
    def place(self) -> tuple[str, str, str]:
        """What tells it from the others."""
        return self.block, self.workspace, self.store

    def seeing(self, numbers: Mapping[ObjectKey, int]) -> Remembered:
        """The same, with the higher one of each number."""
        both = {key: max(number, self.numbers.get(key, 0)) for key, number in numbers.items()}
        return msgspec.structs.replace(self, numbers=self.numbers | both)


class SettingsMemory(Protocol):
    """A memory that outlives each run. Any call may raise whatever the server's client raises."""

    def remembered(self) -> list[Remembered]:
        """What is remembered of each place."""

    def remember(self, one: Remembered) -> None:
        """Keep it, in place of what was kept of its place."""

    def forget(self, one: Remembered) -> None:
        """Keep nothing of its place. One that is not kept is no error."""


class ShortMemory:
    """A memory that ends with this process, for runs without a server."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str], Remembered] = {}

    def remembered(self) -> list[Remembered]:
        return [*self._kept.values()]

    def remember(self, one: Remembered) -> None:
        self._kept[one.place] = one

    def forget(self, one: Remembered) -> None:
        self._kept.pop(one.place, None)


def highest(found: Iterable[Remembered]) -> dict[ObjectKey, int]:
    """The highest number that any of these has of each record."""
    numbers: dict[ObjectKey, int] = {}
    for one in found:
        for key, number in one.numbers.items():
            numbers[key] = max(number, numbers.get(key, 0))
    return numbers
