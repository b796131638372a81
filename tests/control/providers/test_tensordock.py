"""TensorDock: the contract, and this market's traps."""

from __future__ import annotations

from typing import ClassVar, Literal

import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract
from tests.markets.faults import Fault
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from tests.markets.tensordock import FakeTensorDock, tensordock_wares
from torpor.control.providers.offers import misfit
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.providers.tensordock import TensorDockProvider
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NotOurs,
    ProviderError,
    ProviderUnavailable,
)
from torpor.shared.values import Machine, MachineId, Want


class TestTensorDock(MarketContract):
    body = "vm"
    images = False  # TensorDock's images are no container images
    concludes_nothing: ClassVar[dict[str, type[ProviderError]]] = {
        **MarketContract.concludes_nothing,
        "error body": ProviderUnavailable,  # {"error": ..., "status": 500}
    }

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20)

    def new_fake(self) -> FakeMarket:
        return FakeTensorDock(Market(wares=tensordock_wares()))

    def connect(
        self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0
    ) -> TensorDockProvider:
        self.slept = []
        return TensorDockProvider(
            key or fake.key,
            url=fake.url,
            ssh_port=self.ssh_port,
            timeout=httpx.Timeout(timeout_s),
            sleep=self.slept.append,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(market.wares[2], "by hand", {}, id_of=lambda n: f"hand-{n}")
        return MachineId(made.id)

    @pytest.mark.parametrize("shape", ["flat", "data", "attributes"])
    def test_every_known_shape_of_an_instance_is_read(
        self,
        plain: Provider,
        fake: FakeMarket,
        order: Order,
        shape: Literal["flat", "data", "attributes"],
    ) -> None:
        assert isinstance(fake, FakeTensorDock)
        fake.shape = shape
        fake.statuses_in_capitals = True
        machine = plain.create(order)
        live = plain.find(machine.id)
        assert isinstance(live, Machine)
        assert (live.state, live.label) == ("running", order.label)
        assert live.endpoint is not None
        assert plain.list_own() == [live]

    def test_all_parts_are_in_the_price_and_the_sizes_are_those_on_sale(
        self, plain: Provider, fake: FakeMarket
    ) -> None:
        wares = fake.market.wares
        wares[2].cores, wares[2].ram_gib = 5, 24  # times a stock of 8
        (offer,) = plain.offers(Want(gpu="H100", gpu_count=8, disk_gib=120))[-1:]
        assert offer.gpu_count == 8
        assert (offer.cores, offer.ram_gib) == (40, pytest.approx(192e9 / 2**30))
        parts = 8 * 2.25 + 40 * 0.003 + 192 * 0.002 + 150 * 0.00005
        assert offer.price_usd_h == pytest.approx(parts)

    def test_its_hosts_are_of_many_owners_and_state_no_reliability(self, plain: Provider) -> None:
        offers = plain.offers(Want())
        assert {(offer.many_owners, offer.reliability) for offer in offers} == {(True, None)}
        assert all(misfit(offer, Want(min_reliability=0.5)) for offer in offers)

    def test_a_host_without_an_address_of_its_own_is_no_offer(self, plain: Provider) -> None:
        regions = {offer.region for offer in plain.offers(Want(gpu="RTX 4090"))}
        assert "Porto, Portugal" not in regions
        assert "Austin, United States" in regions

    def test_the_disk_is_no_smaller_than_wanted(
        self, plain: Provider, fake: FakeMarket, want: Want
    ) -> None:
        assert all(misfit(offer, Want(disk_gib=466)) for offer in plain.offers(Want())[:1])
        fits = [o for o in plain.offers(Want(gpu="A100")) if not misfit(o, Want(disk_gib=900))]
        assert [str(offer.gpu) for offer in fits] == ["A100 PCIe"]

    def test_a_gpu_that_is_taken_meanwhile_is_no_offer(
        self, plain: Provider, fake: FakeMarket
    ) -> None:
        fake.market.wares[0].stock = 0
        assert all(str(o.gpu) != "RTX 4090 PCIe" for o in plain.offers(Want(gpu="RTX 4090")))

    def test_an_image_as_tensordock_names_it_may_be_chosen(self, plain: Provider) -> None:
        plain.check("ubuntu2204")
        for image in ("ubuntu2004", "ubuntu1804", "windows10", "nvidia/cuda:12.8-base"):
            with pytest.raises(InvalidInput):
                plain.check(image)

    def test_an_unknown_refusal_rents_nothing(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """A disk that is no size on sale: an answer of the documented kind, with other words."""
        fake.market.wares[0].disk_gib = 500
        bad = order.offer.id.replace("/8/", "/7/")
        with pytest.raises(CreateFailed) as told:
            plain.create(_with(order, bad))
        assert "vcpu_count" in str(told.value)
        assert fake.market.rented == []

    @pytest.mark.parametrize(
        "refusal",
        [
            ("Deployment timed out", 400),
            ("Deployment timed out", 408),
            ("The host did not answer within the time limit", 400),
            ("A deployment of this name already exists", 409),
            ("Something went wrong", 400),
        ],
    )
    def test_a_refusal_in_unknown_words_promises_nothing(
        self, plain: Provider, fake: FakeMarket, order: Order, refusal: tuple[str, int]
    ) -> None:
        assert isinstance(fake, FakeTensorDock)
        fake.create_error = refusal
        fake.faults.arm(Fault("error that created", "create"))
        with pytest.raises(CreateUncertain):
            plain.create(order)
        assert len(fake.market.rented) == 1

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_busy_market_that_says_so_in_a_200_is_asked_again(
        self, plain: Provider, fake: FakeMarket, order: Order, status: int
    ) -> None:
        assert isinstance(fake, FakeTensorDock)
        machine = plain.create(order)
        warrant = never_handed_over(machine, order.label)
        fake.error = ("Rate limit exceeded", status)
        for ask in (
            plain.list_own,
            lambda: plain.find(machine.id),
            lambda: plain.destroy(machine, warrant),
        ):
            fake.faults.clear()
            fake.faults.arm(Fault("error body", count=100))
            with pytest.raises(ProviderUnavailable):
                ask()
        fake.faults.clear()
        for action in ("list", "find", "destroy"):
            fake.faults.arm(Fault("error body", action, count=2))
        assert [one.id for one in plain.list_own()] == [machine.id]
        plain.destroy(machine, warrant)
        assert fake.market.alive() == []

    def test_a_create_that_is_limited_in_a_200_is_sent_again(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """It is no quota of the account."""
        assert isinstance(fake, FakeTensorDock)
        fake.error = ("Rate limit exceeded", 429)
        fake.faults.arm(Fault("error body", "create", count=100))
        with pytest.raises(ProviderUnavailable):
            plain.create(order)
        assert fake.market.rented == []
        fake.faults.clear()
        fake.faults.arm(Fault("error body", "create", count=2))
        assert [plain.create(order).id] == [one.id for one in fake.market.alive()]

    def test_a_new_machine_whose_name_was_cut_off_is_nobody_s_to_end(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """No run uses it (tests/control/rental/test_market_failures.py)."""
        assert isinstance(fake, FakeTensorDock)
        fake.named = lambda name: name[:32]
        machine = plain.create(order)
        assert [one.id for one in fake.market.alive()] == [machine.id]
        found = plain.find(machine.id)
        assert isinstance(found, Machine) and found.label is None
        with pytest.raises(NotOurs):
            plain.destroy(machine, never_handed_over(machine, order.label))
        assert len(fake.market.alive()) == 1

    def test_there_is_no_spot(self, plain: Provider) -> None:
        assert plain.offers(Want(spot="only")) == []

    def test_a_machine_that_left_between_the_list_and_the_look_is_not_listed(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.faults.arm(Fault("not found", "find", count=9))
        assert isinstance(plain.find(machine.id), Machine)  # by the list
        fake.market.end(fake.market.alive()[0])
        assert isinstance(plain.find(machine.id), Absent)
        assert plain.list_own() == []


def _with(order: Order, offer: str) -> Order:
    changed = msgspec.structs.replace(order.offer, id=offer)
    return msgspec.structs.replace(order, offer=changed)
