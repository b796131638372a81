"""HOSTKEY: the contract, and this market's traps."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import httpx
import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label
from tests.markets.hostkey import OWN_SERVER
from tests.markets.server import Answer
from torpor.control.providers.hostkey import provider as provider_module
from torpor.control.providers.hostkey.client import HostkeyClient, NoServers
from torpor.control.providers.hostkey.provider import HostkeyProvider
from torpor.control.providers.labels import label_name
from torpor.control.providers.offers import blocks, misfit
from torpor.control.providers.provider import Absent
from torpor.control.rental.renting import RENT_S
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    OrderUnpaid,
    ProviderDenied,
    ProviderError,
    UnexpectedAnswer,
)
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name


class TestHostkey(MarketContract):
    row = "hostkey"
    images = False
    kill_stride = 3

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX A5000", disk_gib=20)

    @pytest.fixture
    def few_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The wait for a server is over after some looks, not after 360."""
        monkeypatch.setattr(provider_module, "ID_LOOKS", 10)

    def test_it_costs_what_the_offer_said(self, shop: Shop) -> None:
        """The month's price by the hours of this month. A server's own price is not stated."""
        assert shop.find(shop.create()).price_usd_h == 0
        shop.market.clock.advance(3600)
        assert shop.market.spent_usd() == pytest.approx(shop.order.offer.price_usd_h, rel=0.01)

    # -- an account without servers

    def test_an_account_without_servers_is_told_what_to_do(self, shop: Shop) -> None:
        shop.fake.own_servers = 0
        shop.fake.sessions += 1
        for ask in (shop.plain.check, shop.create, shop.plain.list_own, shop.plain.residue):
            with pytest.raises(NoServers, match="Order one server") as told:
                ask()
            assert isinstance(told.value, ProviderDenied)
        assert shop.market.rented == []

    def test_a_refused_login_proves_no_end(self, shop: Shop) -> None:
        """HOSTKEY may say so of an account that has servers, for a while."""
        machine = shop.create()
        no_servers = {"code": "NO_APPROPRIATE_SERVERS", "message": "No appropriate servers found"}
        shop.fake.told_at_login = {"result": -1, **no_servers}
        fresh = HostkeyProvider(shop.fake.key, url=shop.fake.url, clock=lambda: monotonic() + 3600)
        assert fresh.find(machine.id) == Absent()
        assert fresh.find(machine.id) == Absent()
        with pytest.raises(NoServers):
            fresh.list_own()
        shop.fake.told_at_login = None
        assert isinstance(fresh.find(machine.id), Machine)

    def test_two_refused_logins_prove_the_end_of_a_server_that_was_cancelled(
        self, shop: Shop
    ) -> None:
        now = began = monotonic()
        provider = HostkeyProvider(shop.fake.key, url=shop.fake.url, clock=lambda: now)
        machine = provider.create(shop.order)
        shop.fake.own_servers = 0
        shop.destroy(machine, provider)
        shop.fake.sessions += 1
        assert provider.find(machine.id) == Absent()
        now = began + 59
        assert provider.find(machine.id) == Absent()
        now = began + 61
        assert "has no servers" in provider.find(machine.id).proof
        assert provider.residue() == []

    # -- a session knows the servers of its beginning

    @pytest.mark.parametrize("looked_for", ["in the list", "by its id"])
    def test_a_server_that_is_newer_than_the_session_is_seen(
        self, shop: Shop, looked_for: str
    ) -> None:
        assert shop.plain.list_own() == []
        machine = shop.connect().create(shop.order)
        seen = shop.plain.list_own() if looked_for == "in the list" else [shop.find(machine)]
        assert [(server.id, server.label) for server in seen] == [(machine.id, machine.label)]

    def test_check_says_to_keep_a_server(self, shop: Shop) -> None:
        account = shop.plain.check()
        assert account.name == "client 4711"
        assert any("keep one that is not torpor's. There are 1 now" in n for n in account.notes)

    # -- orders

    @pytest.mark.parametrize("id_in_order", [True, False])
    def test_the_server_of_an_order_is_found_by_its_host_name(
        self, shop: Shop, id_in_order: bool
    ) -> None:
        shop.fake.id_in_order = id_in_order
        shop.fake.unnamed_looks = 0 if id_in_order else 3
        shop.market.next_hidden_looks = 2
        machine = shop.create()
        assert [server.id for server in shop.market.alive()] == [machine.id]
        assert machine.label == shop.order.label
        assert 1 <= len(shop.slept) <= 5

    @pytest.mark.parametrize("callbacks", ["order", "update_servers"])
    @pytest.mark.parametrize("by", ["rename_server", "tags"])
    def test_a_server_without_the_order_s_name_is_found_by_its_key_and_named(
        self, shop: Shop, callbacks: str, by: str
    ) -> None:
        shop.fake.callbacks, shop.fake.takes_names = callbacks, frozenset({by})
        shop.market.next_hidden_looks = 2
        machine = shop.create()
        assert machine.label == shop.connect().find(machine.id).label == shop.order.label

    @pytest.mark.parametrize("id_in_order", [True, False])
    def test_a_server_that_never_takes_its_name_is_uncertain(
        self, shop: Shop, id_in_order: bool, few_looks: None
    ) -> None:
        """Nobody could tell it from the account's other servers."""
        shop.fake.id_in_order, shop.fake.callbacks = id_in_order, "" if id_in_order else "order"
        shop.fake.takes_names = frozenset()
        with pytest.raises(CreateUncertain, match="does not carry the order's name"):
            shop.create()
        assert shop.plain.list_own() == []

    def test_an_order_whose_server_never_appears_is_uncertain(self, shop: Shop) -> None:
        shop.market.next_hidden_looks = 1000
        with pytest.raises(CreateUncertain, match="invoice 603548 has no server yet"):
            shop.create()
        assert 5400 - 60 <= sum(shop.slept) <= 5400  # as HOSTKEY's own client waits
        shop.market.alive()[0].hidden_looks = 0
        assert [server.label for server in shop.plain.list_own()] == [shop.order.label]

    @pytest.mark.parametrize(
        "told",
        [
            {"code": -1, "message": "AsyncKey cb-603548 not found"},
            {"result": "OK", "scope": "pending", "message": "0 errors on terror-1"},
        ],
    )
    def test_a_key_that_is_gone_and_words_that_are_no_fault_end_no_order(
        self, shop: Shop, told: dict[str, Any], few_looks: None
    ) -> None:
        """A deployed order's key is gone, too."""
        shop.fake.callbacks, shop.fake.callback_says = "order", told
        shop.market.next_hidden_looks = 1000
        with pytest.raises(CreateUncertain, match="has no server yet"):
            shop.create()

    @pytest.mark.parametrize(
        "told",
        [
            {"result": "Error", "scope": "cancelled", "debug": "order cancelled in panel"},
            {"result": "OK", "scope": {}, "context": {"action": "deploy", "status": "cancelled"}},
            {"result": "OK", "scope": "pending", "context": {"error": "deploy aborted by panel"}},
        ],
    )
    @pytest.mark.parametrize("callbacks", ["order", "update_servers"])
    def test_an_order_that_was_cancelled_or_failed_is_not_waited_for(
        self, shop: Shop, callbacks: str, told: dict[str, Any]
    ) -> None:
        shop.fake.callbacks, shop.fake.callback_says = callbacks, told
        shop.market.next_hidden_looks = 1000
        with pytest.raises(CreateUncertain, match="will have no server"):
            shop.create()
        assert shop.slept == []

    @pytest.mark.parametrize(
        "told",
        [
            {"code": -1, "message": "AsyncKey cb-603548 not found"},
            {"result": "OK", "scope": "deploy_done", "context": {"debug": "0 errors"}},
        ],
    )
    def test_an_order_whose_key_is_gone_or_done_is_found_by_its_name(
        self, shop: Shop, told: dict[str, Any]
    ) -> None:
        shop.fake.callbacks, shop.fake.callback_says = "order", told
        assert shop.create().label == shop.order.label

    def test_a_workspace_s_name_is_no_word_about_its_order(self, shop: Shop) -> None:
        named = Label("contract", workspace_name("failed-error"), "ab" * 8)
        context = {"action": "deploy", "hostname": label_name(named)}
        shop.fake.callbacks = "order"
        shop.fake.callback_says = {"result": "OK", "scope": "x", "context": context}
        shop.market.next_hidden_looks = 3
        assert shop.create(label=named).label == named

    @pytest.mark.parametrize("success", [None, "", 0, 1])
    def test_each_result_that_hostkey_s_own_client_takes_for_a_success_is_one(
        self, shop: Shop, success: Any
    ) -> None:
        shop.fake.success = success
        shop.plain.check()
        machine = shop.create()
        assert [server.id for server in shop.plain.list_own()] == [machine.id]
        shop.destroy(machine)
        assert shop.find(machine).proof

    def test_an_order_s_answer_without_any_content_is_uncertain_at_once(self, shop: Shop) -> None:
        shop.plain.check()
        shop.fake.instead = {"order_instance": Answer(200, {"result": "OK"})}
        with pytest.raises(CreateUncertain):
            shop.create()
        assert shop.slept == []

    @pytest.mark.parametrize("status", ["Unpaid", "Awaiting payment", "Payment Pending"])
    @pytest.mark.parametrize("invoices_as", ["list", "nested", "bare"])
    def test_an_unpaid_order_is_uncertain_and_its_invoice_is_residue(
        self, shop: Shop, status: str, invoices_as: str
    ) -> None:
        shop.fake.takes_unpaid, shop.fake.invoices_as = status, invoices_as
        with pytest.raises(OrderUnpaid, match="invoice 603548") as told:
            shop.create()
        assert isinstance(told.value, CreateUncertain)
        assert blocks(told.value, shop.order.offer, shop.plain.offers(Want())[-1])
        (left,) = shop.plain.residue()
        assert (left.kind, left.id, left.label) == ("invoice", "603548", shop.order.label)
        shop.fake.invoices[603548]["status"] = "Cancelled"
        assert shop.plain.residue() == []

    @pytest.mark.parametrize(
        "words", ["Invoice 603548 was created, payment failed", "Payment failed", "No credit"]
    )
    def test_a_refusal_that_speaks_of_an_invoice_does_not_promise_that_nothing_was_ordered(
        self, shop: Shop, words: str
    ) -> None:
        shop.fake.order_refusal = {"error": words}
        if words == "No credit":
            shop.fake.order_refusal["invoice"] = 603548
        with pytest.raises(OrderUnpaid):
            shop.create()

    def test_unknown_words_never_promise_that_nothing_was_ordered(self, shop: Shop) -> None:
        shop.arm("error body", "create")
        with pytest.raises(CreateUncertain):
            shop.create()

    def test_the_password_is_known_to_nobody_and_new_each_time(self, shop: Shop) -> None:
        shop.create()
        shop.create(label=label())
        assert len({server.request["root_pass"] for server in shop.market.rented}) == 2

    def test_a_system_for_gpus_and_a_free_traffic_plan_are_chosen(self, shop: Shop) -> None:
        shop.create()
        chosen = {"os_id": "240", "traffic_plan": "31", "deploy_period": "hourly"}
        assert chosen.items() <= shop.asked().items()
        shop.create(image="Debian 12")
        assert shop.asked()["os_id"] == "199"
        with pytest.raises(CreateFailed, match=r"no Ubuntu 24\.04"):
            shop.create(image="Ubuntu 24.04")
        for image in ("Debian 11", "Ubuntu 20.04", "Windows Server 2022"):
            with pytest.raises(InvalidInput):
                shop.plain.check(image)

    # -- the end

    def test_a_cancellation_is_asked_for_once_and_the_server_is_being_ended(
        self, shop: Shop
    ) -> None:
        """HOSTKEY accepts it at once and may take 12 hours."""
        machine = shop.create()
        shop.fake.cancel_s = 12 * 3600.0
        for provider in (shop.plain, shop.plain, shop.connect()):
            shop.destroy(machine, provider)
            live = provider.find(machine.id)
            assert live.state == "stopping"
            assert live.endpoint is not None
            assert "cancellation was requested" in live.note
        assert [server.state for server in shop.plain.list_own()] == ["stopping"]
        assert shop.fake.cancelled == [machine.id]
        shop.market.clock.advance(12 * 3600.0)
        assert shop.find(machine).proof

    def test_a_second_request_that_is_refused_is_no_failure(self, shop: Shop) -> None:
        """Another run asked between our look and our request."""
        machine = shop.create()
        shop.fake.cancel_s = 60.0
        shop.fake.late_lists = 1
        shop.fake.cancellations[machine.id] = shop.market.clock.now_unix + 60.0
        shop.destroy(machine)
        assert shop.fake.cancelled == [machine.id]

    def test_another_server_s_cancellation_is_not_this_one_s(self, shop: Shop) -> None:
        first = shop.create()
        second = shop.create(label=label())
        shop.fake.cancel_s, shop.fake.filters = 3600.0, False
        shop.destroy(first)
        live = {server.id: server.state for server in shop.plain.list_own()}
        assert live == {first.id: "stopping", second.id: "running"}

    @pytest.mark.parametrize("status", ["install", "TT", "suspended"])
    def test_an_unknown_status_is_no_proof_of_an_end(self, shop: Shop, status: str) -> None:
        machine = shop.create()
        shop.fake.live_status, shop.fake.unlisted = status, True
        assert shop.find(machine) == Absent()

    def test_it_settles_for_longer_than_its_own_client_waits(self, shop: Shop) -> None:
        assert shop.plain.abilities.settling_s >= max(7200, RENT_S + 3600)

    def test_a_server_of_another_status_is_gone_only_when_it_is_not_listed(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        shop.fake.ended_status = "cancelled"
        shop.market.end(shop.market.alive()[0])
        assert "says cancelled" in shop.find(machine).proof
        shop.market.rented[0].ended_unix = None
        shop.market.rented[0].stopped = True
        assert shop.find(machine).state == "stopped"

    def test_the_user_s_own_server_is_not_ours(self, shop: Shop) -> None:
        assert shop.plain.find(MachineId(str(OWN_SERVER))).label is None
        assert shop.plain.list_own() == []

    # -- shapes and sessions

    @pytest.mark.parametrize("listed", ["records", "numbers", "words"])
    @pytest.mark.parametrize("named", ["tags", "server_data", "nested"])
    def test_every_known_shape_is_read(self, shop: Shop, listed: str, named: str) -> None:
        shop.fake.listed_as, shop.fake.named_in = listed, named
        shop.fake.token_in = "answer"
        machine = shop.create()
        seen = [(server.id, server.label) for server in shop.plain.list_own()]
        assert seen == [(machine.id, shop.order.label)]

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
        self, shop: Shop, expired: Answer | None
    ) -> None:
        shop.plain.check()
        shop.fake.expired = expired
        shop.fake.sessions += 1
        shop.plain.check()
        logins = [path for _, path in shop.fake.calls if path == "/auth.php"]
        assert len(logins) == 2

    @pytest.mark.parametrize(
        "told", [{"token": 5}, {"result": {"token": None}}, {"result": "OK"}, {}]
    )
    def test_a_login_of_an_unknown_shape_is_unexpected(self, shop: Shop, told: Any) -> None:
        shop.fake.told_at_login = told
        with pytest.raises(UnexpectedAnswer):
            shop.connect().check()

    @pytest.mark.parametrize("status", [200, 404, 500])
    def test_no_error_repeats_what_an_answer_may_hold_in_secret(
        self, shop: Shop, status: int
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
            "order_instance": lambda provider: provider.create(shop.order),
            "show": lambda provider: provider.find(MachineId(str(OWN_SERVER))),
            "list": lambda provider: provider.list_own(),
            "login": lambda provider: provider.check(),
            "get_invoices": lambda provider: provider.residue(),
        }
        for action, ask in asks.items():
            for shape in shapes:
                shop.fake.instead = {action: Answer(status, shape)}
                with pytest.raises(ProviderError) as told:
                    ask(shop.connect())
                assert token not in str(told.value) and "S3cret" not in str(told.value)

    def test_the_gpus_are_counted_and_the_disk_is_one_of_two(self, shop: Shop) -> None:
        shop.market.wares[2].gpu = "4x RTX 4090"
        offers = {(o.id.split("/")[0], o.region): o for o in shop.plain.offers(Want())}
        assert {region for _, region in offers} == {"NL", "US", "DE"}
        four = offers["gpu.h100", "NL"]
        assert (str(four.gpu), four.gpu_count) == ("RTX 4090", 4)
        assert four.disk_gib == pytest.approx(1920e9 / 2**30)
        assert offers["vm.pico", "DE"].gpu is None
        assert misfit(offers["gpu.v2-a5000", "US"], Want(gpu="RTX A5000", disk_gib=900))


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ("invapi.hostkey.ru", "invapi.hostkey.ru"),
        ("https://invapi2.hostkey.com/", "invapi2.hostkey.com"),
        ("invapi.hostkey.com.attacker.example", "invapi.hostkey.com"),
        ("http://invapi.hostkey.ru", "invapi.hostkey.com"),
        (None, "invapi.hostkey.com"),
    ],
)
def test_a_session_goes_where_its_login_says_but_to_hostkey_alone(
    told: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        body = {"token": "t" * 32, "invapi": told} if len(hosts) == 1 else {"servers": []}
        return httpx.Response(200, json={"result": body} if len(hosts) == 1 else body)

    transport = httpx.MockTransport(answer)
    real = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **options: real(**{**options, "transport": transport})
    )
    client = HostkeyClient("https://invapi.hostkey.com", "k" * 32)
    client.read("eq", "list")
    assert hosts == ["invapi.hostkey.com", asked]
