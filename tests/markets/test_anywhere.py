"""A workspace moves from any market to any other; a wake goes on until a machine is ready."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from flows import create, hibernate, reconcile, wake
from tasks.workspace import OpenWorkspace
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, shown, wake_plainly
from tests.fixtures.trees import differences, kept, let_settle, plant_every_kind
from tests.markets.ec2 import REGION
from tests.markets.every import DEMO, NAMES, Markets
from tests.markets.faults import Fault
from tests.markets.lambda_cloud import lambda_wares
from tests.markets.market import Ware
from tests.markets.server import HELD_S, FakeMarket
from torpor.control.providers.provider import Provider
from torpor.control.rental import renting
from torpor.control.reports import Row

WALK = [
    *("vast", "runpod", "vast", "lambda", "vast", "ec2", "runpod"),
    *("lambda", "runpod", "ec2", "lambda", "ec2", "vast"),
    *NAMES[4:],
]
"""All pairs of the first four; each of the others once."""
OUTCOMES = [
    ("ec2", r"AWS refused p5.48xlarge/us-east-1a: InsufficientInstanceCapacity: .*"),
    ("ec2", r"AWS refused p5.48xlarge/us-east-1b: VcpuLimitExceeded: .*"),
    ("ec2", r"not tried: AWS refused p5.48xlarge/us-east-1b: VcpuLimitExceeded: .*"),
    ("runpod", r".* may have rented a machine: .* ReadTimeout .* The attempt is abandoned; .*"),
    ("lambda", r"machine \d+ at .* was not reachable by SSH within 3 s: .* Connection refused"),
    ("vast", r"machine 500002"),
    ("runpod", r"its GPU is RTX 4090, H100 is wanted"),
    ("lambda", r"its GPU is A10 PCIe, H100 is wanted"),
]
"""In the order of the report; an outcome may stand on several lines."""


def test_from_each_market_to_each_other(markets: Markets, rented_workspace: OpenWorkspace) -> None:
    """One walk, to every market and away from it. The workspace names only the market that it
    wakes at: where it is, the open rental says."""
    assert set(itertools.permutations(NAMES[:4], 2)) <= set(itertools.pairwise(WALK))
    providers = {name: markets.provider(name) for name in NAMES}

    def at(name: str) -> OpenWorkspace:
        others = tuple(providers.values())
        return replace(rented_workspace, providers=(providers[name],), others=lambda: others)

    patient = partial(plain, wait_factor=1.0)  # a booting machine starts its sshd again
    with patient(at(WALK[0])):
        create.fn(DEMO)
    _plant(markets.workspace(WALK[0]))
    truth = kept(markets.workspace(WALK[0]))
    let_settle()
    for here, there in itertools.pairwise(WALK):
        with patient(at(there)):
            stored = hibernate.fn(DEMO)
        assert stored.destroyed
        assert markets.alive() == []
        with patient(at(there)):
            report = wake.fn(DEMO)
        assert report.snapshot == stored.snapshot
        assert markets.alive() == [there]
        assert not differences(truth, kept(markets.workspace(there))), (here, there)
    with patient(at(WALK[-1])):
        hibernate.fn(DEMO)
    assert markets.alive() == []
    for name, provider in providers.items():
        assert provider.residue() == [], name
        assert provider.list_own() == [], name
    assert rented_workspace.rentals.open() == []
    rentals = [item for item in rented_workspace.rentals.history() if item.machine is not None]
    assert Counter(rental.provider for rental in rentals) == Counter(
        providers[name].identity for name in WALK
    )
    assert all(rental.why and rental.answered_unix for rental in rentals)
    wakes = [rental for rental in rentals if rental.fetched_bytes > 0 < rental.fetched_s]
    assert len(wakes) == len(WALK) - 1


def test_a_wake_goes_on_until_a_machine_is_ready(
    markets: Markets,
    rented_workspace: OpenWorkspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No capacity, then a quota, then a market that hangs, then a machine without SSH."""
    vast = markets.provider("vast")
    first = replace(rented_workspace, providers=(vast,))
    run_plainly(first, create)
    _plant(markets.workspace("vast"))
    truth = kept(markets.workspace("vast"))
    let_settle()
    hibernate_plainly(first)

    fakes = markets.fakes
    p5 = [Ware("H100", 8, 80, 55.04, f"{REGION}{zone}", name="p5.48xlarge") for zone in "ab"]
    fakes["ec2"].market.wares = p5
    fakes["ec2"].faults.arm(Fault("no capacity", "create"))
    fakes["ec2"].faults.arm(Fault("quota", "create"))
    _hang_from_the_create_on(fakes["runpod"])
    fakes["lambda"].market.wares = lambda_wares()[:2]  # one H100
    fakes["lambda"].market.boot = lambda _: markets.machines.boot(["sleep", "1000"])
    runpod = markets.provider("runpod", timeout_s=0.5)
    ec2, deaf = markets.provider("ec2"), markets.provider("lambda")
    _set(monkeypatch, deaf, ready_s=3.0)
    _set(monkeypatch, runpod, settling_s=0.0)
    monkeypatch.setattr(renting, "AT_ONCE_S", 1.0)
    spec = rented_workspace.spec
    in_order = msgspec.structs.replace(spec.want, rank="order")
    opened = replace(
        rented_workspace,
        spec=msgspec.structs.replace(spec, want=in_order),
        providers=(ec2, runpod, deaf, vast),
    )
    shown.clear()
    report = wake_plainly(opened)

    assert markets.alive() == ["vast"]
    assert not differences(truth, kept(markets.workspace("vast")))
    rows = dict(shown)["offers-demo"]
    with capsys.disabled():
        print("", _as_text(rows), _as_text(report.rows()), sep="\n\n")
    outcomes = itertools.groupby(rows, key=_outcome)
    assert [outcome for outcome, _ in outcomes] == OUTCOMES
    assert report.provider == vast.identity

    fakes["runpod"].step = lambda: True
    reconciled = run_plainly(opened, reconcile, abandoned=True)
    assert [finding.kind for finding in reconciled.findings] == ["in use"]
    (kept_rental,) = rented_workspace.rentals.open()
    assert kept_rental.state == "handed over"
    hibernate_plainly(opened)
    assert markets.alive() == []


def _plant(workspace: Path) -> None:
    plant_every_kind(workspace)
    (workspace / "sparse/vast").unlink()  # of a TiB, which no disk on sale has


def _hang_from_the_create_on(fake: FakeMarket) -> None:
    """Nothing is answered any more, until the fake closes."""
    fake.step = lambda: ("POST", "/v2/pods") not in fake.calls or not fake.closing.wait(HELD_S)


def _set(monkeypatch: pytest.MonkeyPatch, provider: Provider, **abilities: float) -> None:
    changed = msgspec.structs.replace(provider.abilities, **abilities)
    monkeypatch.setattr(provider, "abilities", changed)


def _outcome(row: Row) -> tuple[str, str]:
    """That of OUTCOMES which the row tells, or what it tells."""
    told = row["market"], row["outcome"]
    same = [pair for pair in OUTCOMES if pair[0] == told[0] and re.fullmatch(pair[1], told[1])]
    return same[0] if same else told


def _as_text(rows: Sequence[Row]) -> str:
    """A table as a person reads it."""
    return "\n".join(" | ".join(row.values()) for row in rows)
