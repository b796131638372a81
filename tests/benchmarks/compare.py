"""How long `compare` takes over all fake markets with the offers of a day.

    python -m tests.benchmarks.compare [--rounds 5] [--keep NAME]

The markets listen on loopback; the store, with 200 ended rentals, is in memory. The flow runs
without a Prefect server and draws its plot. The first round is left out: in it, moto writes AWS's
list of instance types, which takes seconds and is none of torpor's time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import summed_up, write_result
from flows import compare
from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import new_key_pair
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.plain_flows import Shows
from tests.markets.boot import Machines
from tests.markets.catalog import catalog_wares
from tests.markets.every import NAMES, Markets, new_fakes
from torpor.control.measure.host import host_facts
from torpor.control.providers.provider import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.rental.records import Rentals
from torpor.shared.values import Want, WorkspaceName, WorkspaceSpec

MOST_S: Final = 5.0
RENTALS: Final = 200
_DEMO: Final = WorkspaceName("demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.rounds)
    print(json.dumps(result, indent=1, sort_keys=True))
    took = result["compare_s"]
    print(f"{result['offers']} offers: {took['median']:.2f} s, at most {took['max']:.2f} s; "
          f"goal {MOST_S:g} s")  # fmt: skip
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(rounds: int, rentals: int = RENTALS) -> dict[str, Any]:
    """``rounds`` runs, after one that is not counted."""
    seconds: list[float] = []
    offers = 0
    with _markets() as providers, closing(MemoryStore()) as store:
        opened = OpenWorkspace(
            spec=WorkspaceSpec(_DEMO, ["~/workspace"]),
            store=store,
            sealing=None,
            providers=providers,
            identity=Identity(new_key_pair().private),
            owner="benchmark",
        )
        _keep_rentals(store, providers, rentals)
        for _ in range(rounds + 1):
            with Shows(opened) as shows:
                begun = time.monotonic()
                table = compare.fn(_DEMO)
                seconds.append(time.monotonic() - begun)
            assert all(row["offer"] for row in shows.rows)
            offers = len(table)
    return {
        "benchmark": "compare",
        "host": host_facts(),
        "goal_s": MOST_S,
        "offers": offers,
        "markets": len(NAMES),
        "rentals": rentals,
        "compare_s": summed_up(seconds[1:]),
    }


def _keep_rentals(store: MemoryStore, providers: tuple[Provider, ...], count: int) -> None:
    """Ended ones, each of an offer that is on sale."""
    records = Rentals(store, _DEMO)
    (offer, *_) = providers[0].offers(Want())
    for _ in range(count):
        rental = records.begin(records.new_label("benchmark"), offer, None)
        begun = rental.created_unix - 600.0
        answered = {"created_unix": begun, "answered_unix": begun + 60.0, "machine": "m"}
        records.change(rental, state="ended", **answered)


@contextmanager
def _markets() -> Iterator[tuple[Provider, ...]]:
    with tempfile.TemporaryDirectory(prefix="torpor-compare-") as folder:
        markets = Markets(new_fakes(), Machines(Path(folder)))
        for name, wares in catalog_wares().items():
            markets.fakes[name].market.wares = wares
        try:
            yield tuple(markets.provider(name) for name in NAMES)
        finally:
            for fake in markets.fakes.values():
                fake.close()


if __name__ == "__main__":
    main()
