"""The file that says that HOME, the folder of torpor on a machine, is ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MARKER: Final = ".torpor-home"  # without it a folder is not ours, and is not removed


def mark_home(home: Path) -> None:
    """Make ``home`` and its marker where they are missing, but not what ``home`` stands in."""
    home.mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(home / MARKER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
