"""Pictures as SVG: one style, readable on white and small enough for a page of Prefect's UI."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_WIDE: Final = 7.2  # inches; the UI's column is 584 px wide
COLOURS: Final = ("#2f6fb0", "#e08a1e", "#4c9a57", "#b8474b", "#7d62a8", "#8a6d5a", "#6f7782")
INK: Final = "#2b2f36"
_STYLE: Final[Any] = {
    "svg.hashsalt": "torpor",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.edgecolor": "#8b919b",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def canvas(height: float, columns: int, *, share_y: bool) -> tuple[Canvas, list[Any]]:
    """An empty picture, ``height`` inches high, and its panels side by side."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas  # without pyplot: no state, no window

    with matplotlib.rc_context(_STYLE):
        drawn = Canvas(figsize=(_WIDE, height), layout="constrained")
        panels = list(drawn.subplots(1, columns, sharey=share_y, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e7e9ed")
        axes.set_axisbelow(True)
    return drawn, panels


def svg(drawn: Canvas) -> bytes:
    """The finished picture."""
    import matplotlib

    written = io.BytesIO()
    # Text as paths looks the same everywhere; no date, so that equal figures give equal bytes.
    with matplotlib.rc_context(_STYLE):
        drawn.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
