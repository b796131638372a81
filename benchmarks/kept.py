"""Keeping a result beside the code that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Keep a result as benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return path
