"""The names of an unfinished restore that may be used already, and so may have changed since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.names import Signature
from torpor.shared.values import learned


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """The record of names in use. ``boot``: the machine's boot, because a machine that was
    restarted may have lost its last writes. ``lapsed``: names were in use before the machine was
    started again."""

    identity: bytes
    boot: str
    signatures: dict[int, Signature | None]
    refused_xattrs: set[tuple[int, bytes, bytes]]
    warnings: list[str]
    lapsed: bool = False
    refused_owners: set[tuple[int, int]] = set()
    apart: set[tuple[int, bytes]] = set()


class InUse:
    """Entries by number, with the signatures that they had when they were compared, and what could
    not be set on them.

    Kept in the file ``path`` for one restore (its journal's ``identity``) and one boot. ``lapsed``:
    the record is of an earlier boot, so that it is unknown what programs have changed.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._identity = identity
        self.signatures: dict[int, Signature | None] = {}
        self.attributes = Attributes()
        self.lapsed = False
        try:
            record = msgspec.msgpack.decode(path.read_bytes(), type=learned(_Record))
        except (FileNotFoundError, msgspec.MsgspecError):
            return  # no record or a damaged one: everything is compared in the end
        if record.identity != identity:
            return
        if record.boot != boot_id():
            self.lapsed = True
            return
        self.lapsed = record.lapsed
        self.signatures = record.signatures
        self.attributes.refused_xattrs |= record.refused_xattrs
        self.attributes.refused_owners |= record.refused_owners
        self.attributes.apart |= record.apart
        self.attributes.warnings += record.warnings

    def add(self, signatures: Mapping[int, Signature | None]) -> None:
        """Add names that are in use from now on."""
        self.signatures = {**self.signatures, **signatures}
        attributes = self.attributes
        record = _Record(
            self._identity,
            boot_id(),
            self.signatures,
            {*attributes.refused_xattrs},
            attributes.noted(),
            self.lapsed,
            {*attributes.refused_owners},
            {*attributes.apart},
        )
        partial = self._path.with_suffix(".new")
        partial.write_bytes(msgspec.msgpack.encode(record))
        partial.replace(self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self.signatures = {}
        self.lapsed = False
