"""The figures as pictures: SVG, one file each, readable on white and small enough for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torpor.control.drawing import COLOURS, INK, canvas, svg
from torpor.control.measure.figures import Figure, find
from torpor.shared.values import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pictures(figures: Sequence[Figure], store: str) -> dict[str, bytes]:
    """Every picture that there are figures for, by its title."""
    drawn = {
        f"Rate by connections, store {store}": rate_by_parts(figures, store),
        "Time by phase": time_by_phase(figures),
        "Bytes stored by encoding": bytes_by_codec(figures),
    }
    return {title: picture for title, picture in drawn.items() if picture is not None}


def rate_by_parts(figures: Sequence[Figure], store: str) -> bytes | None:
    """Raw MB a second by connections, up and down apart, one line for each object size."""
    of_store = [f for f in find(figures, "storage") if f.name == store]
    if not of_store:
        return None
    drawn, panels = canvas(3.5, 2, share_y=False)
    for axes, direction in zip(panels, ("up", "down"), strict=True):
        shown = [f for f in of_store if f.direction == direction]
        sizes = sorted({f.object_bytes or 0 for f in shown})
        for colour, size in zip(COLOURS, sizes, strict=False):
            cells = sorted((f for f in shown if f.object_bytes == size), key=_by_parts)
            _with_spread(axes, cells, colour, f"objects of {size / MIB:g} MiB")
        line = find(figures, "line", name=store, direction=direction)
        if line:
            axes.axhline(line[0].median, color=INK, linestyle="--", linewidth=1)
            axes.annotate(
                "line rate", (1, line[0].median), xycoords=("axes fraction", "data"),
                xytext=(-3, 3), textcoords="offset points", ha="right", color=INK, fontsize=8,
            )  # fmt: skip
        _parts_axis(axes, sorted({f.parts or 0 for f in of_store}))
        axes.set_title("up" if direction == "up" else "down", loc="left")
        axes.set_xlabel("connections")
        axes.set_ylabel("MB/s")
        axes.set_ylim(bottom=0)
    panels[0].legend(loc="lower right", frameon=False, fontsize=8)
    return svg(drawn)


def time_by_phase(figures: Sequence[Figure]) -> bytes | None:
    """Median seconds of each phase by parts, hibernate and wake apart."""
    flows = [what for what in ("hibernate", "wake") if any(f.what == what for f in figures)]
    if not flows:
        return None
    drawn, panels = canvas(3.9, len(flows), share_y=True)
    for axes, what in zip(panels, flows, strict=True):
        whole = sorted(
            (f for f in figures if f.what == what and not f.phase and f.unit == "s"), key=_by_parts
        )
        parts = [f.parts or 0 for f in whole]
        phases = list(dict.fromkeys(f.phase for f in figures if f.what == what and f.phase))
        under = [0.0] * len(parts)
        for number, phase in enumerate(phases):
            by_parts = {f.parts: f.median for f in figures if (f.what, f.phase) == (what, phase)}
            heights = [by_parts.get(count, 0.0) for count in parts]
            colour = COLOURS[number % len(COLOURS)]
            axes.bar(range(len(parts)), heights, 0.66, under, color=colour, label=phase)
            under = [a + b for a, b in zip(under, heights, strict=True)]
        rest = [max(0.0, f.median - low) for f, low in zip(whole, under, strict=True)]
        axes.bar(range(len(parts)), rest, 0.66, under, color="#d4d8de", label="the rest")
        for at, figure in enumerate(whole):
            axes.plot([at, at], [figure.low, figure.high], color=INK, linewidth=1.2)
        axes.set_xticks(range(len(parts)), [str(count) for count in parts])
        axes.set_title(what, loc="left")
        axes.set_xlabel("parts")
        axes.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper center",
                    bbox_to_anchor=(0.5, -0.2))  # fmt: skip
    panels[0].set_ylabel("seconds")
    return svg(drawn)


def bytes_by_codec(figures: Sequence[Figure]) -> bytes | None:
    """The share of the plain bytes that each encoding stores, for each kind of data."""
    shares = [f for f in figures if f.what == "codec" and f.phase == "stored"]
    if not shares:
        return None
    kinds = list(dict.fromkeys(f.data for f in shares))
    codecs = list(dict.fromkeys(f.name for f in shares))
    drawn, (axes,) = canvas(0.9 + 0.72 * len(kinds), 1, share_y=False)
    height = 0.8 / len(codecs)
    for number, codec in enumerate(codecs):
        by_kind = {f.data: f.median for f in shares if f.name == codec}
        at = [row + (number - (len(codecs) - 1) / 2) * height for row in range(len(kinds))]
        pairs = [(y, by_kind[k]) for y, k in zip(at, kinds, strict=True) if k in by_kind]
        colour = "#c3c8d0" if codec == "raw" else COLOURS[number % len(COLOURS)]
        axes.barh([y for y, _ in pairs], [v for _, v in pairs], height * 0.9, color=colour,
                  label=codec)  # fmt: skip
        for y, value in pairs:
            axes.annotate(f"{100 * value:.0f} %", (value, y), xytext=(3, 0), va="center",
                          textcoords="offset points", fontsize=7, color=INK)  # fmt: skip
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("stored, of the plain bytes")
    axes.grid(axis="x", color="#e7e9ed")
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, fontsize=8, ncols=len(codecs), loc="lower left",
                bbox_to_anchor=(0, 1.0))  # fmt: skip
    return svg(drawn)


def _with_spread(axes: Axes, cells: Sequence[Figure], colour: str, label: str) -> None:
    x = [f.parts or 0 for f in cells]
    axes.plot(x, [f.median for f in cells], "o-", color=colour, label=label, markersize=4)
    for at, figure in zip(x, cells, strict=True):
        axes.plot([at, at], [figure.low, figure.high], color=colour, linewidth=1)
        if figure.cached:
            axes.annotate("cached", (at, figure.median), xytext=(4, 4), fontsize=7,
                          textcoords="offset points", color="#b8474b")  # fmt: skip


def _parts_axis(axes: Axes, parts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(parts, [str(count) for count in parts])
    axes.minorticks_off()


def _by_parts(figure: Figure) -> int:
    return figure.parts or 0
