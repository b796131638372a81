"""Summing samples up, and keeping a result beside the code that made it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Keep a result as benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return path


def summed_up(values: Sequence[float]) -> dict[str, float]:
    """n, median and spread (lowest and highest) of one figure."""
    return {
        "n": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }
