"""Draw the README's pictures, from kept results and a recorded run, as SVG.

    python docs/pictures/draw.py             # bars.svg, life.svg and demo.svg, beside this file
    python docs/pictures/draw.py --record    # run `make demo` first, and keep what it printed

bars.svg and life.svg come from benchmarks/results/peers.json, demo.svg from demo.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from torpor.control.store_prices import LIST_PRICES

HERE: Final = Path(__file__).resolve().parent
CHECKOUT: Final = HERE.parents[1]
PEERS: Final = CHECKOUT / "benchmarks" / "results" / "peers.json"
RECORDING: Final = HERE / "demo.json"

INK, FAINT, GRID, PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#ffffff"
BLUE, GREY, LIGHT, RED = "#2563eb", "#9ca3af", "#d1d5db", "#dc2626"

TOOLS: Final = {"torpor": BLUE, "restic": GREY, "tar+lz4+s5cmd": LIGHT}
STEPS: Final = {
    "full": "first snapshot",
    "unchanged": "nothing changed",
    "incremental": "1 % changed",
    "restore": "restore",
}

USD_H: Final = 0.71
"""One NVIDIA L4, on demand: the example of docs/guide/markets/gcp.md."""
KEPT_GB: Final = 100
WORK: Final = tuple((24.0 * day + 9, 24.0 * day + 17) for day in range(5))
"""When the example's machine is rented: hours since Monday, 0:00."""
WEEK_H: Final = 168.0

PAUSE_S: Final = 0.4
"""The longest pause that the recording shows, so that nobody waits."""


def main() -> None:
    if "--record" in sys.argv[1:]:
        RECORDING.write_text(json.dumps(record(), indent=1) + "\n")
    for name, picture in pictures().items():
        (HERE / name).write_text(picture)


def pictures() -> dict[str, str]:
    """Each picture by its file's name."""
    peers = json.loads(PEERS.read_text())
    return {
        "bars.svg": bars(peers),
        "life.svg": life(peers),
        "demo.svg": terminal(json.loads(RECORDING.read_text())),
    }


def bars(peers: dict[str, Any]) -> str:
    """Seconds of each step beside restic and tar; all bars have one scale."""
    host, tools = peers["host"], peers["tools"]
    left, width, bar = 130, 470, 17
    most = max(tools[tool][step]["wall_s"]["median"] for tool in TOOLS for step in STEPS)
    scale = width / most
    parts = [_text(20, 30, "Seconds, less is better", size=16, bold=True)]
    x = left
    for tool, colour in TOOLS.items():
        parts += [_box(x, 44, 12, 12, colour), _text(x + 18, 54, tool)]
        x += 60 + 8 * len(tool)
    y = 76.0
    for step, title in STEPS.items():
        parts.append(_text(left - 10, y + 1.5 * bar + 4, title, anchor="end"))
        for tool, colour in TOOLS.items():
            seconds = tools[tool][step]["wall_s"]["median"]
            parts.append(_box(left, y, max(seconds * scale, 1), bar - 3, colour))
            parts.append(_text(left + seconds * scale + 6, y + 11, f"{seconds:.1f}", size=12))
            y += bar
        y += 12
    rounds = tools["torpor"]["full"]["wall_s"]["n"]
    caption = (
        f"{peers['gib']:g} GiB in {peers['files']:,} files, medians of n = {rounds} rounds, "
        f"{host['date'][:10]}, commit {host['commit']}.",
        f"One host: {host['cores']} cores ({host['cpu']}), shared by all tools with an S3 server "
        "on loopback.",
    )
    for number, line in enumerate(caption):
        parts.append(_text(20, y + 14 + 16 * number, line, size=11, colour=FAINT))
    return _svg(660, y + 44, parts)


def life(peers: dict[str, Any]) -> str:
    """A week of a workspace that is awake while somebody works, with its cost beside a machine that
    is never ended."""
    left, right, top, bottom = 60, 560, 120, 300
    stored = peers["tools"]["torpor"]["stored_full"]["median"] / peers["bytes"]
    stored_usd_h = KEPT_GB * stored * LIST_PRICES["cloudflare-r2"].gb_month_usd / 730
    ends = {"always": USD_H * WEEK_H, "torpor": _worked(WEEK_H) * USD_H + stored_usd_h * WEEK_H}
    most = 125.0

    def at(hour: float, usd: float) -> tuple[float, float]:
        return (
            left + (right - left) * hour / WEEK_H,
            bottom - (bottom - top) * usd / most,
        )

    parts = [
        _text(20, 30, "A week of a workspace, and what it has cost (an example)", 16, bold=True)
    ]
    for usd in range(0, 126, 25):
        x, y = at(0, usd)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(_text(x - 8, y + 4, f"{usd} $", 12, colour=FAINT, anchor="end"))
    parts.append(_text(left, 62, "awake", 12, BLUE, bold=True))
    parts.append(_text(left + 46, 62, "on a rented machine; asleep in the bucket otherwise", 12))
    parts.append(_box(left, 74, right - left, 16, GRID))
    for began, ended in WORK:
        parts.append(_box(at(began, 0)[0], 74, at(ended, 0)[0] - at(began, 0)[0], 16, BLUE))
    for number, day in enumerate(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")):
        parts.append(_text(at(24 * number + 12, 0)[0], bottom + 18, day, 12, anchor="middle"))
    turns = sorted({0.0, WEEK_H, *(hour for pair in WORK for hour in pair)})
    slept = [at(hour, _worked(hour) * USD_H + stored_usd_h * hour) for hour in turns]
    parts.append(_line([at(0, 0), at(WEEK_H, ends["always"])], RED))
    parts.append(_line(slept, BLUE))
    for name, words, colour in (
        ("always", "never ended", RED),
        ("torpor", "with torpor", BLUE),
    ):
        x, y = at(WEEK_H, ends[name])
        parts.append(_text(x + 8, y, f"{ends[name]:.2f} $", 13, colour, bold=True))
        parts.append(_text(x + 8, y + 15, words, 12, colour))
    caption = (
        f"One NVIDIA L4 at {USD_H} $/h, awake 8 hours on each working day; {KEPT_GB} GB, stored as "
        f"{KEPT_GB * stored:.0f} GB",
        f"at R2's {LIST_PRICES['cloudflare-r2'].gb_month_usd} $ a GB and month "
        f"({stored_usd_h * WEEK_H:.2f} $ for the week). Computed from these prices, not billed.",
    )
    for number, line in enumerate(caption):
        parts.append(_text(20, bottom + 44 + 16 * number, line, 11, FAINT))
    return _svg(660, bottom + 74, parts)


def _worked(hour: float) -> float:
    """The hours in which the machine was rented until then."""
    return sum(max(0.0, min(hour, ended) - began) for began, ended in WORK)


def record() -> list[list[Any]]:
    """Run `make demo`; its lines, each with the second at which it came."""
    command = ["make", "--silent", "demo"]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as demo:
        lines = [
            [round(time.monotonic() - began, 1), line.rstrip("\n")] for line in demo.stdout or ()
        ]
    if demo.returncode:
        raise SystemExit(f"make demo ended with status {demo.returncode}: nothing was kept")
    return lines


def terminal(lines: list[list[Any]]) -> str:
    """The recorded lines as a terminal shows them. They appear in turn where CSS is animated, and
    stand there at once elsewhere."""
    shown = [[0.0, "$ make demo"], *lines]
    high, wide = 17, 7.25
    width = 32 + wide * max(len(text) for _, text in shown)
    height = 52 + high * len(shown)
    at, clock, rows = 0.5, 0.0, []
    for number, (second, text) in enumerate(shown):
        at += min(second - clock, PAUSE_S) if number else 0.0
        clock = second
        colour = "#7dd3fc" if text.startswith("$ ") else "#e5e7eb"
        rows.append(
            f'<text class="l" style="animation-delay:{at:.1f}s" x="16" '
            f'y="{52 + high * number}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
        )
    style = (
        "text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        "@keyframes show{from{opacity:0}to{opacity:1}}"
        ".l{animation:show 1ms both}"
        "@media (prefers-reduced-motion:reduce){.l{animation:none}}"
    )
    dots = [
        f'<circle cx="{20 + 18 * number}" cy="18" r="5" fill="{colour}"/>'
        for number, colour in enumerate(("#f87171", "#fbbf24", "#34d399"))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">\n'
        f"<title>A run of make demo</title>\n<style>{style}</style>\n"
        + "\n".join([_box(0, 0, width, height, "#111827", corner=8), *dots, *rows])
        + "\n</svg>\n"
    )


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    paper = _box(0.5, 0.5, width - 1, height - 1, PAPER, corner=8, edge=GRID)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">\n' + "\n".join([paper, *parts]) + "\n</svg>\n"
    )


def _text(
    x: float,
    y: float,
    words: str,
    size: int = 13,
    colour: str = INK,
    *,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def _box(
    x: float, y: float, width: float, height: float, fill: str, *, corner: int = 0, edge: str = ""
) -> str:
    stroke = f' stroke="{edge}"' if edge else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{corner}" '
        f'fill="{fill}"{stroke}/>'
    )


def _line(points: Iterable[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'


if __name__ == "__main__":
    main()
