"""Lambda: the contract, and this market's traps."""

from __future__ import annotations

import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label
from torpor.control.providers.seam import Absent
from torpor.shared.values import MachineId, Want


class TestLambda(MarketContract):
    row = "lambda"
    images = False

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="A10", disk_gib=20)

    def test_the_login_key_is_registered_once(self, shop: Shop) -> None:
        shop.create()
        shop.create(label=label())
        keys = [key["public_key"] for key in shop.fake.ssh_keys.values()]
        assert keys == [shop.order.public_key]

    def test_only_the_status_terminated_is_a_proof(self, shop: Shop) -> None:
        shop.fake.ending_looks = 2
        machine = shop.create()
        shop.destroy(machine)
        assert shop.find(machine).state == "stopping"
        assert shop.find(machine).proof
        assert shop.plain.find(MachineId("0" * 32)) == Absent()

    def test_form_factors_are_told_apart(self, shop: Shop) -> None:
        found = {(str(offer.gpu), offer.region) for offer in shop.plain.offers(Want())}
        assert {("H100 PCIe", "us-west-3"), ("H100 SXM", "us-south-2")} <= found
