"""The names of an unfinished restore that may be used already, and so may have changed since.

Two files hold them. ``in-use`` is replaced as a whole, once what comes first was compared.
``in-use.log`` is appended to before and after names are given one by one: an agent that is killed
leaves no name that its successor takes for one that nobody uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.names import Signature
from torpor.shared.values import learned

UNKNOWN: Final = Signature(0, 0, 0, 0)
"""Stands for the signature of a name that a program may have changed before anybody looked."""
_LENGTH_BYTES: Final = 4


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """``boot``: a machine that was restarted may have lost its last writes. ``lapsed``: names were
    in use before the machine was started again. ``dropped``: names that are not in use after
    all."""

    identity: bytes
    boot: str
    signatures: dict[int, Signature | None]
    refused_xattrs: set[tuple[int, bytes, bytes]]
    warnings: list[str]
    lapsed: bool = False
    dropped: list[int] = []


class InUse:
    """Entries by number, with the signatures that they had when they were compared or given, and
    what could not be set on them. Thread-safe.

    Kept in the file ``path``, and in one beside it, for one restore (its journal's ``identity``)
    and one boot. ``lapsed``: of an earlier boot, nobody knows any more what programs have changed.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._log = path.with_suffix(".log")
        self._identity = identity
        self._lock = threading.Lock()
        self.signatures: dict[int, Signature | None] = {}
        self.attributes = Attributes()
        self.lapsed = False
        self._kept: set[tuple[int, bytes, bytes]] = set()  # of attributes and warnings, what is
        self._warned = 0  # on the disk
        for record in [*_whole(self._path), *_logged(self._log)]:
            self._learn(record)

    def add(self, signatures: Mapping[int, Signature | None]) -> None:
        """Keep these with the others, in one file."""
        with self._lock:
            self.signatures.update(signatures)
            self._write()

    def note(self, signatures: Mapping[int, Signature | None], dropped: Sequence[int] = ()) -> None:
        """Append a few: from now on these are in use, and ``dropped`` are not. The log must have
        been settled."""
        with self._lock:
            record = self._record(signatures, self._kept, self._warned, dropped)
            data = msgspec.msgpack.encode(record)
            with self._log.open("ab") as file:
                file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            self._apply(record)
            self._kept |= record.refused_xattrs
            self._warned += len(record.warnings)

    def settle(self, is_given: Callable[[int], bool]) -> None:
        """Move what a log says into the one file. ``is_given``: whether an entry that was about to
        be given its name has had it."""
        with self._lock:
            if self._log.exists() or self.lapsed:
                unknown = [n for n, seen in self.signatures.items() if seen == UNKNOWN]
                for number in unknown:
                    if not is_given(number):
                        del self.signatures[number]
                self._write()

    def clear(self) -> None:
        with self._lock:
            self._path.unlink(missing_ok=True)
            self._log.unlink(missing_ok=True)
            self.signatures = {}
            self.lapsed = False
            self._kept, self._warned = set(), 0

    def _learn(self, record: _Record) -> None:
        if record.identity != self._identity:
            return
        if record.boot == boot_id():
            self.lapsed |= record.lapsed
            self._apply(record)
            self.attributes.refused_xattrs |= record.refused_xattrs
            self.attributes.warnings += record.warnings
            self._kept |= record.refused_xattrs
            self._warned += len(record.warnings)
        else:
            self.lapsed = True

    def _apply(self, record: _Record) -> None:
        self.signatures.update(record.signatures)
        for number in record.dropped:
            self.signatures.pop(number, None)

    def _record(
        self,
        signatures: Mapping[int, Signature | None],
        kept: Set[tuple[int, bytes, bytes]] = frozenset(),
        warned: int = 0,
        dropped: Sequence[int] = (),
    ) -> _Record:
        """With what could not be set, but for what is ``kept`` already."""
        refused = {*self.attributes.refused_xattrs} - kept
        warnings = self.attributes.warnings[warned:]
        return _Record(
            self._identity, boot_id(), {**signatures}, refused, warnings, self.lapsed, [*dropped]
        )

    def _write(self) -> None:
        record = self._record(self.signatures)
        partial = self._path.with_suffix(".new")
        partial.write_bytes(msgspec.msgpack.encode(record))
        partial.replace(self._path)
        self._log.unlink(missing_ok=True)
        self._kept, self._warned = {*record.refused_xattrs}, len(record.warnings)


def _whole(path: Path) -> Iterator[_Record]:
    try:
        yield _decoded(path.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError):
        return  # absent or damaged: everything is compared in the end


def _logged(path: Path) -> Iterator[_Record]:
    """Every whole record of the log: an agent that was killed may have torn the last one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    at = 0
    while at + _LENGTH_BYTES <= len(data):
        begins = at + _LENGTH_BYTES
        at = begins + int.from_bytes(data[at:begins], "little")
        try:
            yield _decoded(data[begins:at])
        except msgspec.MsgspecError:
            return


def _decoded(data: bytes) -> _Record:
    return msgspec.msgpack.decode(data, type=learned(_Record))
