"""Which NVIDIA GPUs this very host has."""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
_SMI_S = 10
_MAX_GPUS = 64


@functools.cache
def gpus_here() -> tuple[tuple[str, int], ...]:
    """Model and count, looked up once a process; empty where there is none."""
    models = _from_driver() or _from_smi()
    return tuple(sorted(Counter(models[:_MAX_GPUS]).items()))


def _from_driver() -> list[str]:
    found = []
    for told in sorted(DRIVER.glob("*/information")):
        try:
            text = told.read_text(errors="replace")
        except OSError:
            continue
        match = re.search(r"^Model:\s*(\S.*?)\s*$", text, re.MULTILINE)
        if match:
            found.append(match.group(1))
    return found


def _from_smi() -> list[str]:
    # Containers and WSL may have the tool where the driver's folder is not shown.
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [
        name for line in done.stdout.decode(errors="replace").splitlines() if (name := line.strip())
    ]
