"""A machine that holds an earlier state gets a later one: a sync beside a full restore.

    python -m benchmarks.sync [--gib 1] [--share 0.01] [--rounds 3] [--keep NAME]

Prints a table and JSON; --keep keeps the JSON under benchmarks/results. The S3 server (SeaweedFS)
shares the machine, and so do both machines: local ones, reached over SSH.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.content import make_below
from benchmarks.kept import summed_up, write_result
from benchmarks.machine import BenchMachine
from benchmarks.other_tools import Cost
from benchmarks.workspace import change_workspace, tree_bytes
from torpor.control.measure.host import host_facts
from torpor.control.reports import SyncReport
from torpor.control.store.embedded import EmbeddedStore
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import GIB, StoredSnapshot

MOST_MOVED = 1.3
"""The most bytes fetched, over those that the change put into the store."""
MOST_TIME = 0.2
"""The most that a sync may take of a full restore's wall time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--share", type=float, default=0.01, help="how much of it changes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.folder, options.gib, options.share, options.rounds)
    _print(result)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(folder: Path, gib: float, share: float, rounds: int) -> dict[str, Any]:
    """Sync there and back, and restore whole on another machine, ``rounds`` times in turn."""
    with tempfile.TemporaryDirectory(prefix="torpor-sync-", dir=folder) as scratch:
        place = Path(scratch)
        keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
        with (
            EmbeddedStore.start(place / "store", *keys, "torpor") as store,
            BenchMachine(place / "one", store) as source,
            BenchMachine(place / "other", store) as other,
        ):
            make_below(source.workspace, int(gib * GIB), seed=1)
            files, size = tree_bytes(source.workspace)
            source.snapshot()
            before = source.newest()
            changed = change_workspace(source.workspace, share)
            source.snapshot()
            after = source.newest()
            stored = _new_stored_bytes(source.manifest(before), source.manifest(after))
            there: list[tuple[Cost, SyncReport]] = []
            back: list[tuple[Cost, SyncReport]] = []
            restores = []
            for _ in range(rounds):
                back.append(source.sync(before))
                there.append(source.sync(after))
                target = place / "restored"
                restores.append(other.restore(target))
                shutil.rmtree(target)
    restore_s = summed_up([cost.wall_s for cost in restores])
    result: dict[str, Any] = {
        "benchmark": "sync",
        "host": host_facts(),
        "files": files,
        "bytes": size,
        "changed_bytes": changed,
        "changed_stored_bytes": stored,
        "restore": {
            "wall_s": restore_s,
            "cpu_s": summed_up([cost.cpu_s for cost in restores]),
        },
        "sync": _summed(there, after),
        "sync back": _summed(back, before),
    }
    result["moved_over_changed"] = result["sync"]["fetched_bytes"]["median"] / stored
    result["time_over_restore"] = result["sync"]["wall_s"]["median"] / restore_s["median"]
    return result


def _new_stored_bytes(before: Manifest, after: Manifest) -> int:
    """What the later snapshot's chunks that the earlier one does not have take in the store."""
    known = {chunk.name for chunk in before.chunks}
    return sum(chunk.stored for chunk in after.chunks if chunk.name not in known)


def _summed(runs: list[tuple[Cost, SyncReport]], wanted: StoredSnapshot) -> dict[str, Any]:
    """``fetched_bytes`` are with the manifest, ``copied_bytes`` on the machine."""
    costs, reports = zip(*runs, strict=True)
    return {
        "wall_s": summed_up([cost.wall_s for cost in costs]),
        "cpu_s": summed_up([cost.cpu_s for cost in costs]),
        "fetched_bytes": summed_up(
            [report.stored_bytes + wanted.manifest_bytes for report in reports]
        ),
        "copied_bytes": summed_up([report.copied_bytes for report in reports]),
        "files": summed_up([report.written for report in reports]),
        "seconds": {
            step: summed_up([report.seconds[step] for report in reports])
            for step in reports[0].seconds
        },
    }


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['files']:,} files, {result['bytes']:,} bytes, {result['changed_bytes']:,} of "
        f"them changed, stored as {result['changed_stored_bytes']:,}"
    )
    print(f"{'':12}{'wall s':>9}{'CPU s':>9}{'fetched':>16}{'copied':>16}{'files':>9}")
    restore = result["restore"]
    print(f"{'restore':12}{restore['wall_s']['median']:>9.2f}{restore['cpu_s']['median']:>9.2f}")
    for name in ("sync", "sync back"):
        row = result[name]
        print(
            f"{name:12}{row['wall_s']['median']:>9.2f}{row['cpu_s']['median']:>9.2f}"
            f"{row['fetched_bytes']['median']:>16,.0f}{row['copied_bytes']['median']:>16,.0f}"
            f"{row['files']['median']:>9,.0f}"
        )
        steps = row["seconds"].items()
        print(f"{'':12}" + ", ".join(f"{step} {took['median']:.2f}" for step, took in steps))
    moved, share = result["moved_over_changed"], result["time_over_restore"]
    print(f"fetched over changed: {moved:.2f} (at most {MOST_MOVED})")
    print(f"time over a restore's: {share:.2f} (at most {MOST_TIME})")


if __name__ == "__main__":
    main()
