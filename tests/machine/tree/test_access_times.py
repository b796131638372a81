"""Access times say which files others have read, and disks that do not keep them are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.trees import let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.tree.access_times import blind_place, used_files
from torpor.machine.tree.names import READ, Names, Signature
from torpor.machine.tree.read import read_at
from torpor.machine.tree.walk import walk

LONG_AGO_NS = 10**18


def _restored(file: Path, data: bytes, mtime_ns: int = LONG_AGO_NS) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    os.utime(file, ns=(mtime_ns, mtime_ns))
    return file


def test_what_others_read_or_write_shows_and_what_the_agent_reads_does_not(tmp_path: Path) -> None:
    for name in ("read", "d/mapped", "agent", "looked at"):
        _restored(tmp_path / name, b"data")
    _restored(tmp_path / "from the future", b"data", 10**19 // 2)
    let_settle()
    root, since_ns = os.fsencode(tmp_path), (tmp_path / "agent").stat().st_ctime_ns
    (tmp_path / "read").read_bytes()
    (tmp_path / "d/mapped").read_bytes()
    (tmp_path / "new").write_bytes(b"written")
    with (tmp_path / "looked at").open():
        seen = Signature.of((tmp_path / "agent").stat())
    assert read_at(root, b"agent", 0, 4, seen).stable
    assert used_files([root], since_ns, lambda: None) == [
        {b"read", b"d/mapped", b"new", b"from the future"}
    ]
    names = walk([root], Names(1), None, lambda: None).names
    read = {e.path for e, marks in zip(names.entries, names.marks, strict=True) if marks & READ}
    assert read == {b"read", b"d/mapped"}
    assert blind_place([root], None) is None


@pytest.mark.parametrize("option", ["noatime", "relatime"])
def test_a_disk_that_keeps_no_access_times_is_named(
    needs_server: None, tmp_path: Path, option: str
) -> None:
    script = (
        "import os, sys; from torpor.machine.tree.access_times import blind_place; "
        "print(blind_place([os.fsencode(sys.argv[1])], None))"
    )
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o "$1" none "$2/disk" && exec "$0" -c "$3" "$2"'
    argv = ["unshare", "--mount", "sh", "-c", mount, sys.executable, option, str(tmp_path), script]
    if os.geteuid() != 0:
        argv.insert(1, "--map-root-user")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    blind = os.fsencode(tmp_path / "disk") if option == "noatime" else None
    assert (done.stdout, done.returncode) == (f"{blind}\n", 0), done.stderr
