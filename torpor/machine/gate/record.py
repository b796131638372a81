"""What a restore and the gate tell each other: the folder ``gate`` of a workspace's state.

``names`` says which names the restore has still to give, by number; the restore touches it whenever
something has moved, and renames it to ``ended`` when it ends. ``given`` gets the number of each
name that is there; ``wanted`` the numbers that a command waits for. Both are appended to, 4 bytes a
number. They are files, so that either side may be killed and started again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from torpor.machine.sampler.ring import boot_id
from torpor.shared.values import learned


class Names(msgspec.Struct, frozen=True, array_like=True):
    """Whole paths without symlinks, of files that have to be fetched. ``identity``: of the restore.
    ``boot``: what was written before a machine was started again may be lost."""

    identity: bytes
    boot: str
    names: dict[int, bytes]


class Numbers:
    """Numbers that another process appends to the file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[int]:
        """Those that were not returned before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: len(data) - len(data) % 4]
        self._at += len(data)
        return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


class GateRecord:
    """The folder, of a workspace in a HOME."""

    def __init__(self, home: Path, workspace: str) -> None:
        self._folder = home / "workspaces" / workspace / "gate"
        self._names = self._folder / "names"
        self._ended = self._folder / "ended"
        self.given = Numbers(self._folder / "given")
        self.wanted = Numbers(self._folder / "wanted")

    def begin(self, identity: bytes, names: Mapping[int, bytes]) -> None:
        """Replace what another restore has left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        partial = self._folder / ".names"
        record = Names(identity, boot_id(), {**names})
        partial.write_bytes(msgspec.msgpack.encode(record))
        partial.replace(self._names)

    def goes_on(self, identity: bytes) -> bool:
        """Whether this restore has begun it, since the machine was started."""
        names = self.names()
        return names is not None and (names.identity, names.boot) == (identity, boot_id())

    def names(self) -> Names | None:
        """What it began with; None once the restore has ended, or where none has begun it."""
        return _read(self._names)

    def began(self) -> Names | None:
        """What the newest restore began with, also once it has ended."""
        return self.names() or _read(self._ended)

    def lacks(self) -> bool:
        """Whether a name is not there, also of a restore that has ended without it."""
        began = self.began()
        given = Numbers(self._folder / "given").new()
        return began is not None and not began.names.keys() <= {*given}

    def moved(self) -> None:
        with suppress(FileNotFoundError):
            os.utime(self._names)

    def moved_ns(self) -> int | None:
        """When something has moved; None once the restore has ended."""
        try:
            return self._names.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def give(self, numbers: Iterable[int]) -> None:
        self._append("given", numbers)

    def want(self, numbers: Iterable[int]) -> None:
        self._append("wanted", numbers)

    def end(self) -> None:
        """The restore gives no more names: those that are missing never come."""
        with suppress(FileNotFoundError):
            self._names.replace(self._ended)

    def complete(self, identity: bytes, count: int) -> None:
        """All ``count`` names of this restore are there, also where it went on without a gate after
        the ``end`` of an earlier run: a name that is missing now was removed."""
        began = self.began()
        if began is not None and began.identity == identity:
            self.give(range(count))
            self.end()

    def _append(self, name: str, numbers: Iterable[int]) -> None:
        data = b"".join(number.to_bytes(4, "little") for number in numbers)
        with suppress(FileNotFoundError), (self._folder / name).open("ab") as file:
            file.write(data)


def _read(path: Path) -> Names | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=learned(Names))
    except FileNotFoundError:
        return None
