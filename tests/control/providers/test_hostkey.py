"""HOSTKEY: the contract, and this market's traps."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label
from tests.markets.faults import Fault
from tests.markets.hostkey import OWN_SERVER, FakeHostkey, hostkey_wares
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from torpor.control.providers.hostkey import HostkeyProvider
from torpor.control.providers.hostkey_client import NoServers
from torpor.control.providers.offers import misfit
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    ProviderDenied,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine, MachineId, Want


class TestHostkey(MarketContract):
    body = "vm"
    images = False
    kill_stride = 3

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX A5000", disk_gib=20)

    def new_fake(self) -> FakeMarket:
        return FakeHostkey(Market(wares=hostkey_wares()))

    def connect(self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0) -> HostkeyProvider:
        self.slept = []
        return HostkeyProvider(
            key or fake.key,
            url=fake.url,
            ssh_port=self.ssh_port,
            timeout=httpx.Timeout(timeout_s),
            sleep=self.slept.append,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(market.wares[2], "by hand", {}, id_of=lambda n: f"{990_000 + n}")
        return MachineId(made.id)

    @pytest.fixture
    def hostkey(self, fake: FakeMarket) -> FakeHostkey:
        assert isinstance(fake, FakeHostkey)
        return fake

    def test_it_costs_what_the_offer_said(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """The month's price by the hours of this month. A server's own price is not stated."""
        live = plain.find(plain.create(order).id)
        fake.market.clock.advance(3600)
        assert isinstance(live, Machine)
        assert live.price_usd_h == 0
        assert fake.market.spent_usd() == pytest.approx(order.offer.price_usd_h, rel=0.01)

    # -- an account without servers

    def test_an_account_without_servers_is_told_what_to_do(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        hostkey.own_servers = 0
        for ask in (plain.check, lambda: plain.create(order)):
            with pytest.raises(NoServers, match="Order one server") as told:
                ask()
            assert isinstance(told.value, ProviderDenied)
        assert plain.list_own() == []
        assert plain.residue() == []
        assert hostkey.market.rented == []

    def test_the_end_of_the_last_server_is_proved_by_the_refused_login(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        machine = plain.create(order)
        hostkey.own_servers = 0
        plain.destroy(machine, never_handed_over(machine, order.label))
        fresh = self.connect(hostkey)
        found = fresh.find(machine.id)
        assert isinstance(found, Absent)
        assert "has no servers" in found.proof
        assert fresh.list_own() == []
        fresh.destroy(machine, never_handed_over(machine, order.label))

    def test_check_says_to_keep_a_server(self, plain: Provider) -> None:
        account = plain.check()
        assert account.name == "client 4711"
        assert any("keep one that is not torpor's. There are 1 now" in n for n in account.notes)

    # -- orders

    @pytest.mark.parametrize("id_in_order", [True, False])
    def test_the_server_of_an_order_is_found_by_its_host_name(
        self, plain: Provider, hostkey: FakeHostkey, order: Order, id_in_order: bool
    ) -> None:
        hostkey.id_in_order = id_in_order
        hostkey.unnamed_looks = 0 if id_in_order else 3
        hostkey.market.next_hidden_looks = 2
        machine = plain.create(order)
        assert [one.id for one in hostkey.market.alive()] == [machine.id]
        assert len(self.slept) == (0 if id_in_order else 5)

    def test_an_order_whose_server_never_appears_is_uncertain(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        hostkey.market.next_hidden_looks = 1000
        with pytest.raises(CreateUncertain, match="invoice 603548 has no server yet"):
            plain.create(order)
        hostkey.market.alive()[0].hidden_looks = 0
        assert [one.label for one in plain.list_own()] == [order.label]

    def test_an_unpaid_order_is_denied_and_its_invoice_is_residue(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        hostkey.takes_unpaid = True
        with pytest.raises(ProviderDenied, match="invoice 603548"):
            plain.create(order)
        (left,) = plain.residue()
        assert (left.kind, left.id, left.label) == ("invoice", "603548", order.label)
        hostkey.invoices[603548]["status"] = "Cancelled"
        assert plain.residue() == []

    def test_unknown_words_never_promise_that_nothing_was_ordered(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        hostkey.faults.arm(Fault("error body", "create"))
        with pytest.raises(CreateUncertain):
            plain.create(order)

    def test_the_password_is_known_to_nobody_and_new_each_time(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        plain.create(order)
        plain.create(msgspec.structs.replace(order, label=label()))
        passwords = {one.request["root_pass"] for one in hostkey.market.rented}
        assert len(passwords) == 2

    def test_a_system_for_gpus_and_a_free_traffic_plan_are_chosen(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        plain.create(order)
        asked = hostkey.market.rented[0].request
        assert (asked["os_id"], asked["traffic_plan"], asked["deploy_period"]) == (
            "240",
            "31",
            "hourly",
        )
        named = msgspec.structs.replace(order, label=label(), image="Debian 12")
        plain.create(named)
        assert hostkey.market.rented[1].request["os_id"] == "199"
        with pytest.raises(CreateFailed, match=r"no Ubuntu 24\.04"):
            plain.create(msgspec.structs.replace(order, label=label(), image="Ubuntu 24.04"))
        for image in ("Debian 11", "Ubuntu 20.04", "Windows Server 2022"):
            with pytest.raises(InvalidInput):
                plain.check(image)

    # -- the end

    def test_it_is_cancelled_at_once(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        """A cancellation to the end of the period goes on to cost."""
        machine = plain.create(order)
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert hostkey.market.alive() == []

    def test_a_server_of_another_status_is_gone_only_when_it_is_not_listed(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        machine = plain.create(order)
        hostkey.ended_status = "cancelled"
        hostkey.market.end(hostkey.market.alive()[0])
        found = plain.find(machine.id)
        assert isinstance(found, Absent)
        assert "says cancelled" in found.proof
        hostkey.market.rented[0].ended_unix = None
        hostkey.market.rented[0].stopped = True
        live = plain.find(machine.id)
        assert isinstance(live, Machine)
        assert live.state == "stopped"

    def test_the_user_s_own_server_is_not_ours(self, plain: Provider) -> None:
        own = plain.find(MachineId(str(OWN_SERVER)))
        assert isinstance(own, Machine)
        assert own.label is None
        assert plain.list_own() == []

    # -- shapes and sessions

    @pytest.mark.parametrize("listed", ["records", "numbers", "words"])
    @pytest.mark.parametrize("named", ["tags", "server_data"])
    def test_every_known_shape_is_read(
        self,
        plain: Provider,
        hostkey: FakeHostkey,
        order: Order,
        listed: Literal["records", "numbers", "words"],
        named: Literal["tags", "server_data"],
    ) -> None:
        hostkey.listed_as, hostkey.named_in = listed, named
        hostkey.token_in = "answer"
        machine = plain.create(order)
        assert [(one.id, one.label) for one in plain.list_own()] == [(machine.id, order.label)]

    def test_a_session_that_ended_early_is_renewed_once(
        self, plain: Provider, hostkey: FakeHostkey
    ) -> None:
        plain.check()
        hostkey.sessions += 1
        plain.check()
        logins = [path for _, path in hostkey.calls if path == "/auth.php"]
        assert len(logins) == 2

    @pytest.mark.parametrize(
        "told", [{"token": 5}, {"result": {"token": None}}, {"result": "OK"}, {}]
    )
    def test_a_login_of_an_unknown_shape_is_unexpected(
        self, plain: Provider, hostkey: FakeHostkey, told: Any
    ) -> None:
        hostkey.told_at_login = told
        with pytest.raises(UnexpectedAnswer):
            plain.check()

    def test_the_gpus_are_counted_and_the_disk_is_one_of_two(
        self, plain: Provider, hostkey: FakeHostkey
    ) -> None:
        hostkey.market.wares[2].gpu = "4x RTX 4090"
        offers = {(o.id.split("/")[0], o.region): o for o in plain.offers(Want())}
        assert {region for _, region in offers} == {"NL", "US", "DE"}
        four = offers["gpu.h100", "NL"]
        assert (str(four.gpu), four.gpu_count) == ("RTX 4090", 4)
        assert four.disk_gib == pytest.approx(1920e9 / 2**30)
        assert offers["vm.pico", "DE"].gpu is None
        assert misfit(offers["gpu.v2-a5000", "US"], Want(gpu="RTX A5000", disk_gib=900))
