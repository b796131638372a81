"""Vast.ai: the contract, and this market's traps."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.providers.container_contract import PASSWORD, MarketOfHosts
from tests.control.providers.market_contract import Shop, label, of_model
from tests.fixtures.machines import KeyPair
from tests.markets.market import Ware
from tests.markets.server import FakeMarket
from tests.markets.vast import FIRST_INSTANCE
from torpor.control.providers.container import Container, Volume
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import MountsVolumes
from torpor.shared.errors import (
    CreateUncertain,
    NoCapacity,
    ProviderDenied,
    UnexpectedAnswer,
)
from torpor.shared.values import MachineId, Want


def _bid(shop: Shop, most_usd_h: float | None = None) -> Offer:
    want = Want(spot="only", disk_gib=20, max_price_usd_h=most_usd_h)
    return of_model(shop.plain.offers(want), "RTX 4090")[0]


class TestVast(MarketOfHosts):
    row = "vast"
    sells_spot = True
    login = f"-u me -p {PASSWORD} ghcr.io"

    def ask_for_login(self, shop: Shop) -> None:
        shop.fake.image_login = self.login

    def open_ports(self, shop: Shop) -> set[int]:
        mapped = [key.split(":") for key in shop.asked()["env"] if key.startswith("-p ")]
        return {int(inner) for outer, inner in mapped if outer == f"-p {inner}"}

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20, min_reliability=0.9)

    def test_a_bid_is_sent_with_its_price(self, shop: Shop) -> None:
        """Without one, Vast.ai rents on demand at the full price."""
        bid = _bid(shop)
        shop.create(offer=bid, bid_usd_h=2.0)
        shop.create(offer=bid)
        prices = [machine.request["price"] for machine in shop.market.rented]
        assert prices == pytest.approx([bid.bid_usd_h] * 2)
        assert all(machine.spot for machine in shop.market.rented)

    @pytest.mark.rule(15)
    @pytest.mark.parametrize("most_usd_h", [None, 2.0, 0.21])
    def test_a_bid_is_the_least_with_a_margin_and_never_above_the_maximum(
        self, shop: Shop, most_usd_h: float | None
    ) -> None:
        """Vast.ai bills what is bid, and the disk besides: the offer's price is the bill."""
        bid = _bid(shop, most_usd_h)
        made = shop.create(offer=bid, bid_usd_h=most_usd_h)
        (machine,) = shop.market.rented
        least = machine.ware.spot_usd_h or 0.0
        assert least <= machine.request["price"] <= least * 1.06
        assert machine.usd_h == pytest.approx(bid.price_usd_h, abs=1e-6)
        assert shop.find(made).price_usd_h == pytest.approx(made.price_usd_h, abs=1e-6)
        assert made.price_usd_h <= (most_usd_h or 1.0)

    def test_a_bid_above_the_maximum_is_lowered_whatever_the_offer_says(self, shop: Shop) -> None:
        bid = _bid(shop)
        most_usd_h = bid.price_usd_h - 0.002
        shop.create(offer=bid, bid_usd_h=most_usd_h)
        (machine,) = shop.market.rented
        assert machine.usd_h == pytest.approx(most_usd_h, abs=1e-6)

    @pytest.mark.parametrize("knows", [True, False])
    def test_hosts_in_data_centres_alone_are_shown_where_that_is_asked_for(
        self, shop: Shop, knows: bool
    ) -> None:
        """Also where the search shows others all the same."""
        shop.fake.knows_centres = knows
        want = Want(disk_gib=20, spot="allowed")
        assert "VN" in {offer.region for offer in shop.plain.offers(want)}
        found = shop.connect(data_centres_only=True).offers(want)
        assert {offer.region for offer in found} == {"US", "NO", "FR"}

    def test_a_volume_is_mounted_at_its_host_and_left_alone(
        self, fake: FakeMarket, identity_key: KeyPair
    ) -> None:
        container = Container(volumes=(Volume("12345", "/data"),))
        shop = Shop(fake, Want(gpu="H100", disk_gib=20), identity_key, container=container)
        assert isinstance(shop.plain, MountsVolumes)
        assert shop.plain.volumes == ["/data"]
        offers = shop.plain.offers(Want(disk_gib=20, spot="allowed"))
        assert {offer.domain for offer in offers} == {"machine 71"}
        shop.destroy(shop.create())
        assert shop.asked()["volume_info"] == {
            "create_new": False,
            "volume_id": 12345,
            "mount_path": "/data",
        }
        assert {method for method, path in shop.fake.calls if "volumes" in path} == {"GET"}

    def test_further_ports_need_a_host_that_has_as_many(self, shop: Shop) -> None:
        """Each fake host has 40."""
        assert shop.plain.offers(Want(disk_gib=20))
        many = shop.connect(container=Container(ports=tuple(range(100, 132))))
        assert many.offers(Want(disk_gib=20))
        shop.fake.direct_ports = 32
        assert many.offers(Want(disk_gib=20)) == []

    def test_offers_carry_model_form_region_and_reliability(self, shop: Shop) -> None:
        offers = shop.plain.offers(Want(disk_gib=20))
        assert [str(offer.gpu) for offer in offers] == [
            "RTX 4090", "RTX 4090", "H100 SXM", "H100 PCIe"
        ]  # fmt: skip
        assert [offer.region for offer in offers] == ["VN", "US", "NO", "FR"]
        assert offers[0].reliability == 0.71
        assert offers[3].cuda == (12, 4)
        assert len({offer.domain for offer in offers}) == 4

    def test_a_refusal_that_names_an_instance_is_uncertain(self, shop: Shop) -> None:
        shop.arm("error that created", "create")
        with pytest.raises(CreateUncertain, match=str(FIRST_INSTANCE + 1)):
            shop.create()
        assert [m.state for m in shop.plain.list_own()] == ["stopped"]

    def test_a_refusal_without_a_reason_promises_nothing(self, shop: Shop) -> None:
        shop.fake.refuses_without_reason = True
        shop.arm("error that created", "create")
        with pytest.raises(CreateUncertain):
            shop.create()
        assert len(shop.market.rented) == 1

    @pytest.mark.rule(16)
    @pytest.mark.parametrize("outbid", [False, True])
    @pytest.mark.parametrize("said", ["offline", "unknown"])
    def test_a_host_that_vast_does_not_reach_has_not_stopped_its_instance(
        self, shop: Shop, said: str, outbid: bool
    ) -> None:
        """Its command runs on, and nobody may end it as a stopped one."""
        machine = shop.create()
        shop.market.rented[0].stopped = outbid
        shop.fake.says = said
        (live,) = shop.plain.list_own()
        assert live.state == "starting"
        assert f"Vast.ai says {said}" in live.note
        assert shop.find(machine) == live
        shop.fake.says = "exited"
        (live,) = shop.plain.list_own()
        assert live.state == "stopped"

    def test_an_account_without_credit_is_denied(self, shop: Shop) -> None:
        shop.market.balance_usd = 0.0
        with pytest.raises(ProviderDenied, match="credit"):
            shop.plain.check()

    @pytest.mark.parametrize("null", [False, True])
    def test_an_instance_is_proved_gone_by_its_id_and_by_the_list(
        self, shop: Shop, null: bool
    ) -> None:
        shop.fake.unknown_is_null = null
        shop.fake.calls.clear()
        assert shop.plain.find(MachineId(str(FIRST_INSTANCE + 9))).proof
        asked = {path for _, path in shop.fake.calls}
        assert asked == {"/api/v1/instances/", f"/api/v0/instances/{FIRST_INSTANCE + 9}/"}

    def test_a_listed_instance_is_not_gone_whatever_a_look_at_its_id_says(self, shop: Shop) -> None:
        machine = shop.create()
        shop.arm("not found", "find", count=9)
        assert shop.find(machine).label == shop.order.label

    def test_a_search_is_of_the_wanted_gpu_and_goes_on_behind_64_offers(self, shop: Shop) -> None:
        """A search shows 64 whatever it asks for, and its cheap cards hide the wanted one."""
        wares = shop.market.wares
        wares += [Ware("RTX 3060", 1, 12, 0.05 + n // 3 * 0.001, "Ohio, US") for n in range(200)]
        assert len(of_model(shop.plain.offers(Want(disk_gib=20)), "RTX 3060")) == 200
        shop.fake.calls.clear()
        assert [str(o.gpu) for o in shop.plain.offers(Want(gpu="H100"))] == [
            "H100 SXM",
            "H100 PCIe",
        ]
        assert len(shop.fake.calls) == 1
        wares += [Ware("H100 Cube", 1, 80, 9.0, "Ohio, US")]
        assert of_model(shop.plain.offers(Want(gpu="H100 Cube")), "H100CUBE")

    def test_each_wanted_model_has_a_search_of_its_own_that_cheaper_ones_do_not_fill(
        self, shop: Shop
    ) -> None:
        wares = shop.market.wares
        wares += [Ware("RTX 3060", 1, 12, 0.05 + n * 0.0001, "Ohio, US") for n in range(900)]
        found = shop.plain.offers(Want(gpu="H100, RTX 3060", spot="never"))
        assert {str(offer.gpu) for offer in found} == {"H100 SXM", "H100 PCIe", "RTX 3060"}

    def test_a_wish_for_memory_or_several_gpus_is_searched_for_what_cheaper_ones_would_fill(
        self, shop: Shop
    ) -> None:
        wares = shop.market.wares
        wares += [Ware("RTX 3060", 1, 12, 0.05 + n * 0.0001, "Ohio, US") for n in range(900)]
        wares += [Ware("RTX 3090", 1, 24, 5.0, "Ohio, US"), Ware("L4", 8, 24, 9.0, "Ohio, US")]
        shop.fake.calls.clear()
        found = shop.plain.offers(Want(gpu="24GB+", spot="never"))
        assert {"RTX 3090", "L4"} <= {str(offer.gpu) for offer in found}
        assert not of_model(found, "RTX 3060")
        assert len(shop.fake.calls) == 1
        (eight,) = shop.plain.offers(Want(gpu="L4:8", gpu_count=1, spot="never"))
        assert eight.gpu_count == 8
        several = shop.plain.offers(Want(gpu="24GB+, 20GB+, L4:8", spot="never"))
        assert len({offer.id for offer in several}) == len(several)

    def test_a_search_that_is_refused_halfway_shows_what_it_found(self, shop: Shop) -> None:
        wares = shop.market.wares
        wares += [Ware("RTX 3060", 1, 12, 0.05 + n * 0.001, "Ohio, US") for n in range(70)]
        shop.fake.calls.clear()
        shop.fake.step = lambda: len(shop.fake.calls) < 2
        want = Want(gpu="RTX 3060", spot="never")
        assert len(of_model(shop.plain.offers(want), "RTX 3060")) == 64

    def test_hosts_with_older_drivers_do_not_fill_a_search(self, shop: Shop) -> None:
        wares = shop.market.wares
        wares += [
            Ware("RTX 3060", 1, 12, 0.05 + n * 0.001, "Ohio, US", cuda="11.8") for n in range(70)
        ]
        shop.fake.calls.clear()
        found = shop.plain.offers(Want(disk_gib=20, cuda=(12, 4)))
        assert {offer.cuda for offer in found} == {(12, 4), (12, 8)}
        assert len(shop.fake.calls) == 1

    def test_a_search_is_of_hosts_whose_driver_is_new_enough(self, shop: Shop) -> None:
        wares = shop.market.wares
        wares += [
            Ware("RTX 3060", 1, 12, 0.05 + n * 0.001, "Ohio, US", driver="570.9.01")
            for n in range(70)
        ]
        shop.fake.calls.clear()
        found = shop.plain.offers(Want(disk_gib=20, driver=(570, 86)))
        assert {offer.driver for offer in found} == {(570, 86, 10)}
        assert len(shop.fake.calls) == 1

    def test_equal_prices_do_not_stop_a_search(self, shop: Shop) -> None:
        wares = shop.market.wares
        wares += [Ware("RTX 3060", 1, 12, 0.05, "Ohio, US") for n in range(70)]
        wares += [Ware("RTX 3060", 1, 12, 0.06, "Ohio, US") for n in range(10)]
        assert len(shop.plain.offers(Want(gpu="RTX 3060"))) >= 64 + 10

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            ("created", "Error: container failed to start: OCI runtime create failed: no device"),
            ("loading", "Error response from daemon: manifest for me/x:1 not found"),
            ("loading", "pull access denied for me/private"),
        ],
    )
    def test_a_container_that_can_never_start_is_given_up_at_once(
        self, shop: Shop, status: str, words: str
    ) -> None:
        machine = shop.create()
        shop.fake.says, shop.fake.status_msg = status, words
        assert shop.find(machine).state == "stopped"
        assert words in shop.find(machine).note
        shop.fake.status_msg = "Pulling fs layer"
        assert shop.find(machine).state == "starting"

    def test_an_offer_that_is_gone_by_now_is_no_capacity(self, shop: Shop) -> None:
        offer = msgspec.structs.replace(shop.order.offer, id="999999")
        with pytest.raises(NoCapacity, match="no_such_ask"):
            shop.create(offer=offer)

    def test_an_instance_that_is_to_run_is_not_stopped_yet(self, shop: Shop) -> None:
        """Only all three of its states together say so."""
        machine = shop.create()
        shop.market.rented[0].stopped = True
        shop.fake.says = "loading"
        assert shop.find(machine).state == "stopped"
        shop.fake.intended = "running"
        assert shop.find(machine).state == "starting"

    def test_a_last_page_may_say_nothing_of_a_next_one(self, shop: Shop) -> None:
        machine = shop.create()
        shop.fake.last_page_is_silent = True
        assert [live.id for live in shop.plain.list_own()] == [machine.id]

    def test_a_full_page_that_says_nothing_of_a_next_one_proves_no_absence(
        self, shop: Shop
    ) -> None:
        for _ in range(25):
            shop.create(label=label())
        shop.fake.last_page_is_silent = True
        with pytest.raises(UnexpectedAnswer, match="no next_token"):
            shop.plain.list_own()

    def test_the_retired_list_is_never_read(self, shop: Shop) -> None:
        """It shows no instance, whatever there is."""
        shop.create()
        assert shop.plain.list_own()
        assert ("GET", "/api/v0/instances/") not in shop.fake.calls
