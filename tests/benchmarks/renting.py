"""What torpor adds to a market's own time, from "wake" until it knows that SSH answers.

    python -m tests.benchmarks.renting [--rounds 5] [--boot-s 20] [--keep NAME]

The market is a fake of Vast.ai on loopback. Its machines are real: each runs torpor's start script
in a root of its own, about ``boot_s`` after the create, so this needs root. The market's own time
is from the request that creates a machine until SSH greets there. The flow runs without a Prefect
server. Two cases:

address first: the market shows the address from the create on, as most do.
address last: it shows the machine as loading until SSH greets, so that only its listing can tell.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import summed_up, write_result
from flows import wake
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.machines import new_key_pair
from tests.fixtures.world import own_store
from tests.markets.boot import BootedMachine, Machines
from tests.markets.market import Market, Rented
from tests.markets.vast import FakeVast, vast_wares
from torpor.control.measure.host import host_facts
from torpor.control.providers.vast import VastProvider
from torpor.control.remote.ssh import Identity
from torpor.control.rental.waiting import ssh_banner_fault
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import Endpoint, WorkspaceSpec

MOST_ADDED_S: Final = 3.0
CASES: Final = ("address first", "address last")
_LOOK_S: Final = 0.005


class _Known(BaseException):
    """The wake knows that SSH answers. It ends here, and its machine with it."""


@dataclass
class _SlowMarket(Market):
    """``asked``, ``up``: when a create came, and when SSH greeted on its machine."""

    machines: Machines | None = None
    boot_s: float = 0.0
    address_last: bool = False
    asked: float = 0.0
    up: float | None = None
    watchers: list[threading.Thread] = field(default_factory=list)

    def starting(self, machine: Rented) -> bool:
        return self.address_last and self.up is None

    def power_on(self, command: list[str]) -> BootedMachine:
        assert self.machines is not None
        self.asked, self.up = time.monotonic(), None
        body = self.machines.boot(
            ["/bin/sh", "-c", f'sleep {self.boot_s:.3f}; exec "$@"', "sh", *command]
        )
        self.watchers.append(threading.Thread(target=self._watch, args=(body,)))
        self.watchers[-1].start()
        return body

    def _watch(self, body: BootedMachine) -> None:
        while body.running and ssh_banner_fault(Endpoint(body.address, body.port, "root")):
            time.sleep(_LOOK_S)
        self.up = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--boot-s", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-renting-", dir=options.folder) as scratch:
        folder = Path(scratch)
        with own_store(folder / "store") as store:
            result = measure(store.server.store(), folder, options.rounds, options.boot_s)
    print(json.dumps(result, indent=1, sort_keys=True), f"goal: {MOST_ADDED_S:g} s", sep="\n")
    for case in CASES:
        added = result[case]["added_s"]
        print(f"{case:16}{added['median']:.2f} s added, {added['max']:.2f} s at most")
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(store: ObjectStore, folder: Path, rounds: int, boot_s: float) -> dict[str, Any]:
    """``rounds`` wakes of a small snapshot in each case, in turn."""
    engine = Engine(store, folder / "home")
    (engine.home / "workspace").mkdir()
    (engine.home / "workspace" / "notes.txt").write_text("a small workspace\n")
    engine.snapshot([engine.home / "workspace"])
    engine.runs.close()
    samples: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    dice = random.Random(1)
    with _rented(store, str(engine.home / "workspace")) as (market, opened, fake):
        for _ in range(rounds):
            for case in CASES:
                market.address_last = case == "address last"
                market.boot_s = boot_s + dice.uniform(-0.25, 0.25) * boot_s
                samples[case].append(_once(market, opened, fake))
                assert market.alive() == []
    figures = {
        case: {name: summed_up([sample[name] for sample in taken]) for name in taken[0]}
        for case, taken in samples.items()
    }
    return {
        "benchmark": "renting",
        "host": host_facts(),
        "boot_s": boot_s,
        "goal_s": MOST_ADDED_S,
        **figures,
    }


def _once(market: _SlowMarket, opened: OpenWorkspace, fake: FakeVast) -> dict[str, float]:
    known: list[float] = []

    def before(step: str) -> None:
        if step.startswith("open session"):
            known.append(time.monotonic())
            raise _Known

    fake.calls.clear()
    begun = time.monotonic()
    with suppress(_Known), PlainRunner(opened, before=before):
        wake.fn(opened.spec.name)
    for watcher in market.watchers:
        watcher.join()
    assert market.up is not None
    requests = len(fake.calls)
    before_s, after_s = market.asked - begun, known[0] - market.up
    return {
        "before_create_s": before_s,
        "market_s": market.up - market.asked,
        "after_ssh_s": after_s,
        "added_s": before_s + after_s,
        "requests": float(requests),
    }


@contextmanager
def _rented(store: ObjectStore, path: str) -> Iterator[tuple[_SlowMarket, OpenWorkspace, FakeVast]]:
    place = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    machines = Machines(place)
    market = _SlowMarket(wares=vast_wares(), machines=machines)
    market.boot = market.power_on
    fake = FakeVast(market)
    opened = OpenWorkspace(
        spec=WorkspaceSpec(WORKSPACE, [path]),
        store=store,
        providers=(VastProvider(fake.key, url=fake.url),),
        identity=Identity(new_key_pair().private),
        owner="benchmark",
        sealing=None,
    )
    try:
        yield market, opened, fake
    finally:
        fake.close()
        machines.end()
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
