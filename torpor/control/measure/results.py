"""A benchmark on disk: the table as Parquet and CSV, everything as JSON, the pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torpor.control.measure.advice import Advice
from torpor.control.measure.figures import Figure, frame

if TYPE_CHECKING:
    import pandas

TABLE: Final = "figures.parquet"


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
    """Write everything into ``folder``, which is made. CSV and Parquet hold one line a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    table = frame(figures)
    table.to_parquet(folder / TABLE, index=False)
    table.to_csv(folder / "figures.csv", index=False)
    whole = {
        **about,
        "advice": msgspec.to_builtins(list(said)),
        "figures": [figure.row() for figure in figures],
    }
    (folder / "benchmark.json").write_text(json.dumps(whole, indent=1) + "\n")
    for title, svg in pictures.items():
        (folder / f"{title.lower().replace(' ', '-')}.svg").write_bytes(svg)


def read_table(folder: Path) -> pandas.DataFrame:
    """The table of an earlier benchmark."""
    import pandas

    return pandas.read_parquet(folder / TABLE)
