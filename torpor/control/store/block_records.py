"""The settings of a workspace beside its snapshots: what its blocks hold and no snapshot does.

With them, a new host that has the bucket and its key makes the blocks again (`torpor recover`). A
*control side* is one installation: one Prefect server. Each keeps a record of its own for each of
its Workspace blocks, ``workspaces/NAME/blocks/SIDE/BLOCK``, with all that the block names, and
writes over no other side's. A record is signed as every record; where the store has a key, it is
sealed too, with a key that no machine gets.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records, Unread, left_out
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    RecordRefused,
    UnsavedWork,
    WrongKey,
)
from torpor.shared.format.keys import Seal, records_key
from torpor.shared.format.names import blocks_prefix
from torpor.shared.values import (
    KIB,
    ObjectKey,
    StoredObject,
    WorkspaceName,
    WorkspaceSpec,
    learned,
)

FORMAT: Final = 1
COMMANDS: Final = ("quiesce", "resume", "programs")
"""Settings that are command lines, in which people write tokens: sealed, or not kept. Those of a
plain record are never taken."""
STORED: Final[dict[str, str]] = {
    "paths": "paths",
    "exclude": "exclude",
    "accept_changed": "accept_changed",
    "accept_lost": "accept_lost",
    "left_behind": "left_behind",
    "left_behind_gib": "left_behind_gib",
    "quiesce": "the quiesce command",
    "resume": "the resume command",
    "programs": "programs",
    "process": "process",
}
"""What decides what a hibernation stores and what it may lose, with its words for people."""
LATE_S: Final = 20 * 60.0
"""A record is in the store within this time of its signing: stores refuse a request that was signed
15 minutes ago. One that came later was put back by somebody."""
_MOST_BYTES: Final = 256 * KIB
_ADVICE: Final = (
    "see which control side the object's name has, and where that host is gone, withdraw its "
    "settings: `torpor recover WORKSPACE --store STORE --retire SIDE`"
)

Fields = dict[str, Any]
"""A block's fields, as JSON has them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a workspace hold. ``blocks``: the fields of each by its reference, such
    as ``workspace/mywork``. ``withheld``: the names of the fields that are set and not kept.
    ``accounts``: what torpor calls the account of each provider block."""

    block: str  # the name of the Workspace block
    stored: Fields = {}  # the fields of STORED
    blocks: dict[str, Fields] = {}
    withheld: dict[str, list[str]] = {}
    accounts: dict[str, str] = {}

    @property
    def store(self) -> str:
        """The Object Store block that the Workspace block names."""
        return str(self.blocks.get(f"workspace/{self.block}", {}).get("store", ""))

    def differs_from(self, other: Settings) -> list[str]:
        """In which settings of what is stored, in words; as far as both are known."""
        both = self.stored.keys() & other.stored.keys()
        return [words for field, words in STORED.items() if field in both
                and self.stored[field] != other.stored[field]]  # fmt: skip


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The settings as one control side wrote them. ``number`` counts the writes. ``withdrawn``: the
    block is gone, or is kept in another store: nothing of it counts."""

    workspace: WorkspaceName
    side: str
    host: str
    settings: Settings
    written_unix: float
    number: int = 1
    withdrawn: bool = False

    @property
    def key(self) -> ObjectKey:
        return record_key(self.workspace, self.side, self.settings.block)

    @property
    def words(self) -> str:
        """Who wrote it."""
        return f"control side {self.side} (on host {self.host})"


class _Signed(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed: the record, sealed (base64) or plain."""

    format: int
    written_unix: float
    sealed: str = ""
    plain: msgspec.Raw = msgspec.Raw(b"null")


class BlockRecords:
    """The block records of one store. ``store_key``: what seals them; None where it is plain."""

    def __init__(self, store: ObjectStore, store_key: bytes | None) -> None:
        self._store = store
        self._seal = Seal(None if store_key is None else records_key(store_key))
        self._records = Records(store, _Signed, _MOST_BYTES, _ADVICE)

    def read(self, stored: StoredObject) -> BlockRecord | None:
        """The record of a listed object; None if it has gone. RecordRefused for one that no control
        side of this store signed, that a newer torpor wrote, that is sealed with another key, and
        for an older one that was put back, as far as the listing shows it."""
        found = self._read(stored.key)
        if found is None:
            return None
        self._check_age(stored, found[0])
        return found[0]

    def all_of(
        self, workspace: WorkspaceName, unread: Unread | None = None
    ) -> dict[ObjectKey, BlockRecord]:
        """Every record of the workspace, also withdrawn ones. ``unread`` gets the errors of those
        that cannot be believed; without it, the first one is raised."""
        found = {}
        for stored in self._store.list(blocks_prefix(workspace)):
            with left_out(stored.key, unread):
                if (record := self.read(stored)) is not None:
                    found[stored.key] = record
        return found

    def keep(
        self,
        workspace: WorkspaceName,
        settings: Settings,
        side: str,
        host: str,
        *,
        known: int,
        intend: Callable[[int], None] = lambda number: None,
        again: bool = False,
    ) -> int:
        """Write this side's settings where its record has others or is an older one, and return its
        number. ``known``: the highest number that this side has given it; ``intend`` hears of each
        new one before it is written, so that no kill lets this side take its own record for another
        one's. ``again``: write them also where the record has the same. UnsavedWork where somebody
        else has written other settings there: a copy of this host, which has the name of its
        side."""
        key = record_key(workspace, side, settings.block)
        for _ in range(TRIES):
            found = self._read(key)
            there, version, plain = found or (None, "", False)
            if there is not None and not there.withdrawn:
                same = there.settings == settings and plain != self._seal.sealed
                if same and there.number >= known and not again:
                    return there.number
                if there.number > known and settings.differs_from(there.settings):
                    raise UnsavedWork(_copied(there))
            began_unix = time.time()
            record = BlockRecord(
                workspace=workspace,
                side=side,
                host=host,
                settings=settings,
                written_unix=began_unix,
                number=max(known, there.number if there else 0) + 1,
            )
            known = record.number
            intend(known)
            if self._write(record, version):
                if time.time() - began_unix < LATE_S / 2:
                    return record.number
                again = True  # it slept on the way, and would be taken for an older state
        raise self._records.contested(key)

    def withdraw(self, workspace: WorkspaceName, side: str, block: str, *, known: int) -> int:
        """Say in its place that a record counts no more, whatever is there, and return its number.
        A record that is only deleted could be put back."""
        key = record_key(workspace, side, block)
        for _ in range(TRIES):
            try:
                found = self._read(key)
                there, version, _ = found or (None, "", False)
                if there is not None and there.withdrawn and there.number >= known:
                    return there.number
                number = max(known, there.number if there else 0) + 1
            except RecordRefused:
                version, number = None, known + 1
            record = BlockRecord(
                workspace=workspace,
                side=side,
                host="",
                settings=Settings(block=block),
                written_unix=time.time(),
                number=number,
                withdrawn=True,
            )
            if self._write(record, version):
                return number
        raise self._records.contested(key)

    def _write(self, record: BlockRecord, version: str | None) -> bool:
        """Whether it was written over this version: empty where none is there, None for any."""
        signed = self._signed(record)
        try:
            if version is None:
                self._records.put(record.key, signed)
            elif not version:
                self._records.create(record.key, signed)
            else:
                self._records.replace(record.key, signed, version)
        except (ObjectChanged, ObjectExists):
            return False  # another run's write came first
        return True

    def _signed(self, record: BlockRecord) -> _Signed:
        body, key = msgspec.json.encode(record), record.key
        if len(body) > _MOST_BYTES // 2:
            raise InvalidInput(f"the settings for {key} are too long to keep: {len(body)} bytes")
        if not self._seal.sealed:
            return _Signed(format=FORMAT, written_unix=record.written_unix, plain=msgspec.Raw(body))
        sealed = base64.b64encode(self._seal.seal(body, key.encode())).decode()
        return _Signed(format=FORMAT, written_unix=record.written_unix, sealed=sealed)

    def _read(self, key: ObjectKey) -> tuple[BlockRecord, str, bool] | None:
        """The record, its version, and whether it is plain: a store that got its key later has such
        ones."""
        found = self._records.read(key)
        if found is None:
            return None
        signed, version = found
        if signed.format != FORMAT:
            raise RecordRefused(
                f"{key} in {self._store.address} has format {signed.format}, and this torpor reads "
                f"format {FORMAT}: bring it up to date"
            )
        if signed.sealed and not self._seal.sealed:
            raise self._records.damaged(key, "it is sealed, in a store without a key")
        try:
            body: Any = bytes(signed.plain)
            if signed.sealed:
                body = self._seal.open(base64.b64decode(signed.sealed), key.encode())
            record = msgspec.json.decode(body, type=learned(BlockRecord))
        except (WrongKey, binascii.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._records.damaged(key, error) from None
        if record.key != key:
            raise self._records.damaged(key, "it is of another block")
        plain = not signed.sealed
        settings = _without_commands(record.settings) if plain else record.settings
        written_unix = signed.written_unix
        record = msgspec.structs.replace(record, settings=settings, written_unix=written_unix)
        return record, version, plain

    def _check_age(self, stored: StoredObject, record: BlockRecord) -> None:
        written_unix = record.written_unix + self._store.clock_ahead_s()
        if came_late(stored, written_unix):
            late_h = (stored.modified_unix - written_unix) / 3600
            raise RecordRefused(
                f"{stored.key} in {self._store.address} came into the bucket {late_h:.1f} h after "
                "torpor had signed it: somebody has put an older state back, or copied the bucket. "
                "Nothing is done that it says. If that was you, `torpor up --believe-records` "
                f"signs it again; else {_ADVICE}"
            )


def came_late(stored: StoredObject, written_unix: float) -> bool:
    """Whether the object came into the bucket too long after it was signed, by the store's
    clock."""
    return stored.modified_unix - written_unix > LATE_S


def _copied(there: BlockRecord) -> str:
    name = there.workspace
    return (
        f"the settings of workspace {name} were written into its bucket under the name of this "
        f"control side, {there.side}, by somebody else (on host {there.host}): a copy of this "
        "host, or this one before its database was put back. Delete the variable "
        "torpor_control_side of one of the two at its Prefect server, which gets another name "
        f"then; or, where no other host is left, `torpor recover {name} --store STORE --retire "
        f"{there.side}`"
    )


def _without_commands(settings: Settings) -> Settings:
    """The settings as a plain record may have them."""
    stored = {name: value for name, value in settings.stored.items() if name not in COMMANDS}
    blocks = {
        reference: {name: value for name, value in fields.items() if name not in _ONLY_SEALED}
        for reference, fields in settings.blocks.items()
    }
    return msgspec.structs.replace(settings, stored=stored, blocks=blocks)


_ONLY_SEALED: Final = (*COMMANDS, "private_key")


def settings_for(spec: WorkspaceSpec, block: str, *, sealed: bool) -> Settings:
    """What of the workspace decides what is stored, without its blocks."""
    names = [name for name in STORED if sealed or name not in COMMANDS]
    stored = {name: msgspec.to_builtins(getattr(spec, name)) for name in names}
    return Settings(block=block, stored=stored)


def record_key(workspace: WorkspaceName, side: str, block: str) -> ObjectKey:
    return ObjectKey(f"{blocks_prefix(workspace)}{side}/{block}")


def side_and_block(key: ObjectKey) -> tuple[str, str]:
    """Whose record the object of this name is, and of which Workspace block."""
    *_, side, block = key.split("/")
    return side, block
