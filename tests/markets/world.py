"""What the campaigns of rentals and of jobs share: a workspace that is rented for at all fake
markets, a store of its own, and a clock that hours pass on at once."""

from __future__ import annotations

import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tasks.workspace import OpenWorkspace
from tests.campaign.command import Violations
from tests.fixtures.machines import new_key_pair
from tests.fixtures.short_agent import SOON_ABANDONED, copy_agent, installing
from tests.fixtures.world import BUCKET, own_store
from tests.markets.boot import Machines
from tests.markets.every import DEMO, Markets, opened_markets
from tests.markets.market import Clock, Rented
from torpor.control.providers.provider import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.store.s3 import S3Store
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import Want, WorkspaceSpec

SETTLING_S: Final = 2.0
READY_S: Final = 30.0
TIMEOUT_S: Final = 2.0

real_time = time.time


class AheadClock(Clock):
    """The time of this host, and the hours that have passed at once."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    @property
    def now_unix(self) -> float:  # type: ignore[override]
        return real_time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


@dataclass
class MarketWorld:
    """``opened`` has no provider. ``connect`` opens its store once more, for a child: connections
    are the parent's."""

    folder: Path
    markets: Markets
    opened: OpenWorkspace
    connect: Callable[[], S3Store]
    store_key: bytes
    clock: AheadClock
    rng: random.Random
    violations: Violations = field(default_factory=Violations)

    def provider(self, name: str, ready_s: float = READY_S) -> Provider:
        provider = self.markets.provider(name, timeout_s=TIMEOUT_S)
        provider.__dict__["abilities"] = msgspec.structs.replace(
            provider.abilities, settling_s=SETTLING_S, ready_s=ready_s, poll_s=0.0
        )
        return provider

    def renting(self, known: dict[str, Provider], named: Iterable[str]) -> OpenWorkspace:
        """The workspace, which names some markets in this order and has blocks of all."""
        everywhere = tuple(known.values())
        providers = tuple(known[name] for name in named)
        return replace(self.opened, providers=providers, others=lambda: everywhere)

    def alive(self, names: Iterable[str]) -> Iterator[tuple[str, Rented]]:
        for name in names:
            for machine in self.markets.fakes[name].market.alive():
                yield name, machine

    def see_nothing_left(self, machines: Iterable[tuple[str, Rented]]) -> None:
        """At the end of everything."""
        for name, machine in machines:
            self.violations.add(f"machine {machine.id} at {name} is alive at the end")
        for rental in self.opened.rentals.open():
            self.violations.add(f"rental {rental.label.rental} is {rental.state} at the end")


W = TypeVar("W", bound=MarketWorld)


@contextmanager
def market_world(kind: type[W], seed: int, page: int = 25) -> Iterator[W]:
    """Nothing of it is left behind. ``page``: machines in one answer to a listing."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    clock, store_key = AheadClock(), secrets.token_bytes(32)
    with own_store(folder / "store") as store:
        (folder / "machines").mkdir()
        machines = Machines(folder / "machines")
        agent = copy_agent(folder / "agent", SOON_ABANDONED)
        with opened_markets(machines) as markets, installing(agent):
            for fake in markets.fakes.values():
                fake.market.clock, fake.market.page = clock, page

            def connect() -> S3Store:
                return S3Store.connect(store.server.settings(BUCKET, "kept"))

            want = Want(gpu="H100", disk_gib=20)
            opened = OpenWorkspace(
                spec=WorkspaceSpec(DEMO, ["~/workspace"], want=want, parts=2),
                store=connect(),
                providers=(),
                identity=Identity(new_key_pair().private),
                owner="tests",
                sealing=workspace_key(store_key, DEMO),
            )
            try:
                rng = random.Random(seed)
                yield kind(folder, markets, opened, connect, store_key, clock, rng)
            finally:
                machines.end()
    shutil.rmtree(folder, ignore_errors=True)
