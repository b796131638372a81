"""Commands of torpor in an empty home, so that an installation of yours stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torpor.control.ports import free_ports

TORPOR: Final = (sys.executable, "-P", "-m", "torpor_cli")
DEMO: Final = "demo"
"""The workspace that `torpor up` makes, on a machine that is up."""


@dataclass(frozen=True)
class OwnHome:
    """``env``: of each command."""

    folder: Path
    env: Mapping[str, str]

    def python(self) -> dict[str, str]:
        """The environment of a program that uses torpor from Python, as `torpor up` says."""
        state = self.folder / ".local" / "state" / "torpor"
        port, login = ((state / name).read_text().strip() for name in ("server.port", "login"))
        return {
            **self.env,
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_API_AUTH_STRING": login,
        }


@contextmanager
def own_home() -> Iterator[OwnHome]:
    """A home in which `torpor up` has run; ends its machines and its server."""
    ours = ("PREFECT_", "TORPOR_", "XDG_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        home = Path(folder).resolve()
        env = rest | {"HOME": str(home)}
        try:
            run([*TORPOR, "up", "--port", str(free_ports(1)[0]), "--idle", "off"], env)
            run([*TORPOR, "ssh", "--setup"], env)
            yield OwnHome(home, env)
        finally:
            run([*TORPOR, "down", "--machines"], env)


def run(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command, which nobody answers. Raises CalledProcessError where it fails."""
    subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
