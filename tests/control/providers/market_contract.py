"""The contract of providers, and what is asked of a market beyond it. Subclass it per market."""

from __future__ import annotations

import base64
import copy
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import asyncssh
import msgspec
import pytest

from tests.contracts.provider_contract import KilledCreate, ProviderContract
from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import PATIENCE_S
from tests.markets.boot import Machines
from tests.markets.every import FAKES
from tests.markets.faults import Action, Fault
from tests.markets.kills import killed_at_request
from tests.markets.odd_rows import MISSING, ODD, odd_row
from tests.markets.server import KEY, Answer, FakeMarket, Request
from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.provider import Absent, Adopts, Order, Provider
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    MachineUnread,
    NoCapacity,
    NotOurs,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
    UnexpectedAnswer,
)
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name


class Shop:
    """A fake of one market, its adapter, and an order of the first offer that fits. ``more``: what
    the adapter is told beside its key."""

    ssh_port = 22

    def __init__(self, fake: FakeMarket, want: Want, key: KeyPair, **more: Any) -> None:
        self.fake: Any = fake
        self.market = fake.market
        self.slept: list[float] = []
        self._of, self._more = (fake, want, key), more
        self.plain = self.connect()  # the machines have no bodies
        identity = asyncssh.import_private_key(key.private)
        offer = next(offer for offer in self.plain.offers(want) if not misfit(offer, want))
        self.order = order_for(offer, label(), identity, want)

    def another(self, **more: Any) -> Shop:
        """At the same fake."""
        return Shop(*self._of, **more)

    def connect(self, timeout_s: float = 30.0, **more: Any) -> Any:
        options = {"timeout_s": timeout_s, "ssh_port": self.ssh_port, "sleep": self.slept.append}
        return self.fake.connect(**{**options, **self._more, **more})

    def changed(self, **changes: Any) -> Order:
        return msgspec.structs.replace(self.order, **changes)

    def create(self, **changes: Any) -> Machine:
        """The same order each time; ``changes`` are of another one."""
        if changes:
            changes.setdefault("label", label())
        return self.plain.create(self.changed(**changes))

    def find(self, machine: Machine) -> Any:
        return self.plain.find(machine.id)

    def destroy(self, machine: Machine, provider: Provider | None = None) -> None:
        (provider or self.plain).destroy(machine, never_handed_over(machine, machine.label))

    def asked(self) -> dict[str, Any]:
        """What the newest create sent."""
        return self.market.rented[-1].request

    def arm(self, *fault: Any, **more: Any) -> None:
        self.fake.faults.arm(Fault(*fault, **more))


def _hung(shop: Shop, action: Action, count: int, ask: Callable[[Any], object]) -> None:
    """Ask a market that does not answer this request. On a busy host a client with a short timeout
    may give up before it comes to this request: then one with a longer timeout asks."""
    for timeout_s in (0.05, 1.0, 20.0, PATIENCE_S):
        hangs = Fault("hang", action, count=count)
        shop.fake.faults.arm(hangs)
        try:
            ask(shop.connect(timeout_s=timeout_s))
        except ProviderError:
            if hangs.count < count:
                raise
        finally:
            shop.fake.faults.clear()


class MarketContract(ProviderContract):
    """``row``: a name of ``tests.markets.every``. Fixture to give: ``want``."""

    row: str
    reach_stride = 1000
    images = True
    sells_spot = False
    states_on_demand = False  # of a spot machine: what the same one costs on demand
    queues = False  # no request is refused for want of capacity
    names_waits = True  # how long a client is to wait, where it asked too often
    label_cells: ClassVar[set[str]] = {"label", "name", "description", "tags"}
    """Where a row holds our label: what holds none there is not ours."""
    id_cells: ClassVar[set[str]] = {"id"}  # without which a row is not known for what it is
    offers_by_row = True  # an offer is sold by one row, and not sold without it
    elsewhere: ClassVar[dict[str, Any]] = {}
    """What another account says beside its key."""
    price_slack = 0.01
    concludes_nothing: ClassVar[dict[str, type[ProviderError]]] = {
        "wrong shape": UnexpectedAnswer,
        "error body": UnexpectedAnswer,
        "not json": ProviderUnavailable,
    }

    @pytest.fixture
    def fake(self) -> Iterator[FakeMarket]:
        with FAKES[self.row]() as fake:
            yield fake
        assert getattr(fake, "violations", []) == [], "a request that the market forbids"
        lacks = [] if fake.policy is None else fake.policy.lacks
        assert lacks == [], f"the policy in docs/guide/markets does not allow {lacks}"

    @pytest.fixture
    def shop(self, fake: FakeMarket, want: Want, identity_key: KeyPair) -> Shop:
        return Shop(fake, want, identity_key)

    @pytest.fixture
    def provider(self, shop: Shop, booted_machines: Machines) -> Provider:
        shop.market.boot = lambda command: booted_machines.boot(command, shop.fake.body)
        shop.ssh_port = booted_machines.port
        return shop.connect()

    @pytest.fixture
    def other_provider(self) -> Iterator[Provider]:
        with FAKES[self.row]() as other:
            other.key = "another-account-key"
            yield other.connect(**self.elsewhere)

    @pytest.fixture
    def unlabelled(self, shop: Shop) -> MachineId:
        shop.fake.may_adopt()  # a narrower policy would not even let torpor look at it
        return self.foreign(shop)

    @pytest.fixture
    def killed_create(self, shop: Shop) -> KilledCreate:
        return lambda order, step: killed_at_request(
            shop.fake, step, lambda: shop.connect().create(order)
        )

    def foreign(self, shop: Shop) -> MachineId:
        """Rent a machine by hand, without our label."""
        return MachineId(shop.fake.rent_by_hand(-1).id)

    # -- without machines: what the adapter makes of answers

    def test_the_policy_of_the_page_gives_no_right_that_no_request_needs(self, shop: Shop) -> None:
        """A request that it does not allow is refused in all of these tests."""
        if shop.fake.policy is not None:
            self.ask_for_everything(shop)
            unneeded = shop.fake.policy.unneeded()
            assert unneeded == [], f"no request needs {unneeded}"

    def ask_for_everything(self, shop: Shop) -> None:
        """Each kind of request that the adapter makes."""
        provider = shop.plain
        provider.check()
        provider.offers(Want(spot="either"))
        machine = shop.create()
        provider.find(machine.id)
        provider.list_own()
        if provider.abilities.adopts:
            shop.fake.may_adopt()
            mine = provider.find(self.foreign(shop))
            provider.mark(mine, wanted := label())
            provider.mark(msgspec.structs.replace(mine, label=wanted), None)
        if provider.abilities.restarts:
            shop.market.rented[0].stopped = True
            provider.start(machine)
        shop.destroy(machine)
        provider.find(machine.id)
        provider.residue()

    def test_it_costs_what_the_offer_said(self, shop: Shop) -> None:
        machine = shop.create()
        shop.market.clock.advance(3600)
        price_usd_h = shop.find(machine).price_usd_h
        spent, offered = shop.market.spent_usd(), shop.order.offer.price_usd_h
        assert spent == pytest.approx(price_usd_h, rel=0.01), "find() states another price"
        assert offered == pytest.approx(price_usd_h, rel=self.price_slack), "offers() lied"

    def test_spot_machines_are_offered_only_where_they_are_asked_for(self, shop: Shop) -> None:
        assert not any(offer.spot for offer in shop.plain.offers(Want())), "spot was not wanted"
        found = shop.plain.offers(Want(spot="only", disk_gib=20))
        assert any(offer.spot for offer in found) is self.sells_spot, "see ``sells_spot``"

    def test_a_spot_machine_states_the_price_of_the_same_one_on_demand_or_none(
        self, shop: Shop
    ) -> None:
        sold = shop.plain.offers(Want(spot="allowed", disk_gib=20))
        stated = [offer for offer in sold if offer.on_demand_usd_h is not None]
        assert bool(stated) is self.states_on_demand, "see ``states_on_demand``"
        for spot in stated:
            like = (spot.gpu, spot.gpu_count, spot.region)
            plain = [one for one in sold if (one.gpu, one.gpu_count, one.region) == like]
            assert spot.spot and spot.on_demand_usd_h in [
                pytest.approx(one.price_usd_h) for one in plain if not one.spot
            ]

    @pytest.mark.rule(5)
    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("no capacity", NoCapacity),
            ("quota", QuotaReached),
            ("no money", ProviderDenied),
            ("lost", CreateUncertain),
            ("error after", CreateUncertain),
            ("error that created", CreateUncertain),
            ("wrong shape", CreateUncertain),
            ("not json", CreateUncertain),
        ],
    )
    def test_a_failed_create_says_what_it_blocks(
        self, shop: Shop, kind: str, error: type[Exception]
    ) -> None:
        if kind == "no capacity" and self.queues:
            return
        shop.arm(kind, "create")
        with pytest.raises(error):
            shop.create()
        rents = {"lost", "error after", "error that created"}
        assert len(shop.market.rented) == (1 if kind in rents else 0), "a create is sent once"
        again = shop.create()
        alive = [m.id for m in shop.market.alive()]
        assert alive == [again.id], "the same order is the same machine, also after a lost answer"

    @pytest.mark.rule(5)
    @pytest.mark.parametrize("status", [408, 409, 425, 499])
    def test_a_gateway_that_gives_up_on_a_create_promises_nothing(
        self, shop: Shop, status: int
    ) -> None:
        """An adapter that knows what a conflict means may find the machine."""
        shop.arm("error after", "create", status=status)
        made: Machine | None = None
        with suppress(CreateUncertain):
            made = shop.create()
        (rented,) = shop.market.rented
        known = made is None or (status == 409 and made.id == shop.plain.list_own()[0].id)
        assert known, f"a {status} may be a gateway's: only CreateUncertain says so"
        assert shop.create().id == shop.plain.list_own()[0].id, "the lost machine is found"
        assert shop.market.alive() == [rented], "nothing is rented twice"

    def test_a_create_that_was_refused_everything_is_denied(self, shop: Shop) -> None:
        shop.arm("denied", count=100)
        for ask in (shop.plain.check, shop.plain.list_own, shop.create):
            with pytest.raises(ProviderDenied):
                ask()

    def test_a_wrong_key_is_denied_and_not_repeated(self, shop: Shop) -> None:
        provider = shop.plain
        shop.fake.key = "has-changed"
        with pytest.raises(ProviderDenied) as told:
            provider.check()
        assert KEY not in f"{told.value} {provider!r}", "no message and no repr shows the key"

    def test_a_key_that_is_revoked_after_a_create_proves_no_end(self, shop: Shop) -> None:
        machine = shop.create()
        shop.fake.key = "has-changed"
        for _ in range(2):  # a login that is still good may answer
            with suppress(ProviderDenied):
                found = shop.find(machine)
                assert isinstance(found, Machine), "an account that lets nobody in shows nothing"
            with suppress(ProviderDenied):
                assert [one.id for one in shop.plain.list_own()] == [machine.id]

    def test_a_busy_market_is_asked_again(self, shop: Shop) -> None:
        shop.arm("too many", count=2, retry_after_s=3)
        machine = shop.create()
        shop.arm("unavailable", count=2)
        assert isinstance(shop.find(machine), Machine)
        assert len(shop.slept) >= 4, "each further try waits"
        assert self.names_waits is (3.0 in shop.slept), "Retry-After is kept to"
        shop.arm("too many", count=100, retry_after_s=86_400)
        with pytest.raises(ProviderUnavailable) as told:
            shop.plain.list_own()
        assert told.value.retry_after_s == (86_400 if self.names_waits else 0)
        with pytest.raises(ProviderUnavailable):
            shop.create(disk_gib=21)
        assert len(shop.market.rented) == 1, "ProviderUnavailable promises that nothing was rented"

    def test_a_hanging_market_is_unavailable_and_a_hanging_create_uncertain(
        self, shop: Shop
    ) -> None:
        with pytest.raises(ProviderUnavailable):
            _hung(shop, "list", 100, lambda provider: provider.list_own())
        with pytest.raises(CreateUncertain):
            _hung(shop, "create", 1, lambda provider: provider.create(shop.order))

    def test_a_page_instead_of_json_is_asked_again(self, shop: Shop) -> None:
        """Of a gateway: the market has not spoken."""
        machine = shop.create()
        shop.arm("not json", count=2)
        assert isinstance(shop.find(machine), Machine)
        assert shop.slept, "each further try waits"
        shop.arm("not json", "destroy", count=2)
        shop.destroy(machine)
        assert shop.market.alive() == [], "a gateway's page is no success of destroy()"

    @pytest.mark.parametrize("kind", ["wrong shape", "error body", "not json"])
    def test_an_unknown_shape_is_never_an_empty_list(
        self, shop: Shop, want: Want, kind: str
    ) -> None:
        machine, plain = shop.create(), shop.plain
        for ask in (
            plain.list_own,
            lambda: shop.find(machine),
            lambda: plain.offers(want),
            plain.check,
        ):
            shop.fake.faults.clear()
            shop.arm(kind, count=100)
            with pytest.raises(self.concludes_nothing[kind]):
                ask()

    def test_a_machine_that_is_listed_late_is_found_late(self, shop: Shop) -> None:
        shop.arm("lost", "create")
        shop.market.next_hidden_looks = 3
        with pytest.raises(CreateUncertain):
            shop.create()
        seen = [[m.label for m in shop.plain.list_own()] for _ in range(6)]
        assert seen[0] == [], "the fake shows it too soon"
        assert seen[-1] == [shop.order.label], "the listing shows every machine of ours"

    def test_a_new_machine_that_is_shown_late_is_found_by_looking_for_it_alone(
        self, shop: Shop
    ) -> None:
        """As a wake waits for it: it asks for no list meanwhile."""
        shop.market.next_hidden_looks = 3
        machine = shop.create()
        found = [shop.find(machine) for _ in range(4)][-1]
        assert isinstance(found, Machine), "find() asks for this machine alone"
        assert found.endpoint is not None, "a machine that runs has an address"

    def test_a_machine_that_starts_does_not_run_yet(self, shop: Shop) -> None:
        """It is billed already."""
        shop.market.next_starting_looks = 3
        machine = shop.create()
        states = [shop.find(machine).state for _ in range(6)]
        assert (states[0], states[-1]) == ("starting", "running"), "wake waits for the state"

    def test_not_found_once_is_no_proof(self, shop: Shop) -> None:
        machine = shop.create()
        shop.arm("not found", "find")
        found = shop.find(machine)
        assert isinstance(found, Machine) or not found.proof, "one absence proves no end"
        assert isinstance(shop.find(machine), Machine), "find() tells the live truth"

    def test_it_is_ended_only_when_the_market_has_proved_it(self, shop: Shop) -> None:
        machine = shop.create()
        shop.arm("lives", "destroy")
        shop.destroy(machine)
        assert isinstance(shop.find(machine), Machine), "an accepted destroy() is no proof"
        shop.destroy(machine)
        found = shop.find(machine)
        assert isinstance(found, Absent), "find() shows a machine that has ended"
        assert found.proof, "find() has no proof of the end: what does the market say of it?"
        assert shop.market.alive() == [], "the proof is wrong: the machine lives"
        assert shop.plain.residue() == [], "destroy() also ends what was rented with the machine"

    @pytest.mark.rule(5)
    def test_of_an_end_long_ago_there_is_a_proof_unless_the_market_forgets(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        shop.destroy(machine)
        shop.fake.forget()
        found = shop.connect().find(machine.id)
        assert isinstance(found, Absent), "find() shows a machine that ended long ago"
        proves = shop.plain.abilities.forgets_s is None
        assert bool(found.proof) is proves, "``abilities.forgets_s`` says how long there is a proof"

    def test_a_stopped_machine_is_started_once_there_is_room(self, shop: Shop) -> None:
        if not shop.plain.abilities.restarts:
            assert not hasattr(shop.plain, "start"), "start() needs ``abilities.restarts``"
            return
        machine = shop.create()
        (rented,) = shop.market.rented
        shop.market.take(rented)
        with suppress(NoCapacity):
            shop.plain.start(machine)
        assert [live.state for live in shop.plain.list_own()] == ["stopped"]
        rented.no_room = False
        with pytest.raises(NotOurs, match="was not started"):
            shop.plain.start(msgspec.structs.replace(machine, label=label()))
        assert rented.stopped
        shop.plain.start(machine)
        assert [live.state for live in shop.plain.list_own()] == ["running"]

    def test_a_machine_is_marked_as_ours_and_given_back(self, shop: Shop) -> None:
        provider, own = shop.plain, shop.create()
        if not provider.abilities.adopts:
            assert not isinstance(provider, Adopts), "mark() needs ``abilities.adopts``"
            return
        shop.fake.may_adopt()
        mine = provider.find(self.foreign(shop))
        provider.mark(mine, wanted := label())
        provider.mark(mine, wanted)
        marked = provider.find(mine.id)
        assert marked == msgspec.structs.replace(mine, label=wanted), "mark() changes the label"
        assert {m.id for m in provider.list_own()} == {own.id, mine.id}, "a marked one is listed"
        if provider.abilities.adopts == "marked":
            assert shop.connect().find(mine.id) == marked
            for machine in (mine, msgspec.structs.replace(own, label=None)):
                with pytest.raises(NotOurs, match="was not changed"):
                    provider.mark(machine, label())
        provider.mark(marked, None)
        assert provider.find(mine.id) == mine, "mark(None) takes the label off"
        assert [m.id for m in provider.list_own()] == [own.id], "it is listed as ours"

    def test_another_owner_s_machines_are_not_listed(self, shop: Shop) -> None:
        for _ in range(30):
            self.foreign(shop)
        machine = shop.create()
        listed = [m.id for m in shop.plain.list_own()]
        assert listed == [machine.id], "list_own() has all of ours, on all pages, and no others"

    @pytest.mark.parametrize("odd", ODD, ids=str)
    def test_an_odd_cell_of_somebody_else_s_machine_hides_none_of_ours(
        self, shop: Shop, odd: Any
    ) -> None:
        mine, other = shop.create(), self.foreign(shop)
        with odd_row(shop.fake, self.row, other) as row:
            shop.plain.list_own()
            for cell in sorted(row.cells):
                row.odd = {cell: odd}
                shown, _ = own(shop)
                assert [*shown] == [mine.id], f"{cell} of another machine is odd"
                assert shop.find(mine).id == mine.id, f"{cell} of another machine is odd"
            row.odd = dict.fromkeys(sorted(row.cells, key=len, reverse=True), odd)
            shop.destroy(mine)
        assert mine.id not in {machine.id for machine in shop.market.alive()}

    @pytest.mark.parametrize("odd", ODD, ids=str)
    def test_an_odd_cell_of_a_machine_of_ours_proves_no_end_and_keeps_no_other_one_from_its_end(
        self, shop: Shop, odd: Any
    ) -> None:
        mine, other = shop.create(), shop.create(disk_gib=21)
        with odd_row(shop.fake, self.row, other.id) as row:
            shop.plain.list_own()
            shop.find(other)
            for cell in sorted(row.cells):
                row.odd = {cell: odd}
                shown, unread = own(shop)
                assert mine.id in shown, f"{cell} of another machine is odd"
                nameless = odd in (None, MISSING) and not self.label_cells.isdisjoint(cell)
                known = len(shown) == 2 or unread or nameless  # an odd id may be another id
                assert known, f"a list with an odd {cell} says that the machine is gone"
                with suppress(UnexpectedAnswer):
                    found = shop.find(other)
                    gone = isinstance(found, Absent) and found.proof
                    assert not gone, f"an odd {cell} proves an end"
            row.odd = {}
            needed = {*self.label_cells, *self.id_cells}
            row.odd = {cell: odd for cell in row.cells if needed.isdisjoint(cell)}
            shop.destroy(mine)
            shop.destroy(other)
        assert shop.market.alive() == [], "a machine of ours with odd cells can be ended"

    def with_an_odd_offer(self, body: Any) -> Any:
        """An answer about offers, whose first row has no cell that can be read."""
        rows = first_rows(body)
        key = next(iter(rows)) if isinstance(rows, dict) else 0
        rows[key] = dict.fromkeys(rows[key])
        return body

    def test_an_odd_offer_is_left_out_and_named_among_the_refused(self, shop: Shop) -> None:
        plainly = shop.fake.answer
        sold = {offer.id for offer in shop.plain.offers(Want())}

        def answer(request: Request, authorization: str) -> Any:
            said = plainly(request, authorization)
            if said is not None and request.action == "offers":
                body = self.with_an_odd_offer(copy.deepcopy(said.body))
                said = Answer(said.status, body, said.content_type, said.headers)
            return said

        shop.fake.answer = answer
        found = shop.plain.offers(Want())
        odd = [offer for offer in found if offer.unread]
        assert odd, "the odd offer is counted"
        assert all("odd cell" in misfit(offer, Want()) for offer in odd), "it fits nobody"
        good = {offer.id for offer in found} - {offer.id for offer in odd}
        assert good and good <= sold, "one odd offer hides no other"
        assert good < sold or not self.offers_by_row, "the odd offer is left out"

    def test_no_key_of_the_account_is_sent_to_the_machine(self, shop: Shop) -> None:
        shop.create()
        asked = msgspec.json.encode(shop.asked()).decode()
        assert KEY not in asked, "the create sends the account's key to the machine"
        for word in asked.replace('"', " ").split():
            if len(word) > 400:
                packed = base64.b64decode(word, validate=False)
                assert KEY.encode() not in packed, "the start script holds the account's key"

    def test_bare_and_old_images_are_refused_before_anything_is_rented(self, shop: Shop) -> None:
        refused = ["alpine:3.20", "busybox", "gcr.io/distroless/base", "ubuntu:20.04", "a b"]
        for image in refused if self.images else ["debian:12"]:
            with pytest.raises(InvalidInput):
                shop.plain.check(image)

    def test_a_made_up_offer_is_no_rental(self, shop: Shop) -> None:
        with pytest.raises((CreateFailed, ProviderError)):
            shop.create(offer=msgspec.structs.replace(shop.order.offer, id="made-up"))
        assert shop.market.rented == [], "an offer that nobody made was rented"


def own(shop: Shop) -> tuple[set[MachineId], bool]:
    """The machines of ours that the market shows, and whether a further one may be ours."""
    try:
        return {machine.id for machine in shop.plain.list_own()}, False
    except MachineUnread as error:
        return {machine.id for machine in error.machines}, True


def first_rows(body: Any) -> Any:
    """The list, or the object of objects, that holds the offers in an answer."""
    inner = [*body.values()] if isinstance(body, dict) else body
    if inner and all(isinstance(row, dict) for row in inner) and len(inner) > 1:
        return body
    return next(
        rows for value in inner if isinstance(value, (dict, list)) for rows in [first_rows(value)]
    )


def label() -> Label:
    return Label("contract", workspace_name("contract"), secrets.token_hex(8))


def of_model(offers: list[Offer], model: str) -> list[Offer]:
    return [offer for offer in offers if offer.gpu is not None and offer.gpu.model == model]
