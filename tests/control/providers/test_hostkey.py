"""HOSTKEY: the contract, and this market's traps."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Literal

import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label
from tests.markets.faults import Fault
from tests.markets.hostkey import OWN_SERVER, FakeHostkey, hostkey_wares
from tests.markets.market import Market
from tests.markets.server import Answer, FakeMarket
from torpor.control.providers.hostkey.client import NoServers
from torpor.control.providers.hostkey.provider import HostkeyProvider
from torpor.control.providers.offers import blocks, misfit
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.rental.renting import RENT_S
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    OrderUnpaid,
    ProviderDenied,
    ProviderError,
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
        for ask in (plain.list_own, plain.residue):
            with pytest.raises(NoServers):
                ask()
        assert hostkey.market.rented == []

    def test_a_refused_login_proves_no_end(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        """HOSTKEY may say so of an account that has servers, for a while."""
        machine = plain.create(order)
        no_servers = {"code": "NO_APPROPRIATE_SERVERS", "message": "No appropriate servers found"}
        hostkey.told_at_login = {"result": -1, **no_servers}
        fresh = HostkeyProvider(hostkey.key, url=hostkey.url, clock=lambda: monotonic() + 3600)
        assert fresh.find(machine.id) == Absent()
        assert fresh.find(machine.id) == Absent()
        with pytest.raises(NoServers):
            fresh.list_own()
        hostkey.told_at_login = None
        assert isinstance(fresh.find(machine.id), Machine)

    def test_two_refused_logins_prove_the_end_of_a_server_that_was_cancelled(
        self, hostkey: FakeHostkey, order: Order
    ) -> None:
        now = monotonic()
        provider = HostkeyProvider(hostkey.key, url=hostkey.url, clock=lambda: now)
        machine = provider.create(order)
        hostkey.own_servers = 0
        provider.destroy(machine, never_handed_over(machine, order.label))
        hostkey.sessions += 1
        assert provider.find(machine.id) == Absent()
        now = monotonic() + 59
        assert provider.find(machine.id) == Absent()
        now = monotonic() + 61
        found = provider.find(machine.id)
        assert isinstance(found, Absent)
        assert "has no servers" in found.proof
        assert provider.residue() == []

    # -- a session knows the servers of its beginning

    def test_a_server_that_is_newer_than_the_session_is_seen(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        assert plain.list_own() == []
        machine = self.connect(hostkey).create(order)
        assert [one.id for one in plain.list_own()] == [machine.id]

    def test_a_running_server_that_the_session_does_not_know_is_not_absent(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        assert plain.list_own() == []
        machine = self.connect(hostkey).create(order)
        found = plain.find(machine.id)
        assert isinstance(found, Machine)
        assert found.label == order.label

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
        assert machine.label == order.label
        assert 1 <= len(self.slept) <= 5

    @pytest.mark.parametrize("callbacks", ["order", "update_servers"])
    @pytest.mark.parametrize("by", ["rename_server", "tags"])
    def test_a_server_without_the_order_s_name_is_found_by_its_key_and_named(
        self,
        plain: Provider,
        hostkey: FakeHostkey,
        order: Order,
        callbacks: Literal["order", "update_servers"],
        by: str,
    ) -> None:
        hostkey.callbacks, hostkey.takes_names = callbacks, frozenset({by})
        hostkey.market.next_hidden_looks = 2
        machine = plain.create(order)
        live = self.connect(hostkey).find(machine.id)
        assert isinstance(live, Machine)
        assert machine.label == live.label == order.label

    @pytest.mark.parametrize("id_in_order", [True, False])
    def test_a_server_that_never_takes_its_name_is_uncertain(
        self, plain: Provider, hostkey: FakeHostkey, order: Order, id_in_order: bool
    ) -> None:
        """Nobody could tell it from the account's other servers."""
        hostkey.id_in_order, hostkey.callbacks = id_in_order, "" if id_in_order else "order"
        hostkey.takes_names = frozenset()
        with pytest.raises(CreateUncertain, match="does not carry the order's name"):
            plain.create(order)
        assert plain.list_own() == []

    def test_an_order_whose_server_never_appears_is_uncertain(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        hostkey.market.next_hidden_looks = 1000
        with pytest.raises(CreateUncertain, match="invoice 603548 has no server yet"):
            plain.create(order)
        hostkey.market.alive()[0].hidden_looks = 0
        assert [one.label for one in plain.list_own()] == [order.label]

    @pytest.mark.parametrize("status", ["Unpaid", "Awaiting payment", "Payment Pending"])
    @pytest.mark.parametrize("invoices_as", ["list", "nested", "bare"])
    def test_an_unpaid_order_is_uncertain_and_its_invoice_is_residue(
        self,
        plain: Provider,
        hostkey: FakeHostkey,
        order: Order,
        status: str,
        invoices_as: Literal["list", "nested", "bare"],
    ) -> None:
        hostkey.takes_unpaid, hostkey.invoices_as = status, invoices_as
        with pytest.raises(OrderUnpaid, match="invoice 603548") as told:
            plain.create(order)
        assert isinstance(told.value, CreateUncertain)
        assert blocks(told.value, order.offer, plain.offers(Want())[-1])
        (left,) = plain.residue()
        assert (left.kind, left.id, left.label) == ("invoice", "603548", order.label)
        hostkey.invoices[603548]["status"] = "Cancelled"
        assert plain.residue() == []

    @pytest.mark.parametrize(
        "words", ["Invoice 603548 was created, payment failed", "Payment failed", "No credit"]
    )
    def test_a_refusal_that_speaks_of_an_invoice_does_not_promise_that_nothing_was_ordered(
        self, plain: Provider, hostkey: FakeHostkey, order: Order, words: str
    ) -> None:
        hostkey.order_refusal = {"error": words}
        if words == "No credit":
            hostkey.order_refusal["invoice"] = 603548
        with pytest.raises(OrderUnpaid):
            plain.create(order)

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

    def test_a_cancellation_is_asked_for_once_and_the_server_is_being_ended(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        """HOSTKEY accepts it at once and may take 12 hours."""
        machine = plain.create(order)
        hostkey.cancel_s = 12 * 3600.0
        for provider in (plain, plain, self.connect(hostkey)):
            provider.destroy(machine, never_handed_over(machine, order.label))
            live = provider.find(machine.id)
            assert isinstance(live, Machine)
            assert live.state == "stopping"
            assert live.endpoint is not None
            assert "cancellation was requested" in live.note
        assert [one.state for one in plain.list_own()] == ["stopping"]
        assert hostkey.cancelled == [machine.id]
        hostkey.market.clock.advance(12 * 3600.0)
        found = plain.find(machine.id)
        assert isinstance(found, Absent)
        assert found.proof

    def test_a_second_request_that_is_refused_is_no_failure(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        """Another run asked between our look and our request."""
        machine = plain.create(order)
        hostkey.cancel_s = 60.0
        hostkey.late_lists = 1
        hostkey.cancellations[machine.id] = hostkey.market.clock.now_unix + 60.0
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert hostkey.cancelled == [machine.id]

    def test_another_server_s_cancellation_is_not_this_one_s(
        self, plain: Provider, hostkey: FakeHostkey, order: Order
    ) -> None:
        first = plain.create(order)
        second = plain.create(msgspec.structs.replace(order, label=label()))
        hostkey.cancel_s, hostkey.filters = 3600.0, False
        plain.destroy(first, never_handed_over(first, order.label))
        live = {one.id: one.state for one in plain.list_own()}
        assert live == {first.id: "stopping", second.id: "running"}

    @pytest.mark.parametrize("status", ["install", "TT", "suspended"])
    def test_an_unknown_status_is_no_proof_of_an_end(
        self, plain: Provider, hostkey: FakeHostkey, order: Order, status: str
    ) -> None:
        machine = plain.create(order)
        hostkey.live_status, hostkey.unlisted = status, True
        assert plain.find(machine.id) == Absent()

    def test_it_settles_for_longer_than_its_own_client_waits(self, plain: Provider) -> None:
        assert plain.abilities.settling_s >= max(7200, RENT_S + 3600)

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
    @pytest.mark.parametrize("named", ["tags", "server_data", "nested"])
    def test_every_known_shape_is_read(
        self,
        plain: Provider,
        hostkey: FakeHostkey,
        order: Order,
        listed: Literal["records", "numbers", "words"],
        named: Literal["tags", "server_data", "nested"],
    ) -> None:
        hostkey.listed_as, hostkey.named_in = listed, named
        hostkey.token_in = "answer"
        machine = plain.create(order)
        assert [(one.id, one.label) for one in plain.list_own()] == [(machine.id, order.label)]

    @pytest.mark.parametrize(
        "expired",
        [
            None,
            Answer(401, "Unauthorized", "text/plain"),
            Answer(401, {"result": -1, "error": "Session"}),
            Answer(200, {"result": -1, "error": "User is not authorized"}),
            Answer(200, {"code": -1, "message": "Authentication failed"}),
        ],
    )
    def test_a_session_that_ended_early_is_renewed_once(
        self, plain: Provider, hostkey: FakeHostkey, expired: Answer | None
    ) -> None:
        plain.check()
        hostkey.expired = expired
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

    @pytest.mark.parametrize("status", [200, 404, 500])
    def test_no_error_repeats_what_an_answer_may_hold_in_secret(
        self, hostkey: FakeHostkey, order: Order, status: int
    ) -> None:
        """Its words go into logs, reports and the rental's record."""
        token = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
        secrets = {"token": token, "root_pass": "S3cret%pass", "api_key": token}
        shapes: list[Any] = [
            {"result": "new", "server_data": secrets, **secrets},
            {"result": -1, "error": f"Bad session {token}", **secrets},
            [secrets],
            f"token {token} root_pass S3cret%pass",
        ]
        asks: dict[str, Callable[[HostkeyProvider], object]] = {
            "order_instance": lambda provider: provider.create(order),
            "show": lambda provider: provider.find(MachineId(str(OWN_SERVER))),
            "list": lambda provider: provider.list_own(),
            "login": lambda provider: provider.check(),
            "get_invoices": lambda provider: provider.residue(),
        }
        for action, ask in asks.items():
            for shape in shapes:
                hostkey.instead = {action: Answer(status, shape)}
                with pytest.raises(ProviderError) as told:
                    ask(self.connect(hostkey))
                assert token not in str(told.value)
                assert "S3cret" not in str(told.value)

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
