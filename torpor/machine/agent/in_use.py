"""The names of an unfinished restore that may be used already, and so may have changed since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.walk import Signature
from torpor.shared.values import learned


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """``boot``: a machine that was restarted may have lost its last writes."""

    identity: bytes
    boot: str
    signatures: dict[int, Signature | None]
    refused_xattrs: set[tuple[int, bytes, bytes]]
    warnings: list[str]


class InUse:
    """Entries by number, with the signatures that they had when they were compared, and what could
    not be set on them.

    Kept in the file ``path`` for one restore (its journal's ``identity``) and one boot.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._identity = identity
        self.signatures: Mapping[int, Signature | None] = {}
        self.attributes = Attributes()
        try:
            record = msgspec.msgpack.decode(path.read_bytes(), type=learned(_Record))
        except (FileNotFoundError, msgspec.MsgspecError):
            return  # absent or damaged: everything is compared in the end
        if (record.identity, record.boot) == (identity, boot_id()):
            self.signatures = record.signatures
            self.attributes.refused_xattrs |= record.refused_xattrs
            self.attributes.warnings += record.warnings

    def add(self, signatures: Mapping[int, Signature | None]) -> None:
        both = {**self.signatures, **signatures}
        refused, warnings = self.attributes.refused_xattrs, self.attributes.warnings
        record = _Record(self._identity, boot_id(), both, {*refused}, [*warnings])
        partial = self._path.with_suffix(".new")
        partial.write_bytes(msgspec.msgpack.encode(record))
        partial.replace(self._path)
        self.signatures = both

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self.signatures = {}
