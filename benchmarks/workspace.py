"""Changes to a workspace that was made to measure with, and its size."""

from __future__ import annotations

import os
import random
from pathlib import Path

from torpor.machine.agent.content import weights
from torpor.shared.values import MIB

_CHANGE = 4 * MIB


def change_workspace(folder: Path, share: float, seed: int = 2) -> int:
    """Change about ``share`` of the bytes, file by file; returns how many bytes were rewritten."""
    dice = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in files)
    small = [path for path in files if path.stat().st_size < MIB]
    big = [path for path in files if path.stat().st_size >= 2 * _CHANGE]
    changed = 0
    for path in dice.sample(small, min(len(small), int(len(small) * share))):
        path.write_bytes(path.read_bytes()[::-1])
        changed += path.stat().st_size
    while changed < total * share:
        path = dice.choice(big)
        at = dice.randrange(0, path.stat().st_size - _CHANGE) // 4096 * 4096
        with path.open("r+b") as file:
            file.seek(at)
            file.write(weights(_CHANGE // 2, dice))
        changed += _CHANGE
    return changed


def tree_bytes(folder: Path) -> tuple[int, int]:
    """Files and their bytes."""
    sizes = [
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    ]
    return len(sizes), sum(sizes)
