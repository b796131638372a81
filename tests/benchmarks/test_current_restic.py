"""Which restic a benchmark measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.current_restic import use_current_restic


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with an old restic, and nothing else."""
    place = tmp_path / "installed"
    _program(place, "restic", "echo restic 0.14.0 compiled with go")
    monkeypatch.setenv("PATH", str(place))
    return place


def test_the_installed_one_where_apt_gets_no_other(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert use_current_restic(tmp_path / "no apt") == "restic 0.14.0"
    _program(installed, "apt-get", "exit 100")
    assert use_current_restic(tmp_path / "no network") == "restic 0.14.0"
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert all(line.startswith("restic of Debian sid cannot be had here") for line in said)


def test_the_one_that_apt_gets_is_measured_and_not_installed(
    installed: Path, tmp_path: Path
) -> None:
    _program(installed, "apt-get", 'case "$*" in *download*) : > restic_9.9_amd64.deb;; esac')
    new = "printf '#!/bin/sh\\necho restic 9.9 new\\n' > restic/usr/bin/restic"
    unpack = f"/bin/mkdir -p restic/usr/bin; {new}; /bin/chmod 755 restic/usr/bin/restic"
    _program(installed, "dpkg-deb", unpack)
    assert use_current_restic(tmp_path / "unpacked") == "restic 9.9"
    assert {path.name for path in installed.iterdir()} == {"restic", "apt-get", "dpkg-deb"}


def test_a_host_without_any_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="restic is not installed"):
        use_current_restic(tmp_path / "unpacked")
