"""Who hears of a disk that refuses what was written."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.manifests import entry
from tests.fixtures.mapper import Mapper
from torpor.machine.tree.batch import Stat, packed_signature
from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.proofs import WriteProofs
from torpor.machine.tree.write_back import WriteBack
from torpor.shared.errors import MachineError
from torpor.shared.format.manifest import FILE

FILES = [entry(FILE, b"file", size=1)]


class _Call:
    """A function of a C library that fails with each of these errors, and then no more."""

    def __init__(self, *codes: int) -> None:
        self.argtypes: tuple[object, ...] = ()
        self.asked = 0
        self._codes = [*codes]

    def __call__(self, *_: object) -> int:
        self.asked += 1
        if not self._codes:
            return 0
        ctypes.set_errno(self._codes.pop())
        return -1


def _library(monkeypatch: pytest.MonkeyPatch, **calls: _Call) -> None:
    library = SimpleNamespace(**{"syncfs": _Call(), "sync_file_range": _Call(), **calls})
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)


def test_an_error_while_the_rest_arrives_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = WriteBack([os.fsencode(tmp_path)], every_bytes=10)
    sync = _Call(errno.EIO)
    _library(monkeypatch, syncfs=sync)
    back.wrote(9)
    assert sync.asked == 0
    back.wrote(1)
    with pytest.raises(MachineError, match="did not take"):
        back.complete([])
    assert sync.asked == 2
    back.close()


@pytest.mark.parametrize(
    ("release", "kind", "asked"),
    [("5.4.0-150-generic", "ext4", 1), ("6.8.0", "overlay", 1), ("6.8.0", "ext4", 0)],
)
def test_each_file_is_asked_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, kind: str, asked: int
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    back = WriteBack([os.fsencode(tmp_path)])
    ask = _Call(errno.EIO)
    _library(monkeypatch, sync_file_range=ask)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(Mounts, "kind_of", lambda *_: kind)
    if asked:
        with pytest.raises(MachineError, match="did not take"):
            back.complete(FILES)
    else:
        back.complete(FILES)
    assert ask.asked == asked
    back.close()


def test_a_file_that_a_program_has_mapped_for_writing_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5000))
    proofs = WriteProofs(FILES)
    st = Stat.of(os.stat(file))
    proofs.keep(0, packed_signature(*st[:4]))
    targets = [os.fsencode(tmp_path)]
    assert proofs.now(targets)(0, st)
    with Mapper(file):
        assert not proofs.now(targets)(0, st)
