"""``make boot``: a unit that systemd itself accepts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import boot, parent
from deployments.installation import Installation
from torpor.control.own_server import FOLDER_VARIABLE


@pytest.mark.parametrize("root", [True, False], ids=["system", "user"])
def test_systemd_accepts_the_unit(
    tmp_path: Path, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    unit = boot.write_unit(Installation(tmp_path / "50% state"), tmp_path, root)
    text = unit.read_text()
    assert f"{FOLDER_VARIABLE}={tmp_path}/50%% state" in text
    assert f"WantedBy={'multi-user' if root else 'default'}.target" in text
    # Its process is the supervisor itself. A flow run never ends with it.
    assert "Type=notify" in text and '/python" -m deployments.supervisor\n' in text
    assert "KillMode=process\nOOMPolicy=continue\nRestart=always\n" in text
    assert f"RestartPreventExitStatus={parent.REFUSED}\n" in text
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


def test_an_installation_with_a_unit_is_started_by_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody starts its supervisor again: `up` says so."""
    made = Installation(tmp_path / "50% state")
    monkeypatch.setattr(boot, "unit_folder", lambda _: tmp_path / "units")
    assert boot.starts(made) == ""
    boot.write_unit(made, tmp_path / "units", root=True)
    assert boot.starts(made).startswith("systemctl ")
    assert boot.starts(Installation(tmp_path / "another")) == ""


def test_without_systemd_cron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boot, "RUNS_SYSTEMD", tmp_path / "none")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "50% state"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert boot.main() == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("@reboot cd ")
    assert rf"{FOLDER_VARIABLE}='{tmp_path}/50\% state' " in line


def test_with_a_server_of_the_users_own_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unit would not know it, and start a server of torpor's own at boot."""
    monkeypatch.setattr(boot, "unit_folder", lambda _: tmp_path / "units")
    monkeypatch.setattr(boot, "RUNS_SYSTEMD", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    assert boot.main() == 1
    assert "`PREFECT_API_URL=https://prefect.example/api torpor up`" in capsys.readouterr().err
    assert not (tmp_path / "units").exists()
