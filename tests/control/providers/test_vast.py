"""Vast.ai: the contract, and this market's traps."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label, of_model
from tests.markets.faults import Fault
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from tests.markets.shop import vast_wares
from tests.markets.vast import FIRST_INSTANCE, FakeVast
from torpor.control.providers.seam import Absent, Order, Provider, Restarts
from torpor.control.providers.vast import VastProvider
from torpor.shared.errors import CreateUncertain, NotOurs, ProviderDenied
from torpor.shared.values import Machine, MachineId, Want


class TestVast(MarketContract):
    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20, min_reliability=0.9)

    def new_fake(self) -> FakeMarket:
        return FakeVast(Market(wares=vast_wares()))

    def connect(self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0) -> VastProvider:
        self.slept = []
        timeout = httpx.Timeout(timeout_s)
        return VastProvider(key or fake.key, url=fake.url, timeout=timeout, sleep=self.slept.append)

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(
            market.wares[3], "mine, by hand", {}, id_of=lambda n: str(FIRST_INSTANCE + n)
        )
        return MachineId(made.id)

    def test_a_bid_is_sent_with_its_price(
        self, plain: VastProvider, fake: FakeMarket, order: Order
    ) -> None:
        """Without one, Vast.ai rents on demand at the full price."""
        offers = plain.offers(Want(spot="only", disk_gib=20))
        assert offers
        assert all(offer.spot for offer in offers)
        bid = of_model(offers, "RTX 4090")[0]
        plain.create(msgspec.structs.replace(order, offer=bid, bid_usd_h=2.0))
        plain.create(msgspec.structs.replace(order, offer=bid, label=label()))
        assert [m.request["price"] for m in fake.market.rented] == pytest.approx(
            [bid.bid_usd_h] * 2
        )
        assert all(machine.spot for machine in fake.market.rented)

    @pytest.mark.parametrize("most_usd_h", [None, 2.0, 0.21])
    def test_a_bid_is_the_least_with_a_margin_and_never_above_the_maximum(
        self, plain: VastProvider, fake: FakeMarket, order: Order, most_usd_h: float | None
    ) -> None:
        """Vast.ai bills what is bid, and the disk besides: the offer's price is the bill."""
        want = Want(spot="only", disk_gib=20, max_price_usd_h=most_usd_h)
        bid = of_model(plain.offers(want), "RTX 4090")[0]
        made = plain.create(msgspec.structs.replace(order, offer=bid, bid_usd_h=most_usd_h))
        (machine,) = fake.market.rented
        least = machine.ware.spot_usd_h or 0.0
        assert least <= machine.request["price"] <= least * 1.06
        assert machine.usd_h == pytest.approx(bid.price_usd_h, abs=1e-6)
        live = plain.find(made.id)
        assert isinstance(live, Machine)
        assert live.price_usd_h == pytest.approx(made.price_usd_h, abs=1e-6)
        assert made.price_usd_h <= (most_usd_h or 1.0)

    def test_a_bid_above_the_maximum_is_lowered_whatever_the_offer_says(
        self, plain: VastProvider, fake: FakeMarket, order: Order
    ) -> None:
        bid = of_model(plain.offers(Want(spot="only", disk_gib=20)), "RTX 4090")[0]
        most_usd_h = bid.price_usd_h - 0.002
        plain.create(msgspec.structs.replace(order, offer=bid, bid_usd_h=most_usd_h))
        (machine,) = fake.market.rented
        assert machine.usd_h == pytest.approx(most_usd_h, abs=1e-6)

    def test_offers_carry_model_form_region_and_reliability(self, plain: Provider) -> None:
        offers = plain.offers(Want(disk_gib=20))
        assert [str(offer.gpu) for offer in offers] == [
            "RTX 4090", "H100 SXM", "H100 PCIe", "RTX 4090"
        ]  # fmt: skip
        assert [offer.region for offer in offers] == ["US", "NO", "FR", "VN"]
        assert offers[3].reliability == 0.71
        assert offers[2].cuda == (12, 4)
        assert len({offer.domain for offer in offers}) == 4

    def test_a_refusal_that_names_an_instance_is_uncertain(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.faults.arm(Fault("error that created", "create"))
        with pytest.raises(CreateUncertain, match=str(FIRST_INSTANCE + 1)):
            plain.create(order)
        assert [m.state for m in plain.list_own()] == ["stopped"]

    def test_a_refusal_without_a_reason_promises_nothing(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeVast)
        fake.refuses_without_reason = True
        fake.faults.arm(Fault("error that created", "create"))
        with pytest.raises(CreateUncertain):
            plain.create(order)
        assert len(fake.market.rented) == 1

    def test_an_instance_that_was_outbid_is_started_once_its_gpu_is_free(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert plain.abilities.restarts
        assert isinstance(plain, Restarts)
        machine = plain.create(order)
        rented = fake.market.rented[0]
        fake.market.take(rented)
        plain.start(machine)
        assert [one.state for one in plain.list_own()] == ["stopped"]
        rented.no_room = False
        with pytest.raises(NotOurs, match="was not started"):
            plain.start(msgspec.structs.replace(machine, label=label()))
        assert rented.stopped
        plain.start(machine)
        assert [one.state for one in plain.list_own()] == ["running"]

    @pytest.mark.parametrize("outbid", [False, True])
    @pytest.mark.parametrize("said", ["offline", "unknown"])
    def test_a_host_that_vast_does_not_reach_has_not_stopped_its_instance(
        self, plain: Provider, fake: FakeMarket, order: Order, said: str, outbid: bool
    ) -> None:
        """Its command runs on, and nobody may end it as a stopped one."""
        assert isinstance(fake, FakeVast)
        machine = plain.create(order)
        fake.market.rented[0].stopped = outbid
        fake.says = said
        (live,) = plain.list_own()
        assert live.state == "starting"
        assert f"Vast.ai says {said}" in live.note
        assert plain.find(machine.id) == live
        fake.says = "exited"
        (live,) = plain.list_own()
        assert live.state == "stopped"

    def test_an_account_without_credit_is_denied(self, plain: Provider, fake: FakeMarket) -> None:
        fake.market.balance_usd = 0.0
        with pytest.raises(ProviderDenied, match="credit"):
            plain.check()

    def test_a_loading_instance_is_starting(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.market.next_starting_looks = 1
        machine = plain.create(order)
        states = [getattr(plain.find(machine.id), "state", None) for _ in range(2)]
        assert states == ["starting", "running"]

    @pytest.mark.parametrize("null", [False, True])
    def test_an_instance_is_proved_gone_by_its_id_and_by_the_list(
        self, plain: Provider, fake: FakeMarket, null: bool
    ) -> None:
        assert isinstance(fake, FakeVast)
        fake.unknown_is_null = null
        found = plain.find(MachineId(str(FIRST_INSTANCE + 9)))
        assert isinstance(found, Absent)
        assert found.proof
        asked = {path for _, path in fake.calls}
        assert asked == {"/api/v1/instances/", f"/api/v0/instances/{FIRST_INSTANCE + 9}/"}

    def test_a_listed_instance_is_not_gone_whatever_a_look_at_its_id_says(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.faults.arm(Fault("not found", "find", count=9))
        found = plain.find(machine.id)
        assert not isinstance(found, Absent)
        assert found.label == order.label

    def test_the_retired_list_is_never_read(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """It shows no instance, whatever there is."""
        plain.create(order)
        assert plain.list_own()
        assert ("GET", "/api/v0/instances/") not in fake.calls
