"""Finds the programs of this host that torpor starts."""

from __future__ import annotations

import os
import shutil


def found(name: str) -> str | None:
    """The program's path, by the absolute directories of PATH. A relative directory, such as
    `./node_modules/.bin`, would be in the current folder, which a machine may have written."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, folders)))
