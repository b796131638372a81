"""Which files were used on the machine of a snapshot, so that a restore can bring them first."""

from __future__ import annotations

from typing import Any, Final

from torpor.shared.format.manifest import Manifest

NEVER, BEFORE_READY, LATER = range(3)
"""A file was not used since the restore; it was before the machine was ready; only after that."""
_KEY: Final = "used"
"""Its name in the environment record, where a reader of any torpor takes it for a fact more."""


def used_record(classes: bytes) -> dict[str, Any]:
    """What the environment record of a manifest keeps: one byte for each entry. Nothing, where
    nothing is known."""
    return {_KEY: classes} if classes else {}


def recorded_use(manifest: Manifest) -> bytes:
    """The class of each entry, as a manifest says it; empty where it says none. A machine writes
    it, so what does not fit is none."""
    said = manifest.environment.get(_KEY)
    if not isinstance(said, bytes) or len(said) != len(manifest.entries):
        return b""
    return said if max(said, default=NEVER) <= LATER else b""
