"""A restore proves what it writes as it is written, and reads again what that does not prove."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.manifests import PLAIN, SNAPSHOT
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import (
    Machines,
    Waking,
    begin_from,
    put_manifest,
    reads_nothing,
    waking_of,
)
from tests.fixtures.trees import content
from torpor.machine.tree import compare
from torpor.machine.tree.write import TreeWriter
from torpor.shared.codecs.codec import Buffer
from torpor.shared.errors import DiskFull, MachineError
from torpor.shared.format.manifest import Entry, decode_manifest, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB

OLD_NS = 10**18
"""A file that was changed just now is always read again: a write would set that very time."""


@pytest.fixture
def waking(machines: Machines, tmp_path: Path) -> Iterator[Waking]:
    was = tmp_path / "was"
    (was / "d").mkdir(parents=True)
    for number in range(8):
        (was / f"d/{number}").write_bytes(content(number, 30_000))
    (was / "d/again").write_bytes(content(1, 30_000))
    (was / "big").write_bytes(content(50, 13 * MIB))
    (was / "link").symlink_to("d")
    os.link(was / "d/0", was / "same")
    with (was / "sparse").open("wb") as file:
        file.truncate(9 * MIB)
        os.pwrite(file.fileno(), b"end", 5 * MIB)
    (was / "hole").touch()
    os.truncate(was / "hole", 3 * MIB)
    for path in was.rglob("*"):
        os.utime(path, ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    store = MemoryStore()
    yield waking_of(machines, store, was)
    store.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that comparisons read."""
    found: list[str] = []
    together, alone = compare.read_files, compare.opened

    def read_files(place: int, paths: tuple[bytes, ...], *sizes: Any) -> Any:
        found.extend(map(os.fsdecode, paths))
        return together(place, paths, *sizes)

    def opened(path: bytes) -> Any:
        found.append(os.path.basename(os.fsdecode(path)))
        return alone(path)

    monkeypatch.setattr(compare, "read_files", read_files)
    monkeypatch.setattr(compare, "opened", opened)
    return found


def _checked(waking: Waking) -> list[str]:
    return [line.partition(":")[0] for line in waking.run.check(full=False).differences]


@pytest.mark.parametrize("first", [[], ["d"]], ids=["all at once", "something first"])
def test_what_this_run_wrote_is_not_read_again(
    waking: Waking, read: list[str], first: list[str]
) -> None:
    """Whole files, files in pieces, holes, files of the same content and files with more names."""
    if first:
        waking.use(first)
    else:
        waking.begin()
    waking.fetch()
    waking.run.finish()
    assert (_checked(waking), read) == ([], [])
    waking.run.end()
    waking.is_back()
    assert reads_nothing(waking.engine, waking.back)


def _change(path: Path) -> None:
    """Change content, and set the time back, as some programs do."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"!", 7)
    os.utime(path, ns=(OLD_NS, OLD_NS))


@pytest.mark.parametrize(
    ("name", "finished"), [("d/3", False), ("same", False), ("big", True), ("sparse", True)]
)
def test_what_was_changed_after_it_was_written_is_read_again(
    waking: Waking, read: list[str], name: str, finished: bool
) -> None:
    """Also a file that gets another name, which moves its times, afterwards."""
    waking.begin()
    waking.fetch()
    if finished:
        waking.run.finish()
    _change(waking.back / name)
    waking.run.finish()
    assert _checked(waking) == [str(waking.back / name)]
    assert {os.path.basename(path) for path in read} == {os.path.basename(name)}


@pytest.mark.parametrize("name", ["big", "sparse", "hole"])
def test_what_is_changed_while_it_is_written_is_read_again(
    waking: Waking, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After its first piece was written, and before the others are; a hole has none."""
    write_at, changed = TreeWriter.write_at, list[int]()

    def change(offset: int) -> None:
        with (waking.back / name).open("r+b") as file:
            os.pwrite(file.fileno(), b"!", offset)
        changed.append(offset)

    def meddled(self: TreeWriter, entry: Entry, offset: int, data: Buffer) -> None:
        write_at(self, entry, offset, data)
        if entry.path == os.fsencode(name) and not changed:
            change(offset + 7)

    waking.begin()
    with monkeypatch.context() as patched:
        patched.setattr(TreeWriter, "write_at", meddled)
        waking.fetch()
    if not changed:
        change(7)
    waking.run.finish()
    assert _checked(waking) == [str(waking.back / name)]


@pytest.mark.parametrize("name", ["d/3", "big", "sparse"])
def test_a_file_that_is_open_for_writing_is_read_again(
    waking: Waking, read: list[str], name: str
) -> None:
    """What a program writes later, through a mapping say, may move no time."""
    waking.begin()
    waking.fetch()
    with (waking.back / name).open("r+b"):
        waking.run.finish()
    assert _checked(waking) == []
    assert [os.path.basename(path) for path in read] == ([] if "/" in name else [name])


def test_what_was_found_there_already_is_read_again(waking: Waking, read: list[str]) -> None:
    """An earlier run wrote it; nobody knows what happened to it since."""
    waking.begin()
    waking.fetch()
    with (waking.back / "d/3").open("r+b") as file:
        os.pwrite(file.fileno(), b"!", 7)
    os.utime(waking.back / "d/3", ns=(OLD_NS, OLD_NS))
    waking.begin_again()
    waking.fetch()
    waking.run.finish()
    assert _checked(waking) == [str(waking.back / "d/3")]
    assert {"big", "sparse"} <= {os.path.basename(path) for path in read}


def test_a_digest_that_does_not_fit_the_chunk_is_found(waking: Waking) -> None:
    """The chunk is what its name says: the snapshot contradicts itself, and is not called right."""
    blob = waking.engine.store.get(manifest_key(WORKSPACE, waking.snapshot), max_bytes=MIB)
    manifest, _ = decode_manifest(blob, PLAIN, "it")
    entries = [
        msgspec.structs.replace(entry, digest=bytes(16)) if entry.path == b"d/3" else entry
        for entry in manifest.entries
    ]
    lie = msgspec.structs.replace(manifest, entries=entries, snapshot=SNAPSHOT)
    blob, _ = encode_manifest(lie, PLAIN)
    put_manifest(waking.engine, blob)
    waking.run, waking.plan = begin_from(waking.engine, blob, waking.back)
    waking.fetch()
    waking.run.finish()
    assert _checked(waking) == [str(waking.back / "d/3")]


class _Library:
    """A C library whose disk refuses what was written, the first time that somebody asks."""

    def __init__(self, code: int) -> None:
        self._left = [code]

    def __call__(self, *_: object, **__: object) -> _Library:
        return self

    def syncfs(self, fd: int) -> int:
        if not self._left:
            return 0
        ctypes.set_errno(self._left.pop())
        return -1


@pytest.mark.parametrize(
    ("code", "error"), [(errno.EIO, MachineError), (errno.ENOSPC, DiskFull)], ids=["EIO", "ENOSPC"]
)
def test_what_the_disk_has_not_taken_is_not_called_restored(
    waking: Waking, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """Its pages in memory are right: who reads them finds nothing wrong."""
    whole = sum(part.bytes for part in waking.begin().parts)
    waking.fetch()
    waking.run.finish()
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", _Library(code))
        for _ in range(2):  # the kernel tells it once
            with pytest.raises(error, match="did not take what was restored"):
                waking.run.check(full=True)
    assert sum(part.bytes for part in waking.begin_again().parts) == whole
    waking.fetch()
    waking.complete()
