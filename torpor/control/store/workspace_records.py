"""The record of a workspace in its bucket, ``settings/WORKSPACE``: who owns it, and its blocks.

A *control side* is one installation: one Prefect server with its hosts. A workspace has at most one
owner among the control sides of its bucket: the one that recovered it last (`torpor recover`).
While nobody is named, every side may act. The owner, or anybody while there is none, keeps in the
record what the workspace's blocks hold and no snapshot does, so that another host can make them
again. A record is signed as every record; where the store has a key, it is sealed too, with a key
that no machine gets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records, Unread
from torpor.control.store.s3 import RootOf
from torpor.control.store.signatures import ENVELOPE_BYTES
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    RecordRefused,
    StoreArchived,
    StoreCorrupt,
    StoreDenied,
    TorporError,
    WrongKey,
)
from torpor.shared.format.keys import Seal, records_key
from torpor.shared.format.names import settings_key, settings_prefix
from torpor.shared.values import KIB, ObjectKey, WorkspaceName, learned, workspace_name

FORMAT: Final = 1
COMMANDS: Final = ("quiesce", "resume", "programs")
"""Settings that are command lines, in which people write tokens: sealed, or not kept. Those of a
plain record are never taken."""
_ONLY_SEALED: Final = (*COMMANDS, "private_key")
MOST_BYTES: Final = 256 * KIB
_MOST_BODY: Final = MOST_BYTES // 2
WITHHELD: Final = (StoreArchived, StoreDenied)
"""A store keeps these to itself: the object is in an archive, or its key is somebody else's."""
_IDENTITY: Final = "ssh-identity/"
_DIGITS: Final = 8
_AT_ONCE: Final = 8
_ADVICE: Final = (
    "give `torpor recover WORKSPACE --store STORE` on the host that is to own the workspace, which "
    "writes it anew, or"
)

Fields = dict[str, Any]
"""A block's fields, as JSON has them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a workspace hold. ``blocks``: the fields of each by its reference, such
    as ``workspace/mywork``. ``withheld``: the names of the fields that are set and not kept."""

    block: str  # the name of the Workspace block
    blocks: dict[str, Fields] = {}
    withheld: dict[str, list[str]] = {}

    @property
    def reference(self) -> str:
        """The Workspace block, as ``blocks`` names it."""
        return f"workspace/{self.block}"


def other_name(name: str, fields: Fields) -> str:
    """A name for a block where its own is another block's: the same for the same fields."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return f"{name[:200]}-{digest[:_DIGITS]}"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The control side that recovered the workspace."""

    side: str
    host: str
    since_unix: float


class WorkspaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``side`` and ``host``: who wrote the settings, and ``written_unix``: when. ``settings``: None
    where an owner was written before anybody had kept any."""

    workspace: WorkspaceName
    side: str
    host: str
    settings: Settings | None = None
    owner: Owner | None = None
    written_unix: float = 0.0

    def owned_elsewhere(self, side: str) -> Owner | None:
        """The owner, where that is another control side."""
        return self.owner if self.owner is not None and self.owner.side != side else None


class _Signed(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed: the record, sealed (base64) or plain."""

    format: int
    written_unix: float
    sealed: str = ""
    plain: msgspec.Raw = msgspec.Raw(b"null")


class WorkspaceRecords:
    """The records of the workspaces of one store. ``store_key``: the store key, which seals them
    whatever key a user opens the store with, or what reads it from the store; None where the store
    is plain."""

    def __init__(self, store: ObjectStore, store_key: bytes | RootOf | None) -> None:
        self._store = store
        self._store_key = store_key
        self._records = Records(store, _Signed, MOST_BYTES, _ADVICE)

    def listed(self) -> list[WorkspaceName]:
        """The workspaces that have an object of the name of a record."""
        found = []
        for stored in self._store.list(settings_prefix()):
            try:
                found.append(workspace_name(stored.key.removeprefix(settings_prefix())))
            except InvalidInput:
                continue  # another program's
        return found

    def read_all(
        self, wanted: list[WorkspaceName], unread: Unread
    ) -> dict[WorkspaceName, WorkspaceRecord]:
        """The records of these workspaces, several at once; one that has gone is left out.
        ``unread`` gets the errors of those that cannot be believed, or that the store keeps to
        itself."""
        found: dict[WorkspaceName, WorkspaceRecord] = {}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="workspace-records") as threads:
            looks = [threads.submit(copy_context().run, self.read, name) for name in wanted]
            for name, look in zip(wanted, looks, strict=True):
                try:
                    record = look.result()
                except (RecordRefused, StoreCorrupt, *WITHHELD) as error:
                    unread[settings_key(name)] = error
                except InvalidInput as error:
                    unread[settings_key(name)] = RecordRefused(str(error))
                else:
                    found |= {} if record is None else {name: record}
        return found

    def read(self, workspace: WorkspaceName) -> WorkspaceRecord | None:
        """One request; None where there is none. RecordRefused for a record that somebody has
        damaged or forged, InvalidInput for one of a newer torpor."""
        found = self._read(settings_key(workspace))
        return None if found is None else found[0]

    def is_sealed(self, workspace: WorkspaceName) -> bool | None:
        """Whether its record is sealed; None where there is none that is believed, or one of a
        newer torpor. One request."""
        try:
            found = self._records.read(settings_key(workspace))
        except (RecordRefused, StoreCorrupt, *WITHHELD):
            return None
        return None if found is None or found[0].format > FORMAT else bool(found[0].sealed)

    def keep(
        self,
        workspace: WorkspaceName,
        settings: Settings | None,
        side: str,
        host: str,
        warn: Callable[[TorporError], None],
    ) -> WorkspaceRecord | None:
        """Write these settings where others are on record; returns the record as it is then. What
        another side wrote stays until this side owns the workspace: it may be all that is left of
        a host that burnt down. Raises as ``read`` does, and writes over no record that cannot be
        believed: what it said of an owner is not known. ``warn`` gets why nothing was written."""
        for _ in range(TRIES):
            found = self._read(settings_key(workspace))
            old, version = found or (None, "")
            foreign = old is not None and old.owned_elsewhere(side)
            if settings is None or foreign:
                return old
            kept = settings if old is None else _with_lost_keys(settings, old, side)
            if old is not None and old.settings == kept:
                return old
            owner = None if old is None else old.owner
            if old is not None and owner is None and old.settings and old.side != side:
                warn(_of_another(old))
                return old
            new = WorkspaceRecord(
                workspace=workspace,
                side=side,
                host=host,
                settings=kept,
                owner=owner,
                written_unix=time.time(),
            )
            try:
                if self._written(new, version):
                    return new
            except TorporError as error:
                warn(error)
                return old
        raise self._records.contested(settings_key(workspace))

    def take(self, workspace: WorkspaceName, side: str, host: str) -> None:
        """Make this control side the owner, also over a record that cannot be believed, or that the
        store keeps to itself. The settings stay those of the side that wrote them, and of then."""
        for _ in range(TRIES):
            old: WorkspaceRecord | None = None
            version: str | None = ""
            try:
                if (found := self._read(settings_key(workspace))) is not None:
                    old, version = found
            except (RecordRefused, *WITHHELD):
                version = None
            if old is not None and old.owner is not None and not old.owned_elsewhere(side):
                return
            new = old or WorkspaceRecord(
                workspace=workspace, side=side, host=host, written_unix=time.time()
            )
            owner = Owner(side=side, host=host, since_unix=time.time())
            if self._written(msgspec.structs.replace(new, owner=owner), version):
                return
        raise self._records.contested(settings_key(workspace))

    def delete(self, workspace: WorkspaceName) -> None:
        """With the workspace's snapshots."""
        self._store.delete([settings_key(workspace)])

    def _written(self, record: WorkspaceRecord, version: str | None) -> bool:
        """Whether it was written over this version: empty where none is there, None for any."""
        key = settings_key(record.workspace)
        signed = self._signed(record)
        try:
            if version is None:
                self._records.put(key, signed)
            elif version:
                self._records.replace(key, signed, version)
            else:
                self._records.create(key, signed)
        except (ObjectChanged, ObjectExists):
            return False  # another run's write came first
        return True

    def _signed(self, record: WorkspaceRecord) -> _Signed:
        key = settings_key(record.workspace)
        body = msgspec.json.encode(record)
        if len(body) > _MOST_BODY:
            raise InvalidInput(f"the settings for {key} are too long to keep: {len(body)} bytes")
        if not self._sealed:
            return _Signed(format=FORMAT, written_unix=record.written_unix, plain=msgspec.Raw(body))
        sealed = base64.b64encode(self._seal().seal(body, key.encode())).decode()
        return _Signed(format=FORMAT, written_unix=record.written_unix, sealed=sealed)

    def _read(self, key: ObjectKey) -> tuple[WorkspaceRecord, str] | None:
        """The record and its version."""
        try:
            found = self._records.read(key)
        except StoreCorrupt:  # of a longer object, or of bytes that were damaged on their way here
            now = self._store.head(key)
            if now is not None and now.bytes > MOST_BYTES + ENVELOPE_BYTES:
                raise self._records.damaged(key, f"it has {now.bytes} bytes") from None
            raise
        if found is None:
            return None
        signed, version = found
        return self._opened(key, signed), version

    @property
    def _sealed(self) -> bool:
        return self._store_key is not None

    def _seal(self) -> Seal:
        """The first use may ask the store for the store key, and raises as the store does."""
        key = self._store_key(self._store) if callable(self._store_key) else self._store_key
        return Seal(None if key is None else records_key(key))

    def _opened(self, key: ObjectKey, signed: _Signed) -> WorkspaceRecord:
        if signed.format > FORMAT:
            raise InvalidInput(
                f"{key} in {self._store.address} has format {signed.format}, and this torpor reads "
                f"format {FORMAT}: bring it up to date"
            )
        if signed.sealed and not self._sealed:
            raise self._records.damaged(key, "it is sealed, in a store without a key")
        seal = self._seal()  # a key that opens nothing is no damage of the record
        try:
            body: Any = bytes(signed.plain)
            if signed.sealed:
                body = seal.open(base64.b64decode(signed.sealed), key.encode())
            record = msgspec.json.decode(body, type=learned(WorkspaceRecord))
        except (WrongKey, binascii.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._records.damaged(key, error) from None
        if settings_key(record.workspace) != key:
            raise self._records.damaged(key, "it is of another workspace")
        if not signed.sealed and record.settings is not None:
            settings = _without_commands(record.settings)
            record = msgspec.structs.replace(record, settings=settings)
        return msgspec.structs.replace(record, written_unix=signed.written_unix)


def _with_lost_keys(settings: Settings, old: WorkspaceRecord, side: str) -> Settings:
    """The settings, and the SSH identities of the record whose private keys are in none of them:
    machines that stand may let no other one in, and no other copy may be left. A key that this side
    has put on record goes where its block says so by now."""
    blocks = dict(settings.blocks)
    for reference, fields in (old.settings.blocks if old.settings else {}).items():
        key = fields.get("private_key") if reference.startswith(_IDENTITY) else None
        withdrawn = old.side == side and "private_key" in settings.withheld.get(reference, ())
        if not key or withdrawn or any(one.get("private_key") == key for one in blocks.values()):
            continue
        blocks[other_name(reference, fields) if reference in blocks else reference] = fields
    return msgspec.structs.replace(settings, blocks=blocks)


def _of_another(record: WorkspaceRecord) -> InvalidInput:
    return InvalidInput(
        f"the bucket has the settings that {record.host} (control side {record.side}) wrote, and "
        f"they stay: `torpor recover {record.workspace} --store STORE` makes this host the owner"
    )


def _without_commands(settings: Settings) -> Settings:
    """The settings as a plain record may have them."""
    blocks = {
        reference: {name: value for name, value in fields.items() if name not in _ONLY_SEALED}
        for reference, fields in settings.blocks.items()
    }
    return msgspec.structs.replace(settings, blocks=blocks)
