"""A benchmark on disk: the table as CSV, everything as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torpor.control.measure.advice import Advice
from torpor.control.measure.figures import Figure, frame


def default_folder() -> Path:
    """Where benchmarks are kept: ``$XDG_STATE_HOME/torpor/benchmarks``, or in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "torpor" / "benchmarks"


def write_results(
    folder: Path, figures: Sequence[Figure], said: Sequence[Advice], about: Mapping[str, Any]
) -> None:
    """Make ``folder`` and write both files into it. CSV holds one line a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    frame(figures).to_csv(folder / "figures.csv", index=False)
    whole = {
        **about,
        "advice": msgspec.to_builtins(list(said)),
        "figures": [figure.row() for figure in figures],
    }
    (folder / "benchmark.json").write_text(json.dumps(whole, indent=1) + "\n")
