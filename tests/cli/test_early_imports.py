"""Commands choose the installation before they load Prefect, which reads its folder and its
settings once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "cp here": ["cp", "x", "mywork:"],
    "cp there": ["cp", "mywork:x", "."],
    "push": ["push", "mywork"],
    "pull": ["pull", "mywork"],
    "run": ["run", "--dry-run", "--", "true"],
    "forward": ["forward", "mywork", "8888"],
    "open": ["open", "mywork", "jupyter"],
    "restore": ["restore", "mywork", "x", "y"],
    "wake": ["wake", "mywork"],
    "job": ["job", "run", "mywork", "--", "true"],
    "delete": ["delete", "mywork"],
    "spend": ["spend", "mywork"],
    "offers": ["offers", "mywork"],
}
_ASKS = """
import os, sys
class Early:
    def find_spec(self, name, *_):
        if name == "prefect" and not os.environ.get("DO_NOT_TRACK"):
            print("EARLY", flush=True)
            os._exit(1)
sys.meta_path.insert(0, Early())
from torpor_cli.app import main
sys.argv[0] = "torpor"
main()
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_loads_prefect_before_it_has_chosen_the_installation(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "x").write_text("x")
    asked = subprocess.run(
        [sys.executable, "-P", "-c", _ASKS, *COMMANDS[name]],
        cwd=folder,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert "EARLY" not in asked.stdout
    assert "no Prefect server is known here" in " ".join(asked.stdout.split())
