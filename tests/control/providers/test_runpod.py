"""RunPod: the contract, and this market's traps."""

from __future__ import annotations

import pytest

from tests.control.providers.market_contract import MarketContract, Shop
from torpor.shared.values import Want


class TestRunPod(MarketContract):
    row = "runpod"
    price_slack = 0.02  # the pod's cost leaves the disk out

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20)

    def test_both_clouds_and_each_data_centre_are_offers(self, shop: Shop) -> None:
        """The community's hosts are those of many owners."""
        offers = shop.plain.offers(Want(gpu="RTX 4090"))
        assert {(str(o.gpu), o.region) for o in offers if o.available} == {
            ("RTX 4090", "US-KS-2"),
            ("RTX 4090", "EU-RO-1"),
            ("H100 SXM", "EU-NL-1"),
            ("H100 PCIe", "CA-MTL-1"),
        }
        owners = {(offer.region, offer.many_owners) for offer in offers}
        assert {("US-KS-2", False), ("EU-RO-1", True)} <= owners

    def test_the_account_s_ssh_keys_stay_as_they_are(self, shop: Shop) -> None:
        """A PUT replaces all of them."""
        shop.plain.check()
        shop.create()
        assert ("PUT", "/v2/account/ssh-keys") not in shop.fake.calls
