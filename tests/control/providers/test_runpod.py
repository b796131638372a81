"""RunPod: the contract, and this market's traps."""

from __future__ import annotations

import httpx
import pytest

from tests.control.providers.market_contract import MarketContract
from tests.markets.market import Market
from tests.markets.runpod import FakeRunPod
from tests.markets.server import FakeMarket
from tests.markets.shop import runpod_wares
from torpor.control.providers.runpod import RunpodProvider
from torpor.control.providers.seam import Order, Provider
from torpor.shared.values import MachineId, Want


class TestRunPod(MarketContract):
    price_slack = 0.02  # the pod's cost leaves the disk out

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20)

    def new_fake(self) -> FakeMarket:
        return FakeRunPod(Market(wares=runpod_wares()))

    def connect(self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0) -> RunpodProvider:
        self.slept = []
        timeout = httpx.Timeout(timeout_s)
        return RunpodProvider(
            key or fake.key, url=fake.url, timeout=timeout, sleep=self.slept.append
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(market.wares[2], "by hand", {}, id_of=lambda n: f"hand{n}")
        return MachineId(made.id)

    def test_both_clouds_and_each_data_centre_are_offers(self, plain: Provider) -> None:
        offers = plain.offers(Want(gpu="RTX 4090"))
        assert {(str(o.gpu), o.region) for o in offers if o.available} == {
            ("RTX 4090", "US-KS-2"),
            ("RTX 4090", "EU-RO-1"),
            ("H100 SXM", "EU-NL-1"),
            ("H100 PCIe", "CA-MTL-1"),
        }

    def test_the_community_s_hosts_are_those_of_many_owners(self, plain: Provider) -> None:
        owners = {(offer.region, offer.many_owners) for offer in plain.offers(Want(gpu="RTX 4090"))}
        assert {("US-KS-2", False), ("EU-RO-1", True)} <= owners

    def test_there_is_no_spot(self, plain: Provider) -> None:
        assert plain.offers(Want(spot="only")) == []

    def test_a_pod_without_a_runtime_is_starting(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """It is billed already."""
        fake.market.next_starting_looks = 2
        machine = plain.create(order)
        assert machine.state == "starting"
        states = [getattr(plain.find(machine.id), "state", None) for _ in range(2)]
        assert states == ["starting", "running"]

    def test_the_account_s_ssh_keys_stay_as_they_are(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """A PUT replaces all of them."""
        plain.check()
        plain.create(order)
        assert ("PUT", "/v2/account/ssh-keys") not in fake.calls
