"""Which files were used on the machine of a snapshot, so that a restore can bring them first."""

from __future__ import annotations

from typing import Any, Final

from torpor.shared.format.manifest import Manifest

NEVER, BEFORE_READY, LATER = range(3)
"""When a file was used since the restore: never; before the machine was ready; only after that."""
_KEY: Final = "used"
"""The key in the manifest's environment record. Readers that do not know the key ignore it."""


def used_record(classes: bytes) -> dict[str, Any]:
    """The fact for a manifest's environment record: one byte for each entry. Empty where nothing is
    known."""
    return {_KEY: classes} if classes else {}


def recorded_use(manifest: Manifest) -> bytes:
    """The class of each entry as a manifest says it; empty where the manifest says none, or where
    its bytes do not fit the entries, because a machine wrote them."""
    said = manifest.environment.get(_KEY)
    if not isinstance(said, bytes) or len(said) != len(manifest.entries):
        return b""
    return said if max(said, default=NEVER) <= LATER else b""
