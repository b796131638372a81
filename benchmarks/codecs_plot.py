"""What benchmarks/codecs.py or codecs_gpu measured as one picture: ratio against speed, a panel
for each kind of data.

    python -m benchmarks.codecs_plot benchmarks/results/codecs.json  # writes codecs.svg beside it
"""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS: Final = (
    "#b8474b", "#e08a1e", "#2f6fb0", "#7fb1e0", "#4c9a57", "#7d62a8", "#c3a6dd", "#7a7f87",
)  # fmt: skip
_COLUMNS: Final = 3
_TICKS: Final = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_TICKS_MOST: Final = 7  # in a panel; the powers of ten where there were more
_STYLE: Final[Any] = {"svg.hashsalt": "torpor", "font.size": 9, "axes.titlesize": 10}


def draw(report: dict[str, Any]) -> bytes:
    """The report of one of the two as SVG; equal reports give equal bytes."""
    rows = report["rows"]
    kinds = list(dict.fromkeys(row["data"] for row in rows))
    colours = dict(zip(dict.fromkeys(row["codec"] for row in rows), _COLOURS, strict=False))
    lines = -(-len(kinds) // _COLUMNS)
    with matplotlib.rc_context(_STYLE):
        canvas = Figure(figsize=(3.3 * _COLUMNS, 2.5 * lines + 0.8), layout="constrained")
        panels = list(canvas.subplots(lines, _COLUMNS, squeeze=False).flat)
        for axes, kind in zip(panels, kinds, strict=False):
            _panel(axes, kind, [row for row in rows if row["data"] == kind], colours)
        for axes in panels[len(kinds) :]:
            axes.set_visible(False)
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        canvas.suptitle(_title(report))
        written = io.BytesIO()
        canvas.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="the JSON that one of the two wrote")
    path: Path = parser.parse_args().report
    picture = path.with_suffix(".svg")
    picture.write_bytes(draw(json.loads(path.read_text())))
    print(picture)


def _title(report: dict[str, Any]) -> str:
    host = report["host"]
    of = "the GPU" if "gpu" in host else "one core"
    where = host.get("gpu") or f"{host['cpu']}, {host['twin']}"
    return f"Ratio by GB/s of {of}, encoding (filled) and decoding; {where}, n = {report['rounds']}"


def _panel(axes: Axes, kind: str, rows: list[dict[str, Any]], colours: dict[str, str]) -> None:
    axes.set_title(kind)
    axes.set_xscale("log")
    axes.grid(color="#e7e9ed")
    axes.set_axisbelow(True)
    for row in rows:
        colour, encode, decode = colours[row["codec"]], row["encode_gb_s"], row["decode_gb_s"]
        axes.plot(
            [encode["median"]], [row["ratio"]], "o", color=colour, label=row["codec"], markersize=6
        )
        if decode is not None:
            axes.plot([decode["median"]], [row["ratio"]], "o", color=colour, markerfacecolor="none")
    both = [row[way] for row in rows for way in ("encode_gb_s", "decode_gb_s")]
    rates = [rate["median"] for rate in both if rate is not None]
    lowest, highest = min(rates) / 1.2, max(rates) * 1.2
    ticks = [tick for tick in _TICKS if lowest <= tick <= highest]
    if len(ticks) > _TICKS_MOST:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(lowest, highest)


if __name__ == "__main__":
    main()
