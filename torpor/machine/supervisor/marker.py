"""The file that says that HOME, the folder of torpor on a machine, is ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MARKER: Final = ".torpor-home"  # without the marker, a folder is not torpor's and is not removed


def mark_home(home: Path, *, again: bool = False) -> None:
    """Make ``home`` and its marker where they are missing, but not what ``home`` stands in.

    A marker that is made ``again`` contains a word that says so, because its time is not when the
    machine began.
    """
    home.mkdir(mode=0o700, exist_ok=True)
    marker = home / MARKER
    try:
        fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.write(fd, b"made again\n" if again else b"")
    except OSError:  # the disk is full: an empty marker would look like a first one
        marker.unlink()
        raise
    finally:
        os.close(fd)
