"""Who writes a file, as the kernel and the processes tell."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from torpor.machine.tree.writers import is_written, written

KERNELS = {
    "leases": None,
    "of another user": lambda: OSError(errno.EACCES, "not yours"),
    "of a network": lambda: BlockingIOError(errno.EAGAIN, "never"),
}


@pytest.fixture(params=KERNELS, ids=lambda name: name.replace(" ", "-"))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that grants leases, or none."""
    refusal = KERNELS[request.param]
    inner = fcntl.fcntl

    def refuses(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_SETLEASE and refusal is not None:
            raise refusal()
        return inner(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    return str(request.param)


@pytest.mark.rule(12)
def test_a_file_that_is_written_is_found_with_its_program(kernel: str, tmp_path: Path) -> None:
    names = {name: os.fsencode(tmp_path / name) for name in ("written", "mapped", "read", "alone")}
    for path in names.values():
        Path(os.fsdecode(path)).write_bytes(b"content")
    mapped = os.open(names["mapped"], os.O_RDWR)
    with (
        open(names["written"], "ab"),
        open(names["read"], "rb"),
        mmap.mmap(mapped, 7),
    ):
        os.close(mapped)
        found = written([*names.values(), os.fsencode(tmp_path / "no such")])
        assert found.keys() == {names["written"], names["mapped"]}
        assert all(who.startswith(f"process {os.getpid()} (") for who in found.values())
        knows = kernel == "leases"
        assert is_written(names["written"]) is (True if knows else None)
        assert is_written(names["alone"]) is (False if knows else None)
    assert written([*names.values()]) == {}
