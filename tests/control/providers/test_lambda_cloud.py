"""Lambda: the contract, and this market's traps."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from tests.markets.shop import lambda_wares
from torpor.control.providers.lambda_cloud import LambdaProvider
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.safety import never_handed_over
from torpor.shared.values import Machine, MachineId, Want


class TestLambda(MarketContract):
    body = "vm"
    images = False

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="A10", disk_gib=20)

    def new_fake(self) -> FakeMarket:
        return FakeLambda(Market(wares=lambda_wares()))

    def connect(self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0) -> LambdaProvider:
        self.slept = []
        return LambdaProvider(
            key or fake.key,
            url=fake.url,
            ssh_port=self.ssh_port,
            timeout=httpx.Timeout(timeout_s),
            sleep=self.slept.append,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(market.wares[1], "by hand", {}, id_of=lambda n: f"{n:032x}")
        return MachineId(made.id)

    def test_the_login_key_is_registered_once(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        plain.create(order)
        plain.create(msgspec.structs.replace(order, label=label()))
        assert isinstance(fake, FakeLambda)
        assert [key["public_key"] for key in fake.ssh_keys.values()] == [order.public_key]

    def test_only_the_status_terminated_is_a_proof(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeLambda)
        fake.ending_looks = 2
        machine = plain.create(order)
        plain.destroy(machine, never_handed_over(machine, order.label))
        ending = plain.find(machine.id)
        assert isinstance(ending, Machine)
        assert ending.state == "stopping"
        ended = plain.find(machine.id)
        assert isinstance(ended, Absent)
        assert ended.proof
        assert plain.find(MachineId("0" * 32)) == Absent()

    def test_form_factors_are_told_apart(self, plain: Provider) -> None:
        found = {(str(o.gpu), o.region) for o in plain.offers(Want())}
        assert ("H100 PCIe", "us-west-3") in found
        assert ("H100 SXM", "us-south-2") in found
