"""The folder of one local machine: what lies where, and its two records on disk.

``machine.json`` is written once, before the folder gets its name, and never changed; its presence
makes the folder ours. ``server.json`` says which process serves SSH and is rewritten at each
start. ``destroying`` marks a machine whose end has begun. Everything else can be made again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Annotated, Final, Literal, NewType

import msgspec

from torpor.control.processes import ProcessRecord
from torpor.shared.errors import NotOurs
from torpor.shared.values import Label, MachineId, learned
from torpor.shared.wire.activity import MACHINE_VARIABLE

FolderName = NewType("FolderName", str)
"""``m-`` and 12 hexadecimal digits of the label's hash: one label has one folder."""

MARK: Final = MACHINE_VARIABLE
"""The environment variable that every process of a machine inherits; it holds the machine's id."""

_NAME = re.compile(r"m-[0-9a-f]{12}")
_MACHINE_ID = re.compile(r"(m-[0-9a-f]{12})-[0-9a-f]{8}")
_RECORD_MAX_BYTES = 64 << 10
# What stands there is no record of ours, or not for us to read. Any other error (no descriptor
# left, a disk that fails) says nothing about the machine: it must not be taken for gone.
_NO_RECORD = (
    errno.ELOOP,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EACCES,
    errno.EPERM,
)


class MachineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was agreed when the machine was created."""

    version: Literal[1]
    id: MachineId
    label: Label
    offer: str
    price_usd_h: float
    server: Literal["openssh", "asyncssh"]  # what first served it; asyncssh serves all of them
    user: str
    host_key: str
    created_unix: float


class ServerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which process serves SSH on ``port``."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    boot: str
    process: ProcessRecord


class MachineFolder:
    """The folder of one machine, below the provider's folder: what lies where."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self.home: Final = root / "home"
        self.host_key: Final = root / "host_key"
        self.authorized_keys: Final = root / "authorized_keys"
        self.log: Final = root / "server.log"
        self.destroying: Final = root / "destroying"
        self.served: Final = root / "served"  # its server was started once; until then it starts
        self.machine_json: Final = root / "machine.json"
        self.server_json: Final = root / "server.json"
        # Where the folder is filled before it has its name, and what it is called once only our
        # records are left in it: a machine is there whole or not at all.
        self.new: Final = root.with_name(f".{root.name}.new")
        self.lock: Final = root.with_name(f".{root.name}.lock")

    def read_machine(self) -> MachineRecord | None:
        """The machine's record; None where there is no machine, NotOurs where it is damaged,
        OSError where that cannot be said now."""
        try:
            raw = _read(self.machine_json)
        except FileNotFoundError:
            if not os.path.lexists(self.root):
                return None
            raise NotOurs(_damaged(self.machine_json, "it is missing")) from None
        except OSError as cause:
            if cause.errno not in _NO_RECORD:
                raise
            raise NotOurs(_damaged(self.machine_json, str(cause))) from cause
        try:
            record = msgspec.json.decode(raw, type=learned(MachineRecord))
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise NotOurs(_damaged(self.machine_json, str(cause))) from cause
        if name_of_id(record.id) != self.root.name or name_of_label(record.label) != self.root.name:
            raise NotOurs(_damaged(self.machine_json, "it describes another machine"))
        return record

    def read_server(self) -> ServerRecord | None:
        """The server's record; None where none was started, or where it cannot be trusted;
        OSError where that cannot be said now."""
        try:
            return msgspec.json.decode(_read(self.server_json), type=learned(ServerRecord))
        except OSError as cause:
            if cause.errno not in (errno.ENOENT, *_NO_RECORD):
                raise
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def write_server(self, record: ServerRecord) -> None:
        write_whole(self.server_json, msgspec.json.encode(record))


def folder_of(folder: Path, label: Label) -> MachineFolder:
    return MachineFolder(folder / name_of_label(label))


def folders_in(folder: Path) -> list[MachineFolder]:
    """Every folder that bears the name of a machine; what else lies there is not ours."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [MachineFolder(folder / name) for name in names if _NAME.fullmatch(name)]


def name_of_label(label: Label) -> FolderName:
    told = msgspec.json.encode([label.owner, label.workspace, label.rental])
    return FolderName(f"m-{hashlib.blake2b(told, digest_size=6).hexdigest()}")


def name_of_id(machine: MachineId) -> FolderName | None:
    """The folder that a machine of this id has; None for an id that is not one of ours."""
    match = _MACHINE_ID.fullmatch(machine)
    return FolderName(match.group(1)) if match else None


def new_machine_id(label: Label) -> MachineId:
    """Another one at each creation, so that a warrant for a machine never fits its successor."""
    return MachineId(f"{name_of_label(label)}-{secrets.token_hex(4)}")


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``content`` in one step: a reader sees the old bytes or the new ones."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.rename(scratch, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        raise


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(_RECORD_MAX_BYTES)


def _damaged(path: Path, cause: str) -> str:
    return (
        f"{path} does not describe a machine of ours: {cause}. Nothing was touched; look into "
        f"{path.parent} and, if you do not need it, end its processes and remove it by hand"
    )
