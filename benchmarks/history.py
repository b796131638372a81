"""What a flow costs by how many snapshots its workspace has: requests of the control side, seconds.

    python -m benchmarks.history [--snapshots 5,300,3000] [--rounds 3] [--keep NAME]

A small workspace at the local provider, with a Prefect server and a bucket of its own. Its history
is made of copies of its first snapshot: as one line, each copy goes on from the one before; as
lines, each goes on from the first, on a machine of its own. Then the workspace wakes, is backed up
with a retention that keeps all, shown in `status`, and hibernates. Prints JSON with the requests
and seconds of each, n = ROUNDS after one that is not counted; --keep keeps it under
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from benchmarks.content import make_below
from benchmarks.flow_costs import cost, in_own_installation, own_bucket, summed_up_costs
from benchmarks.kept import write_result
from deployments.demo_story import NAME, home_of
from deployments.installation import Installation
from torpor.control.measure.host import host_facts
from torpor.control.store.manifests import manifests, open_manifest
from torpor.control.store.receipts import write_receipt
from torpor.shared.format.lineage import Lineage, lineage_of
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, SnapshotId, made_at, new_snapshot_id

WORKSPACE_BYTES: Final = 1 * MIB
SHAPES: Final = ("one line", "lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--snapshots", default="5,300,3000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # of the process that runs
    parser.add_argument("--shape", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(count) for count in options.snapshots.split(",")]
    if options.inside:
        rows = _rows(Installation(options.inside), options.shape, counts, options.rounds)
        print(json.dumps(rows))
        return
    result = measure(counts, options.rounds)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(counts: list[int], rounds: int, shapes: Sequence[str] = SHAPES) -> dict[str, Any]:
    """By shape and number of snapshots, what each flow costs. ``counts`` ascend."""
    given = ["--snapshots", ",".join(map(str, counts)), "--rounds", str(rounds)]
    rows = {shape: in_own_installation("history", "--shape", shape, *given) for shape in shapes}
    return {"benchmark": "history", "host": host_facts(), "rows": rows}


def _rows(installation: Installation, shape: str, counts: list[int], rounds: int) -> Any:
    from flows import backup, create, hibernate, wake  # Prefect reads this process's environment
    from tasks.overview import look_at_all
    from tasks.prefect_alerts import PrefectAlerts

    acts: dict[str, Callable[[], object]] = {
        "wake": lambda: wake(NAME),
        "backup": lambda: backup(NAME, keep_last=10_000),
        "status": lambda: look_at_all([NAME], PrefectAlerts()),
        "hibernate": lambda: hibernate(NAME),
    }
    rows = {}
    with own_bucket(installation):
        make_below(home_of(installation, create(NAME)) / "workspace", WORKSPACE_BYTES, seed=1)
        hibernate(NAME)
        for count in counts:
            fill(shape, count)
            taken = [{name: cost(act) for name, act in acts.items()} for _ in range(rounds + 1)]
            rows[str(count)] = {
                name: summed_up_costs([one[name] for one in taken]) for name in acts
            }
    return rows


def fill(shape: str, count: int) -> None:
    """Verified copies of the first snapshot, until there are ``count`` snapshots."""
    from tasks.workspace_blocks import open_workspace

    opened = open_workspace(NAME)
    store, name, seal = opened.store, opened.spec.name, opened.seal
    there = sorted(manifests(store, name))
    first = there[0]
    manifest, _ = open_manifest(store, name, first, seal)
    before = lineage_of(open_manifest(store, name, there[-1], seal)[0])
    root = lineage_of(manifest)
    for number in range(len(there), count):
        snapshot = _next(before.snapshot)
        before = Lineage.after(root if shape == "lines" else before, snapshot, equal=False)
        copy = replace(
            manifest,
            snapshot=snapshot,
            machine=f"copy{number}" if shape == "lines" else manifest.machine,
            environment={**manifest.environment, **before.record()},
        )
        blob, hashed = encode_manifest(copy, seal)
        seen = store.put(manifest_key(name, snapshot), blob)
        write_receipt(store, seen, copy, hashed.hex(), f"local-{number}", "backup")


def _next(last: SnapshotId) -> SnapshotId:
    return new_snapshot_id(made_at(last) + timedelta(seconds=1))


if __name__ == "__main__":
    main()
