"""How long a hibernate, a wake and an increment take, by size and line: computed from kept results.

    python -m benchmarks.sizes            prints the tables
    python -m benchmarks.sizes --write    writes them into docs/guide/sizes.md

Reads benchmarks/results/*.json. Nothing here is measured; the second table has what was measured,
beside what the formula says of it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.kept import RESULTS
from deployments.installation import CHECKOUT

PAGE: Final = CHECKOUT / "docs" / "guide" / "sizes.md"
SIZES_GB: Final = (10, 70, 500)
LINES_MBIT_S: Final = (200, 1_000, 10_000)
CHANGED: Final = 0.01
"""The share of the bytes that an increment finds new."""
GB: Final = 1e9


@dataclass(frozen=True)
class Rates:
    """What was measured. ``ratio`` and ``new_ratio``: bytes stored per byte, of all and of what
    changed. ``store_b_s`` and ``restore_b_s``: bytes of the workspace a second, by two cores.
    ``share``: of the line that transfers fill. ``scan_s``: to find that nothing has changed in
    100,000 files. ``hibernate_s`` and ``wake_s``: of a flow beside its work."""

    ratio: float
    new_ratio: float
    store_b_s: float
    restore_b_s: float
    share: float
    scan_s: float
    hibernate_s: float
    wake_s: float

    def hibernate(self, size: float, line_b_s: float) -> float:
        """Seconds of a first hibernate; without the end of the machine at its market."""
        return self.hibernate_s + self._moved(size, self.ratio, line_b_s, self.store_b_s)

    def wake(self, size: float, line_b_s: float) -> float:
        """Seconds of a wake, from the first answer of the machine's SSH."""
        return self.wake_s + self._moved(size, self.ratio, line_b_s, self.restore_b_s)

    def increment(self, size: float, line_b_s: float) -> float:
        """Seconds of a hibernate where CHANGED of the bytes are new."""
        new = self._moved(size * CHANGED, self.new_ratio, line_b_s, self.store_b_s)
        return self.hibernate_s + self.scan_s + new

    def _moved(self, size: float, ratio: float, line_b_s: float, cores_b_s: float) -> float:
        """Reading, encoding and sending overlap: the slowest of them counts."""
        return max(size * ratio / (self.share * line_b_s), size / cores_b_s)


def measured_rates() -> Rates:
    """The medians of the kept results."""
    free, line = _result("peers"), _result("peers-line-50")
    feed, files, flows = _result("feed"), _result("files-100000"), _result("overhead")["flows"]
    ours, slow = free["tools"]["torpor"], line["tools"]["torpor"]
    sent = slow["stored_full"]["median"] / slow["full"]["wall_s"]["median"]
    return Rates(
        ratio=ours["stored_full"]["median"] / free["bytes"],
        new_ratio=ours["stored_incremental"]["median"] / free["changed_bytes"],
        store_b_s=feed["weights"]["read_gb_s"]["median"] * GB,
        restore_b_s=free["bytes"] / ours["restore"]["wall_s"]["median"],
        share=sent / _line_b_s(line),
        scan_s=files["tools"]["torpor"]["unchanged"]["wall_s"]["median"],
        hibernate_s=flows["hibernate"]["overhead_s"]["median"],
        wake_s=flows["wake"]["overhead_s"]["median"],
    )


def tables() -> str:
    """Both tables, as Markdown."""
    rates = measured_rates()
    kinds: dict[str, Callable[[float, float], float]] = {
        "hibernate": rates.hibernate,
        "wake": rates.wake,
        "1 % changed": rates.increment,
    }
    lines = [
        f"{mbit // 1000} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s" for mbit in LINES_MBIT_S
    ]
    rows = ["| workspace | | " + " | ".join(lines) + " |", "|---|---|" + "---|" * len(lines)]
    for size in SIZES_GB:
        for kind, seconds in kinds.items():
            cells = [shown(seconds(size * GB, mbit * 1e6 / 8)) for mbit in LINES_MBIT_S]
            rows.append(f"| {size} GB | {kind} | " + " | ".join(f"{c} (c)" for c in cells) + " |")
    return "\n".join([*rows, "", *_beside_measured(rates)])


def _beside_measured(rates: Rates) -> list[str]:
    """What was measured of the engine, which has no flow beside its work, and the formula."""
    line = _result("peers-line-50")
    ours, size, line_b_s = line["tools"]["torpor"], line["bytes"], _line_b_s(line)
    label = f"{size / GB:.2f} GB at {line_b_s * 8 / 1e6:.0f} Mbit/s"
    files = line["files"] / 100_000
    found = (
        ("restore", "restore", rates.wake(size, line_b_s) - rates.wake_s),
        (
            "1 % changed",
            "incremental",
            rates.increment(size, line_b_s) - rates.hibernate_s - rates.scan_s * (1 - files),
        ),
    )
    rows = ["| the engine alone | measured | computed |", "|---|---|---|"]
    rows += [
        f"| {label}, {what} | {ours[step]['wall_s']['median']:.2f} s (m) | {seconds:.2f} s (c) |"
        for what, step, seconds in found
    ]
    return rows


def page(text: str) -> str:
    """The page with the tables in their place."""
    place = re.compile(r"(?<=<!-- sizes -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
    return place.sub(lambda _: tables(), text)


def shown(seconds: float) -> str:
    """A time with two digits that count."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:.2g} h"


def _line_b_s(result: dict[str, Any]) -> float:
    return float(result["line_mib_s"]) * 1024 * 1024


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/guide/sizes.md")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print(measured_rates(), tables(), sep="\n\n")


if __name__ == "__main__":
    main()
