"""``make boot``: a unit that systemd itself accepts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import boot, supervisor, unit
from deployments.installation import CHECKOUT, Installation
from deployments.parent import described as record
from deployments.server import Server
from deployments.supervisor import Supervisor
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.supervision import LOCK


@pytest.mark.parametrize("root", [True, False], ids=["system", "user"])
def test_systemd_accepts_the_unit(
    tmp_path: Path, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    file = unit.write_unit(Installation(tmp_path / "50% state"), tmp_path, root)
    text = file.read_text()
    assert f"{FOLDER_VARIABLE}={tmp_path}/50%% state" in text
    assert f"WantedBy={'multi-user' if root else 'default'}.target" in text
    # Its process is the supervisor itself. A flow run never ends with it.
    assert "Type=notify" in text and '/python" -m deployments.supervisor\n' in text
    assert "KillMode=process\nOOMPolicy=continue\nRestart=always\n" in text
    assert f"RestartPreventExitStatus={unit.REFUSED}\n" in text
    assert "RestartSec=10\nRestartSteps=5\nRestartMaxDelaySec=60\n" in text
    if not shutil.which("systemd-analyze"):
        return  # a host without systemd has no use for the unit
    which = "--system" if root else "--user"
    done = subprocess.run(
        ["systemd-analyze", which, "verify", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    # Versions before 254 know no growing pause, and say that they ignore it.
    said = [line for line in done.stderr.splitlines() if "'Restart" not in line]
    assert file.name not in "".join(said), done.stderr


def test_an_installation_with_a_unit_is_started_by_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody starts its supervisor again: `up` says so."""
    made = Installation(tmp_path / "50% state")
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path / "units")
    assert unit.start_command(made) == ""
    unit.write_unit(made, tmp_path / "units", root=True)
    assert unit.start_command(made).startswith("systemctl ")
    assert unit.start_command(Installation(tmp_path / "another")) == ""


@pytest.mark.rule(20)
def test_a_unit_of_an_earlier_version_is_told_with_the_command_that_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its lines, but the PATH of who wrote it, and the name of the same interpreter."""
    made, root = Installation(tmp_path / "50% state"), os.geteuid() == 0
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path)
    assert unit.outdated(made) == ""
    file = unit.write_unit(made, tmp_path, root)
    monkeypatch.setenv("PATH", "/opt/another/bin")
    assert unit.outdated(made) == ""
    text = file.read_text()
    file.write_text(text.replace("[Install]", "Nice=5\n\n[Install]"))  # its user's own line
    assert unit.outdated(made) == ""
    earlier = text.replace("-m deployments.supervisor", "-m deployments.up --stay")
    for old in (earlier, text.replace("RestartSec=10", "RestartSec=2")):
        file.write_text(old)
        assert "run `torpor boot`" in unit.outdated(made)
        assert unit.start_command(made).startswith("systemctl ")
        assert unit.outdated(Installation(tmp_path / "another")) == ""
    server = Server("http://127.0.0.1:9/api", own=False)
    checks = supervisor.checks_of(made, server, Supervisor([], [], lambda _: None, record(server)))
    (check,) = [one for one in checks if one.name == "unit"]
    assert check.look() == [unit.outdated(made)]
    unit.write_unit(made, tmp_path, root)
    assert (unit.outdated(made), check.look()) == ("", [])


def test_a_unit_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path / "home" / "units")
    monkeypatch.setattr(unit, "RUNS_SYSTEMD", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert boot.main() == 1
    assert f"{tmp_path}/home/units/torpor.service cannot be written" in capsys.readouterr().err


def test_the_page_of_a_vps_ends_with_torpor_running_under_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page names each command that `torpor boot` prints, in its order."""
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path / "units")
    monkeypatch.setattr(unit, "RUNS_SYSTEMD", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with Installation(tmp_path).locked(LOCK):  # it is up, by hand
        assert boot.main() == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    commands = [line.partition("   #")[0] for line in printed]
    assert commands[0] == "torpor down" and len(commands) == 3
    page = (CHECKOUT / "docs" / "guide" / "where-it-runs.md").read_text()
    (block,) = re.findall(r"```\n(uv tool install .*?)```", page, re.DOTALL)
    lines = [line.partition("   #")[0].strip() for line in block.splitlines()]
    assert lines[lines.index("torpor boot") + 1 :] == [*commands, "torpor status"]


def test_without_systemd_cron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unit, "RUNS_SYSTEMD", tmp_path / "none")
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
    monkeypatch.setattr(unit, "unit_folder", lambda _: tmp_path / "units")
    monkeypatch.setattr(unit, "RUNS_SYSTEMD", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    assert boot.main() == 1
    assert "`PREFECT_API_URL=https://prefect.example/api torpor up`" in capsys.readouterr().err
    assert not (tmp_path / "units").exists()
