"""The settings of a workspace beside its snapshots: what its blocks hold and no snapshot does.

With them, a new host that has the bucket and its key makes the blocks again (`torpor recover`).
Each Workspace block has one object, ``workspaces/NAME/blocks/BLOCK``, with all that it names. It is
signed as every record; where the store has a key, it is sealed too, with a key that no machine
gets. A *control side* is one installation: one Prefect server. Of two that use one bucket, the one
that wrote the record last says what is stored; the other one keeps its hands off it.
"""

from __future__ import annotations

import base64
import binascii
import time
from typing import Any, Final

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records
from torpor.shared.errors import (
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    RecordRefused,
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
"""Settings that are command lines, in which people write tokens: sealed, or not kept."""
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
    "see the settings by `torpor edit` without a setting, let `torpor recover --keep` write them "
    "again from a host that has them"
)

Fields = dict[str, Any]
"""A block's fields, as JSON has them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a workspace hold. ``blocks``: the fields of each by its reference, such
    as ``workspace/mywork``. ``withheld``: the names of the fields that are set and not kept.
    ``accounts``: what torpor calls the account of each provider block."""

    block: str  # the name of the Workspace block
    stored: Fields  # the fields of STORED
    blocks: dict[str, Fields] = {}
    withheld: dict[str, list[str]] = {}
    accounts: dict[str, str] = {}

    def differs_from(self, other: Settings) -> list[str]:
        """In which settings of what is stored, in words; as far as both are known."""
        both = self.stored.keys() & other.stored.keys()
        return [words for field, words in STORED.items() if field in both
                and self.stored[field] != other.stored[field]]  # fmt: skip


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The settings as one control side wrote them. ``number`` counts the writes."""

    workspace: WorkspaceName
    side: str
    host: str
    settings: Settings
    written_unix: float
    number: int = 1

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

    @property
    def sealed(self) -> bool:
        return self._seal.sealed

    def read(
        self, workspace: WorkspaceName, block: str, stored: StoredObject | None = None
    ) -> tuple[BlockRecord, str] | None:
        """The record and its version; None if there is none. RecordRefused for one that no control
        side of this store signed, that a newer torpor wrote, or that is sealed with another key.
        With ``stored``, what a listing says of the object, also for an older one that was put
        back."""
        key = record_key(workspace, block)
        found = self._records.read(key)
        if found is None:
            return None
        signed, version = found
        if stored is not None:
            self._check_age(key, signed, stored)
        return self._opened(key, signed, workspace, block), version

    def keep(
        self,
        workspace: WorkspaceName,
        settings: Settings,
        side: str,
        host: str,
        *,
        was: Settings | None = None,
        force: bool = False,
    ) -> BlockRecord | None:
        """Write the settings, where the record has others. Returns another control side's record,
        which stays: only a side whose settings ``was`` the same in what is stored writes over one,
        or by ``force``, also over one that cannot be read."""
        key = record_key(workspace, settings.block)
        slept = False
        for _ in range(TRIES):
            try:
                found = self.read(workspace, settings.block)
                there, version = found or (None, "")
                unread = False
            except RecordRefused:
                if not force:
                    raise
                there, version, unread = None, "", True
            if there is not None:
                same_side = there.side == side or not force
                if there.settings == settings and same_side and not slept:
                    return None
                known = was is not None and not was.differs_from(there.settings)
                if there.side != side and not known and not force:
                    return there
            now_unix = time.time()
            record = BlockRecord(
                workspace=workspace,
                side=side,
                host=host,
                settings=settings,
                written_unix=now_unix,
                number=there.number + 1 if there else 1,
            )
            signed = self._signed(key, record)
            try:
                if unread:
                    self._records.put(key, signed)
                elif there is None:
                    self._records.create(key, signed)
                else:
                    self._records.replace(key, signed, version)
            except (ObjectChanged, ObjectExists):
                continue  # another run's write came first
            if time.time() - now_unix < LATE_S / 2:
                return None
            slept = True  # on the way, so that it would be taken for an older state
        raise self._records.contested(key)

    def forget(self, workspace: WorkspaceName, block: str) -> None:
        """Its block is deleted, or kept in another store. Idempotent."""
        self._store.delete([record_key(workspace, block)])

    def _signed(self, key: ObjectKey, record: BlockRecord) -> _Signed:
        body = msgspec.json.encode(record)
        if len(body) > _MOST_BYTES // 2:
            raise InvalidInput(f"the settings for {key} are too long to keep: {len(body)} bytes")
        if not self.sealed:
            return _Signed(format=FORMAT, written_unix=record.written_unix, plain=msgspec.Raw(body))
        sealed = base64.b64encode(self._seal.seal(body, key.encode())).decode()
        return _Signed(format=FORMAT, written_unix=record.written_unix, sealed=sealed)

    def _opened(
        self, key: ObjectKey, signed: _Signed, workspace: WorkspaceName, block: str
    ) -> BlockRecord:
        if signed.format != FORMAT:
            raise RecordRefused(
                f"{key} in {self._store.address} has format {signed.format}, and this torpor reads "
                f"format {FORMAT}: bring it up to date"
            )
        if bool(signed.sealed) != self.sealed:
            why = "it is sealed" if signed.sealed else "it is plain, in a store with a key"
            raise self._records.damaged(key, why)
        try:
            body: Any = bytes(signed.plain)
            if signed.sealed:
                body = self._seal.open(base64.b64decode(signed.sealed), key.encode())
            record = msgspec.json.decode(body, type=learned(BlockRecord))
        except (WrongKey, binascii.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._records.damaged(key, error) from None
        if (record.workspace, record.settings.block) != (workspace, block):
            raise self._records.damaged(key, "it is of another block")
        return msgspec.structs.replace(record, written_unix=signed.written_unix)

    def _check_age(self, key: ObjectKey, signed: _Signed, stored: StoredObject) -> None:
        written_unix = signed.written_unix + self._store.clock_ahead_s()
        if stored.modified_unix - written_unix > LATE_S:
            late_h = (stored.modified_unix - written_unix) / 3600
            raise RecordRefused(
                f"{key} in {self._store.address} came into the bucket {late_h:.1f} h after torpor "
                "had signed it: somebody has put an older state back, or copied the bucket. "
                "Nothing is done that it says. If that was you, `torpor recover "
                "--believe-records` takes it as it is"
            )


def settings_for(spec: WorkspaceSpec, block: str, *, sealed: bool) -> Settings:
    """What of the workspace decides what is stored, without its blocks."""
    names = [name for name in STORED if sealed or name not in COMMANDS]
    stored = {name: msgspec.to_builtins(getattr(spec, name)) for name in names}
    return Settings(block=block, stored=stored)


def record_key(workspace: WorkspaceName, block: str) -> ObjectKey:
    return ObjectKey(f"{blocks_prefix(workspace)}{block}")
