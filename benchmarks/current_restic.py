"""A current restic for the benchmarks: Debian 12 has 0.14.0, of August 2022."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_SUITE: Final = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    " http://deb.debian.org/debian sid main\n"
)
_LONGEST_S: Final = 300.0


def use_current_restic(folder: Path) -> str:
    """Unpack restic of Debian sid below ``folder``, and put it first in PATH; where apt cannot get
    it, the installed one stays. Returns the version that is used, as it says itself.

    Nothing is installed: the package needs no other one. apt checks Debian's signature.
    """
    try:
        place = _unpacked(folder)
    except (OSError, subprocess.SubprocessError) as cause:
        print(f"restic of Debian sid cannot be had here ({cause}): the installed one is measured")
    else:
        os.environ["PATH"] = f"{place}:{os.environ.get('PATH', '')}"
    restic = shutil.which("restic")
    if restic is None:
        raise SystemExit("restic is not installed on this host: install it")
    said = subprocess.run([restic, "version"], check=True, capture_output=True, text=True)
    return " ".join(said.stdout.split()[:2])


def _unpacked(folder: Path) -> Path:
    for below in ("lists/partial", "cache/archives/partial", "restic"):
        (folder / below).mkdir(parents=True)
    (folder / "sources.list").write_text(_SUITE)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": "none",
        "APT::Update::Error-Mode": "any",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    _run([*apt, "update"], folder)
    _run([*apt, "download", "restic"], folder)
    (package,) = folder.glob("restic_*.deb")
    _run(["dpkg-deb", "-x", str(package), "restic"], folder)
    return folder / "restic/usr/bin"


def _run(argv: list[str], folder: Path) -> None:
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=_LONGEST_S)
