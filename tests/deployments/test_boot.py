"""``make boot``: a unit that systemd itself accepts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deployments import boot
from deployments.installation import Installation
from torpor.control.supervision import FOLDER_VARIABLE


@pytest.mark.parametrize("root", [True, False], ids=["system", "user"])
def test_systemd_accepts_the_unit(tmp_path: Path, root: bool) -> None:
    unit = boot.write_unit(Installation(tmp_path / "50% state"), tmp_path, root)
    text = unit.read_text()
    assert f"{FOLDER_VARIABLE}={tmp_path}/50%% state" in text
    assert f"WantedBy={'multi-user' if root else 'default'}.target" in text
    if not shutil.which("systemd-analyze"):
        return  # a host without systemd has no use for the unit
    which = "--system" if root else "--user"
    done = subprocess.run(
        ["systemd-analyze", which, "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert unit.name not in done.stderr, done.stderr


def test_without_systemd_cron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boot, "RUNS_SYSTEMD", tmp_path / "none")
    assert boot.main() == 0
    assert "@reboot cd " in capsys.readouterr().out
