"""Draw the README's pictures, from kept results and a recorded run, as SVG.

    python docs/pictures/draw.py    # bars.svg, life.svg and evening.svg, beside this file

bars.svg and life.svg come from benchmarks/results/peers.json, evening.svg from evening.json, which
evening.py records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from torpor.control.store_prices import LIST_PRICES

HERE: Final = Path(__file__).resolve().parent
CHECKOUT: Final = HERE.parents[1]
PEERS: Final = CHECKOUT / "benchmarks" / "results" / "peers.json"
RECORDING: Final = HERE / "evening.json"

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

SHOWN: Final = (
    "torpor init",
    "torpor create",
    "ssh mywork",
    "torpor hibernate",
    "torpor wake",
    "torpor job run",
)
"""The commands of the evening that the picture shows; ``--detach`` is left out."""
PAUSE_S: Final = 0.4
"""The longest pause that the picture shows, so that nobody waits."""
TYPED_S: Final = 1.5
"""The pause after a command has ended, for whoever reads."""
ROWS, COLUMNS = 24, 80


def main() -> None:
    for name, picture in pictures().items():
        (HERE / name).write_text(picture)


def pictures() -> dict[str, str]:
    """Each picture by its file's name."""
    peers = json.loads(PEERS.read_text())
    return {
        "bars.svg": bars(peers),
        "life.svg": life(peers),
        "evening.svg": terminal(json.loads(RECORDING.read_text())),
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


def terminal(evening: list[tuple[str, list[tuple[float, str]]]]) -> str:
    """The recorded commands as a terminal shows them: its lines appear in turn, and those above
    scroll away, where CSS is animated. Elsewhere it shows the last ones."""
    high, wide, top = 17, 7.25, 52
    lines = [line for command in evening for line in _of_command(*command)]
    width, height = 32 + wide * COLUMNS, top + high * ROWS
    clock, rows, scrolls = 0.5, list[str](), list[tuple[float, int]]()
    for number, (pause, text) in enumerate(lines):
        clock = round(clock + pause, 1)
        colour = "#7dd3fc" if text.startswith("$ ") else "#e5e7eb"
        rows.append(
            f'<text class="l" style="animation-delay:{clock:.1f}s" x="16" '
            f'y="{top + high * number}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
        )
        if number >= ROWS:
            scrolls.append((clock, high * (number - ROWS + 1)))
    whole = clock + 1
    moves = "".join(f"{100 * at / whole:.4f}%{{transform:translateY(-{y}px)}}" for at, y in scrolls)
    end = scrolls[-1][1] if scrolls else 0
    style = (
        "text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        "@keyframes show{from{opacity:0}to{opacity:1}}"
        f"@keyframes move{{0%{{transform:none}}{moves}100%{{transform:translateY(-{end}px)}}}}"
        ".l{animation:show 1ms both}"
        f".m{{transform:translateY(-{end}px);animation:move {whole:.1f}s step-end both}}"
        "@media (prefers-reduced-motion:reduce){.l,.m{animation:none}}"
    )
    dots = [
        f'<circle cx="{20 + 18 * number}" cy="18" r="5" fill="{colour}"/>'
        for number, colour in enumerate(("#f87171", "#fbbf24", "#34d399"))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">\n'
        f"<title>A first evening with torpor</title>\n<style>{style}</style>\n"
        f'<clipPath id="c"><rect y="38" width="{width:.0f}" height="{height - 44}"/></clipPath>\n'
        + "\n".join([_box(0, 0, width, height, "#111827", corner=8), *dots])
        + f'\n<g clip-path="url(#c)"><g class="m" transform="translate(0 -{end})">\n'
        + "\n".join(rows)
        + "\n</g></g>\n</svg>\n"
    )


def _of_command(command: str, lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """What the picture shows of a command: each line, and the pause before it."""
    if not command.startswith(SHOWN) or "--detach" in command:
        return []
    shown, clock = [(TYPED_S, f"$ {command}")], 0.0
    for at, text in lines:
        shown.append((min(max(0.0, at - clock), PAUSE_S), text))
        clock = max(clock, at)
    return shown


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
