"""A wake in an order over a line: when what comes first can be used, beside the whole.

    python -m benchmarks.first [--gib 1] [--line-mib-s 50] [--rounds 3] [--keep NAME]

Prints a table and JSON; --keep keeps the JSON under benchmarks/results. A quarter of the workspace
comes first: as the user's list says, and as was learned on a machine where all of it was read. The
S3 server (SeaweedFS) and the local machine share this host.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.content import make_below
from benchmarks.kept import summed_up, write_result
from benchmarks.machine import BenchMachine
from benchmarks.shaping import Shaper
from benchmarks.workspace import tree_bytes
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.shared.values import GIB, MIB, StoredSnapshot

MOST_TIME = 0.4
"""The most time until a quarter can be used, over that of the whole restore without an order."""
MOST_FETCHED = 1.03
"""The most bytes over the line, over those without an order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--line-mib-s", type=float, default=50.0, help="119: 1 Gbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.folder, options.gib, options.line_mib_s, options.rounds)
    _print(result)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(folder: Path, gib: float, line_mib_s: float, rounds: int) -> dict[str, Any]:
    """Restore without an order, in the user's and in the learned one, ``rounds`` times in turn."""
    runs: dict[str, list[dict[str, float]]] = {"usual": [], "first": [], "learned": []}
    with tempfile.TemporaryDirectory(prefix="torpor-first-", dir=folder) as scratch:
        place = Path(scratch)
        keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
        with (
            EmbeddedStore.start(place / "store", *keys, "torpor") as store,
            Shaper(line_bytes_s=line_mib_s * MIB) as shaper,
        ):
            with BenchMachine(place / "one", store) as source:
                make_below(source.workspace / "rest", int(gib * GIB * 3 / 4), seed=1)
                make_below(source.workspace / "server", int(gib * GIB / 4), seed=2)
                files, size = tree_bytes(source.workspace)
                _, needed = tree_bytes(source.workspace / "server")
                source.snapshot()
                plain = source.newest()
            learned = _learned(place / "user", store)
            port = shaper.relay("127.0.0.1", urlsplit(store.endpoint_url).port or 80, what="store")
            line = replace(store, endpoint_url=f"http://127.0.0.1:{port}")
            with BenchMachine(place / "other", line) as other:
                for _ in range(rounds):
                    for name, wanted, first in (
                        ("usual", plain, []),
                        ("first", plain, ["server"]),
                        ("learned", learned, []),
                    ):
                        runs[name].append(
                            _restore(other, place / "restored", wanted, first, shaper)
                        )
    result: dict[str, Any] = {
        "benchmark": "first",
        "host": host_facts(),
        "line_mib_s": line_mib_s,
        "files": files,
        "bytes": size,
        "needed_bytes": needed,
        **{
            name: {figure: summed_up([figures[figure] for figures in all_]) for figure in all_[0]}
            for name, all_ in runs.items()
        },
    }
    usual, ordered, learnt = (result[name] for name in runs)
    needed_share = usual["line_bytes"]["median"] * needed / size
    result["bound_s"] = needed_share / (line_mib_s * MIB)
    result["learned_over_bound"] = learnt["usable_s"]["median"] / result["bound_s"]
    result["learned_over_usual"] = learnt["usable_s"]["median"] / usual["wall_s"]["median"]
    result["time_over_usual"] = ordered["usable_s"]["median"] / usual["wall_s"]["median"]
    result["whole_over_usual"] = ordered["wall_s"]["median"] / usual["wall_s"]["median"]
    result["fetched_over_usual"] = ordered["line_bytes"]["median"] / usual["line_bytes"]["median"]
    return result


def _learned(folder: Path, store: EmbeddedStore) -> StoredSnapshot:
    """A snapshot of a machine that was restored, and on which what is needed was read."""
    with BenchMachine(folder, store) as machine:
        machine.restore(machine.workspace)
        for path in (machine.workspace / "server").rglob("*"):
            if path.is_file():
                path.read_bytes()
        machine.note_ready()
        machine.snapshot()
        return machine.newest()


def _restore(
    machine: BenchMachine,
    target: Path,
    wanted: StoredSnapshot,
    first: list[str],
    shaper: Shaper,
) -> dict[str, float]:
    """One restore, every byte compared: seconds until it can be used and in all, and bytes."""
    shaper.carried.clear()
    usable: list[float] = []
    before_usable: list[int] = []
    began = time.monotonic()

    def when_first() -> None:
        usable.append(time.monotonic() - began)
        before_usable.append(sum(shaper.carried.values()))

    cost = machine.restore(target, first, when_first, wanted)
    if not usable:  # all of it can be used at the end
        when_first()
    shutil.rmtree(target)
    return {
        "usable_s": usable[0],
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "line_bytes_before_usable": before_usable[0],
        "line_bytes": sum(shaper.carried.values()),
    }


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['files']:,} files, {result['bytes']:,} bytes, {result['needed_bytes']:,} of them "
        f"first; a line of {result['line_mib_s']:g} MiB/s"
    )
    print(f"{'':8}{'usable s':>10}{'whole s':>10}{'CPU s':>9}{'over the line':>16}")
    for name in ("usual", "first", "learned"):
        row = {figure: spread["median"] for figure, spread in result[name].items()}
        print(
            f"{name:8}{row['usable_s']:>10.2f}{row['wall_s']:>10.2f}{row['cpu_s']:>9.2f}"
            f"{row['line_bytes']:>16,.0f}"
        )
    print(f"usable over the usual whole: {result['time_over_usual']:.3f} (at most {MOST_TIME})")
    print(
        f"learned: {result['learned_over_usual']:.3f}, and {result['learned_over_bound']:.2f} x "
        f"the line's bound of {result['bound_s']:.2f} s"
    )
    print(f"whole over the usual whole: {result['whole_over_usual']:.3f}")
    print(f"fetched over the usual: {result['fetched_over_usual']:.4f} (at most {MOST_FETCHED})")


if __name__ == "__main__":
    main()
