"""What benchmarks/files.py measured as one picture: seconds and memory by the number of files.

python -m benchmarks.files_plot  # reads results/files-*.json, writes results/files.svg
"""

from __future__ import annotations

import io
import json
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.files import STEPS
from benchmarks.kept import RESULTS

_COLOURS: Final = {"torpor": "#2f6fb0", "restic": "#e08a1e", "tar": "#7a7f87"}
_TITLES: Final = {"full": "first snapshot", "unchanged": "nothing changed", "restore": "restore"}
_PEAKS: Final = {"agent_peak_mib": ("agent", "-"), "control_peak_mib": ("control side", "--")}
_STYLE: Final[Any] = {"svg.hashsalt": "torpor", "font.size": 9, "axes.titlesize": 10}


def draw(results: list[dict[str, Any]]) -> bytes:
    """The results as SVG; equal results give equal bytes."""
    results = sorted(results, key=lambda result: int(result["files"]))
    with matplotlib.rc_context(_STYLE):
        canvas = Figure(figsize=(11, 3), layout="constrained")
        *panels, memory = canvas.subplots(1, len(STEPS) + 1)
        for axes, step in zip(panels, STEPS, strict=True):
            lay_out(axes, f"{_TITLES[step]}, s", "files")
            for tool, colour in _COLOURS.items():
                walls = {
                    result["files"]: result["tools"][tool][step]["wall_s"]["median"]
                    for result in results
                    if tool in result["tools"]
                }
                axes.plot([*walls], [*walls.values()], "o-", color=colour, label=tool, ms=4)
        lay_out(memory, "memory at most, MiB", "files")
        for peak, (whose, line) in _PEAKS.items():
            mib = {result["files"]: result[peak] for result in results}
            memory.plot(
                [*mib], [*mib.values()], f"o{line}", color=_COLOURS["torpor"], label=whose, ms=4
            )
        memory.legend(frameon=False)
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        written = io.BytesIO()
        canvas.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def main() -> None:
    found = [json.loads(path.read_text()) for path in RESULTS.glob("files-*.json")]
    picture = RESULTS / "files.svg"
    picture.write_bytes(draw(found))
    print(picture)


def lay_out(axes: Axes, title: str, across: str) -> None:
    """A panel with a title and what it shows across, both scales by powers of ten."""
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color="#e7e9ed")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    main()
