"""A benchmark on disk: the table as CSV and Parquet, everything as JSON, the pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.control.measure.advice import Advice
from torpor.control.measure.figures import Figure, frame

_EXTRA: Final = {"matplotlib": "pictures", "pyarrow": "the table as Parquet"}
"""Packages of the extra ``benchmark``, and what is written only where they are installed."""
INSTALL: Final = (
    "Run `pip install '.[benchmark]'` in torpor's folder, with the Python of the flows."
)


def left_out() -> dict[str, str]:
    """What cannot be written here, by the package that it needs."""
    return {package: what for package, what in _EXTRA.items() if find_spec(package) is None}


def default_folder() -> Path:
    """Where benchmarks are kept: ``$XDG_STATE_HOME/torpor/benchmarks``, or in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "torpor" / "benchmarks"


def write_results(
    folder: Path,
    figures: Sequence[Figure],
    said: Sequence[Advice],
    pictures: Mapping[str, bytes],
    about: Mapping[str, Any],
) -> None:
    """Make ``folder`` and write everything into it, without what is ``left_out``.

    CSV and Parquet hold one line a figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = frame(figures)
    if "pyarrow" not in left_out():
        table.to_parquet(folder / "figures.parquet", index=False)
    table.to_csv(folder / "figures.csv", index=False)
    whole = {
        **about,
        "advice": msgspec.to_builtins(list(said)),
        "figures": [figure.row() for figure in figures],
    }
    (folder / "benchmark.json").write_text(json.dumps(whole, indent=1) + "\n")
    for title, svg in pictures.items():
        (folder / f"{title.lower().replace(' ', '-')}.svg").write_bytes(svg)
