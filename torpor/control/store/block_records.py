"""The settings of a workspace in its bucket: what its blocks hold and no snapshot does.

With them, a new host that has the bucket and its key makes the blocks again (`torpor recover`). A
*control side* is one installation: one Prefect server. Each keeps a record of its own for each of
its Workspace blocks, ``settings/WORKSPACE/SIDE/BLOCK``, with all that the block names, and writes
over no other side's. A record is signed as every record; where the store has a key, it is sealed
too, with a key that no machine gets. One whose block is gone is deleted.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final, NamedTuple

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records, Unread
from torpor.control.store.signatures import ENVELOPE_BYTES
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    RecordRefused,
    StoreCorrupt,
    StoreError,
    WrongKey,
)
from torpor.shared.format.keys import Seal, records_key
from torpor.shared.format.names import settings_prefix
from torpor.shared.values import (
    KIB,
    ObjectKey,
    StoredObject,
    WorkspaceName,
    WorkspaceSpec,
    learned,
    workspace_name,
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
OF_TUNING: Final = ("left_behind", "left_behind_gib")
"""Those of them that the workspace's Tuning block has."""
_IN_ANY_ORDER: Final = ("paths", "exclude", "accept_changed", "accept_lost")
DAY_S: Final = 24 * 3600.0
"""A record that is older is written again: the newest one is of a host that lives."""
_MOST_RECORD: Final = 256 * KIB
MOST_BYTES: Final = _MOST_RECORD + ENVELOPE_BYTES
"""A longer object is no record, and is not read."""
_MOST_BODY: Final = _MOST_RECORD // 2
NEVER_BELIEVED: Final = (RecordRefused, StoreCorrupt)
_AT_ONCE: Final = 8
_NAME: Final = re.compile(r"settings/(?P<workspace>[^/]+)/(?P<side>[0-9a-f]{8})/(?P<block>[^/]+)")
_ADVICE: Final = (
    "see which control side the object's name has, and where that host is gone, withdraw its "
    "settings: `torpor recover WORKSPACE --store STORE --retire SIDE`"
)

Fields = dict[str, Any]
"""A block's fields, as JSON has them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a workspace hold. ``blocks``: the fields of each by its reference, such
    as ``workspace/mywork``. ``withheld``: the names of the fields that are set and not kept."""

    block: str  # the name of the Workspace block
    stored: Fields = {}  # the fields of STORED
    blocks: dict[str, Fields] = {}
    withheld: dict[str, list[str]] = {}

    @property
    def store(self) -> str:
        """The name of the Object Store block that the Workspace block names."""
        named = str(self.blocks.get(f"workspace/{self.block}", {}).get("store", ""))
        return named.rpartition("/")[2]

    def differs_from(self, other: Settings) -> list[str]:
        """In which fields of what is stored, as far as both are known."""
        both = self.stored.keys() & other.stored.keys()
        return [
            name
            for name in STORED
            if name in both and _compared(name, self) != _compared(name, other)
        ]


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The settings as one control side has them."""

    workspace: WorkspaceName
    side: str
    host: str
    settings: Settings
    written_unix: float

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
        self._records = Records(store, _Signed, _MOST_RECORD, _ADVICE)

    def listed(self, *workspaces: WorkspaceName) -> list[StoredObject]:
        """The objects that are block records by their names: of these workspaces, or of all."""
        prefixes = [settings_prefix(name) for name in workspaces] or [settings_prefix()]
        every = [stored for prefix in prefixes for stored in self._store.list(prefix)]
        return [stored for stored in every if record_name(stored.key)]

    def read_all(
        self, listed: Iterable[StoredObject], unread: Unread
    ) -> dict[ObjectKey, BlockRecord]:
        """The records of these objects, several at once; one that has gone is left out. ``unread``
        gets the errors of those that cannot be believed: that no control side of this store signed,
        that a newer torpor wrote, or that are sealed with another key. It gets the error of a store
        that is away too, which is not asked for the rest."""
        objects, found = [*listed], dict[ObjectKey, BlockRecord]()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="block-records") as threads:
            looks = [threads.submit(copy_context().run, self._of, stored) for stored in objects]
            for stored, look in zip(objects, looks, strict=True):
                if look.cancelled():
                    continue
                try:
                    record = look.result()
                except StoreError as error:
                    unread[stored.key] = error
                    if not isinstance(error, NEVER_BELIEVED):
                        for one in looks:
                            one.cancel()
                else:
                    found |= {} if record is None else {stored.key: record}
        return found

    def keep(self, workspace: WorkspaceName, settings: Settings, side: str, host: str) -> None:
        """Write this side's settings where its record has others, is a day old or cannot be
        believed."""
        key = record_key(workspace, side, settings.block)
        for _ in range(TRIES):
            try:
                found, version = self._read(key), ""
            except NEVER_BELIEVED:
                found, version = None, None
            if found is not None:
                there, version, plain = found
                young = time.time() - there.written_unix < DAY_S
                if there.settings == settings and plain != self._seal.sealed and young:
                    return
            record = BlockRecord(
                workspace=workspace,
                side=side,
                host=host,
                settings=settings,
                written_unix=time.time(),
            )
            if self._write(record, version):
                return
        raise self._records.contested(key)

    def withdraw(self, keys: Iterable[ObjectKey]) -> None:
        """Delete records whose block is gone or is kept in another store, or whose host is gone:
        they count no more."""
        self._store.delete(keys)

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
        key = record.key
        body = msgspec.json.encode(
            msgspec.structs.replace(record, settings=_each_once(record.settings))
        )
        if len(body) > _MOST_BODY:
            raise InvalidInput(f"the settings for {key} are too long to keep: {len(body)} bytes")
        if not self._seal.sealed:
            return _Signed(format=FORMAT, written_unix=record.written_unix, plain=msgspec.Raw(body))
        sealed = base64.b64encode(self._seal.seal(body, key.encode())).decode()
        return _Signed(format=FORMAT, written_unix=record.written_unix, sealed=sealed)

    def _of(self, stored: StoredObject) -> BlockRecord | None:
        if stored.bytes > MOST_BYTES:
            raise self._records.damaged(stored.key, f"it has {stored.bytes} bytes")
        found = self._read(stored.key)
        return None if found is None else found[0]

    def _read(self, key: ObjectKey) -> tuple[BlockRecord, str, bool] | None:
        """The record, its version, and whether it is plain: a store that got its key later has such
        ones."""
        found = self._records.read(key)
        if found is None:
            return None
        signed, version = found
        return self._opened(key, signed), version, not signed.sealed

    def _opened(self, key: ObjectKey, signed: _Signed) -> BlockRecord:
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
        settings = _whole(record.settings)
        if not signed.sealed:
            settings = _without_commands(settings)
        return msgspec.structs.replace(record, settings=settings, written_unix=signed.written_unix)


def _compared(name: str, settings: Settings) -> Any:
    """A field as it is compared."""
    value = settings.stored[name]
    return sorted(value, key=str) if name in _IN_ANY_ORDER and isinstance(value, list) else value


def _each_once(settings: Settings) -> Settings:
    """Without what the Workspace block says already: a long ``exclude`` is kept once."""
    own = settings.blocks.get(f"workspace/{settings.block}", {})
    stored = {name: value for name, value in settings.stored.items() if own.get(name) != value}
    return msgspec.structs.replace(settings, stored=stored)


def _whole(settings: Settings) -> Settings:
    own = settings.blocks.get(f"workspace/{settings.block}", {})
    stored = {name: own[name] for name in STORED if own.get(name) is not None}
    return msgspec.structs.replace(settings, stored=stored | settings.stored)


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
    return ObjectKey(f"{settings_prefix(workspace)}{side}/{block}")


class RecordName(NamedTuple):
    """Whose record an object is, by its name."""

    workspace: WorkspaceName
    side: str
    block: str


def record_name(key: ObjectKey) -> RecordName | None:
    """None where the name is no block record's."""
    found = _NAME.fullmatch(key)
    try:
        return found and RecordName(workspace_name(found[1]), found["side"], found["block"])
    except InvalidInput:
        return None  # another program's
