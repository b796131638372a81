"""How often torpor asks each market in one wake, beside what the market allows.

    python -m tests.benchmarks.market_requests [--keep market_requests]

At the fakes, by a clock that only waiting moves: look for offers, rent, wait ``BOOT_S`` for SSH,
and end the machine with the proof. ``minute`` is the most in any 60 s. An answer takes no time
here, so a live wake asks less often.
"""

from __future__ import annotations

import argparse
import json
import secrets
from typing import Any, Final, NamedTuple

import asyncssh

from benchmarks.kept import write_result
from tests.markets.every import FAKES, NAMES
from torpor.control.measure.host import host_facts
from torpor.control.providers.provider import Absent, Provider
from torpor.control.rental.order import order_for
from torpor.control.rental.waiting import wait_until_reachable
from torpor.control.safety import never_handed_over
from torpor.control.smoke.plan import make_plan
from torpor.shared.values import Endpoint, Label, workspace_name

BOOT_S: Final = 300.0
_MOST_USD: Final = 1000.0
_MOST_LOOKS: Final = 20
_END_S: Final = 5.0  # between two looks for the proof, at least


class Limit(NamedTuple):
    """``minute``: requests that the market takes in one; None where it states no such number."""

    minute: int | None
    words: str


LIMITS: Final[dict[str, Limit]] = {
    "vast": Limit(None, "each kind of request by itself: 1 look at a list in 1 s, 1 create in 4.5"),
    "runpod": Limit(60, "60 a minute, 3,000 an hour"),
    "lambda": Limit(60, "1 a second, 1 launch in 12 s"),
    "ec2": Limit(1200, "20 a second after the first 100, each operation by itself"),
    "gcp": Limit(1500, "1,500 reads a minute, and as many lists"),
    "kubernetes": Limit(300, "not stated; 5 a second is what Kubernetes' own clients keep to"),
    "tensordock": Limit(100, "100 a minute"),
    "azure": Limit(1500, "25 reads and 10 writes a second, after the first 250 and 200"),
}
"""Of those that state one. Sources stand in the adapters, beside their ``_POLL_S``."""


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.now_s += seconds


class _Calls(list[tuple[str, str]]):
    """What a fake was asked, and when."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock, self.times_s = clock, list[float]()

    def append(self, call: tuple[str, str]) -> None:
        self.times_s.append(self.clock())
        super().append(call)


def measure(name: str, boot_s: float = BOOT_S) -> dict[str, Any]:
    """The requests of one wake, and of the end of its machine."""
    clock = _Clock()
    with FAKES[name]() as fake:
        fake.calls = calls = _Calls(clock)
        paces = {"clock": clock} if name == "lambda" else {}  # it spaces its requests itself
        provider: Provider = fake.connect(sleep=clock.nap, **paces)
        _wake_and_end(provider, clock, boot_s)
        assert fake.market.alive() == []
    times, limit = calls.times_s, LIMITS.get(name, Limit(None, "not stated"))
    return {
        "wake": len(times),
        "minute": max(sum(begin <= at < begin + 60 for at in times) for begin in times),
        "limit": limit.minute,
        "words": limit.words,
    }


def _wake_and_end(provider: Provider, clock: _Clock, boot_s: float) -> None:
    plan = make_plan(provider, max_usd=_MOST_USD)
    label = Label("requests", workspace_name("requests"), secrets.token_hex(8))
    order = order_for(plan.offer, label, asyncssh.generate_private_key("ssh-ed25519"), plan.want)
    made = provider.create(order)

    def greets(endpoint: Endpoint) -> str | None:
        return None if clock() >= boot_s else "the port is closed"

    able = provider.abilities
    up = wait_until_reachable(
        provider, made.id, timeout_s=2 * boot_s, sleep=clock.nap, clock=clock, greets=greets,
        label=label,
    )  # fmt: skip
    for _ in range(_MOST_LOOKS):
        provider.destroy(up, never_handed_over(up, label))
        found = provider.find(up.id)
        if isinstance(found, Absent) and found.proof:
            return
        clock.nap(max(_END_S, able.poll_s))
    raise AssertionError(f"machine {up.id} did not end")


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    rows = [
        f"| {name} | {row['wake']} | {row['minute']} | {row['words']} |"
        for name, row in found.items()
    ]
    return "\n".join(["| market | a wake | a minute, at most | allowed |", "|---" * 4 + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    found = {name: measure(name) for name in NAMES}
    result = {"benchmark": "market_requests", "boot_s": BOOT_S, "host": host_facts(), **found}
    print(json.dumps(result, indent=1, sort_keys=True), table(found), sep="\n")
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


if __name__ == "__main__":
    main()
