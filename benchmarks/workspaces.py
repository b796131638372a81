"""What a look at all workspaces costs by how many there are in one bucket.

    python -m benchmarks.workspaces [--workspaces 5,50,500] [--rounds 3] [--keep NAME]

One workspace is awake at the local provider. The others are asleep: each has a Workspace block, a
verified snapshot and a rental that has ended. `status`, `watch` and `spend` look at them. Prints
JSON with the seconds, CPU, memory and requests of each, n = ROUNDS after one that is not counted;
--keep keeps it under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from benchmarks.content import make_below
from benchmarks.flow_costs import cost, in_own_installation, own_bucket, summed_up_costs
from benchmarks.kept import write_result
from deployments.demo_story import NAME, PRICE_USD_H, home_of
from deployments.installation import Installation
from torpor.control.measure.host import host_facts
from torpor.control.providers.offers import Offer
from torpor.control.rental.records import Rentals
from torpor.control.store.manifests import manifests, open_manifest
from torpor.control.store.receipts import write_receipt
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, WorkspaceName

if TYPE_CHECKING:
    from tasks.workspace import OpenWorkspace

WORKSPACE_BYTES: Final = 1 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workspaces", default="5,50,500")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # of the process that runs
    options = parser.parse_args()
    counts = [int(count) for count in options.workspaces.split(",")]
    if options.inside:
        print(json.dumps(_rows(Installation(options.inside), counts, options.rounds)))
        return
    result = measure(counts, options.rounds)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(counts: list[int], rounds: int) -> dict[str, Any]:
    """By number of workspaces, what each flow costs. ``counts`` ascend."""
    given = ["--workspaces", ",".join(map(str, counts)), "--rounds", str(rounds)]
    rows = in_own_installation("workspaces", *given)
    return {"benchmark": "workspaces", "host": host_facts(), "rows": rows}


def _rows(installation: Installation, counts: list[int], rounds: int) -> Any:
    from flows import create, hibernate, spend, wake, watch  # Prefect reads the environment
    from tasks.overview import look_at_all
    from tasks.prefect_alerts import PrefectAlerts
    from tasks.workspace_blocks import open_workspace

    rows = {}
    with own_bucket(installation):
        make_below(home_of(installation, create(NAME)) / "workspace", WORKSPACE_BYTES, seed=1)
        hibernate(NAME)
        wake(NAME)
        names, opened = [NAME], open_workspace(NAME)
        acts = {
            "status": lambda: look_at_all(names, PrefectAlerts()),
            "watch": lambda: watch(dry_run=False),
            "spend": lambda: spend(NAME),
        }
        for count in counts:
            names += [_asleep(opened, f"{NAME}-{number}") for number in range(len(names), count)]
            rows[str(count)] = {
                name: summed_up_costs([cost(act) for _ in range(rounds + 1)])
                for name, act in acts.items()
            }
    return rows


def _asleep(opened: OpenWorkspace, name: str) -> str:
    """A workspace like the demo's that is asleep; returns its name."""
    from blocks import Workspace

    store, here = opened.store, WorkspaceName(name)
    Workspace.of(NAME).model_copy(update={"name": name}).save(name, _sync=True)
    newest = max(manifests(store, opened.spec.name))
    manifest = replace(
        open_manifest(store, opened.spec.name, newest, opened.seal)[0], workspace=here
    )
    blob, hashed = encode_manifest(manifest, opened.seal)
    seen = store.put(manifest_key(here, newest), blob)
    write_receipt(store, seen, manifest, hashed.hex(), f"local-{name}", "hibernate")
    rentals = Rentals(store, here)
    offer = Offer(
        id="local",
        provider="local",
        gpu=None,
        gpu_count=0,
        price_usd_h=PRICE_USD_H,
        region="here",
        disk_gib=1,
        domain="here",
        priced_unix=time.time(),
    )
    (awake,) = opened.rentals.open()
    rental = rentals.begin(rentals.new_label(awake.label.owner), offer, None)
    rentals.change(rental, state="ended", why="the benchmark has no machine for it")
    return name


if __name__ == "__main__":
    main()
