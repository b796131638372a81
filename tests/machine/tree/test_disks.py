"""Disks that outlive the machine, as the mounted volumes of a provider's block do."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.machine.tree import disks
from torpor.machine.tree.disks import Mounts

TABLE = """25 1 0:22 / / rw - overlay overlay rw
30 25 8:16 / /data rw - ext4 /dev/sdb rw
31 25 8:32 / /scratch rw - ext4 /dev/sdc rw
"""


def test_a_disk_that_outlives_the_machine_is_named_and_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory at which none is mounted is looked at as any other."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(TABLE)
    monkeypatch.setattr(disks, "PROC", tmp_path)
    mounts = Mounts.of_this_machine(["/data", "/models"])
    assert mounts.disks() == ["/", "/scratch"]
    assert [(mount.path, mount.kind) for mount in mounts.remote()] == [("/data", "volume")]
    assert [mounts.is_disk(path) for path in ("/data/a", "/models/a")] == [False, True]
    assert Mounts.of_this_machine().disks() == ["/", "/data", "/scratch"]
