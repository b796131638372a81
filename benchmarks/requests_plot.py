"""How flows grow with snapshots and with workspaces, as one picture: requests, seconds, memory.

python -m benchmarks.requests_plot  # reads results/history.json and workspaces.json
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.files_plot import lay_out
from benchmarks.kept import RESULTS

_COLOURS: Final = ("#2f6fb0", "#e08a1e", "#3d8f5f", "#a8506c")
_STYLE: Final[Any] = {"svg.hashsalt": "torpor", "font.size": 9, "axes.titlesize": 10}

_Rows = dict[str, dict[str, dict[str, Any]]]
"""By how many there are, and by flow."""


def draw(history: dict[str, Any], workspaces: dict[str, Any]) -> bytes:
    """The two results as SVG; equal results give equal bytes."""
    with matplotlib.rc_context(_STYLE):
        canvas = Figure(figsize=(11, 5.4), layout="constrained")
        for across, (rows, what) in enumerate(
            ((history["rows"]["lines"], "snapshots"), (workspaces["rows"], "workspaces"))
        ):
            for down, (figure, title) in enumerate(
                ((_requests, "requests to the store"), (_seconds, "seconds"))
            ):
                axes = canvas.add_subplot(2, 2, 2 * down + across + 1)
                lay_out(axes, f"{title}, by {what}", what)
                _lines(axes, rows, figure)
        written = io.BytesIO()
        canvas.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def main() -> None:
    history, workspaces = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("history", "workspaces")
    )
    picture = RESULTS / "requests.svg"
    picture.write_bytes(draw(history, workspaces))
    print(picture)


def _requests(costs: dict[str, Any]) -> float:
    return float(sum(costs["requests"][verb] for verb in ("list", "get", "head", "put", "delete")))


def _seconds(costs: dict[str, Any]) -> float:
    return float(costs["s"]["median"])


def _lines(axes: Axes, rows: _Rows, figure: Callable[[dict[str, Any]], float]) -> None:
    counts = sorted(map(int, rows))
    for colour, flow in zip(_COLOURS, rows[str(counts[0])], strict=False):
        values = [figure(rows[str(count)][flow]) for count in counts]
        axes.plot(counts, values, "o-", color=colour, label=flow, ms=4)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
