"""The contract of providers, and what is asked of a market beyond it. Subclass it per market."""

from __future__ import annotations

import base64
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import asyncssh
import msgspec
import pytest

from tests.contracts.provider_contract import KilledCreate, ProviderContract
from tests.fixtures.machines import KeyPair
from tests.markets.boot import Machines
from tests.markets.faults import Fault
from tests.markets.kills import killed_at_request
from tests.markets.server import KEY, FakeMarket
from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
    UnexpectedAnswer,
)
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name


class MarketContract(ProviderContract, ABC):
    """Fixtures to give: ``fake`` (without bodies), ``want``, and ``connect``."""

    reach_stride = 1000
    images = True

    @pytest.fixture
    def fake(self) -> Iterator[FakeMarket]:
        fake = self.new_fake()
        yield fake
        fake.close()

    @pytest.fixture
    def provider(self, fake: FakeMarket, booted_machines: Machines) -> Provider:
        fake.market.boot = lambda command: booted_machines.boot(command, self.body)
        self.ssh_port = booted_machines.port
        return self.connect(fake)

    @pytest.fixture
    def other_provider(self, fake: FakeMarket) -> Iterator[Provider]:
        other = self.new_fake()
        other.key = "another-account-key"
        yield self.connect(other)
        other.close()

    @pytest.fixture
    def unlabelled(self, fake: FakeMarket) -> MachineId:
        return self.foreign(fake)

    @pytest.fixture
    def killed_create(self, fake: FakeMarket) -> KilledCreate:
        def kill(order: Order, step: int) -> bool:
            return killed_at_request(fake, step, lambda: self.connect(fake).create(order))

        return kill

    # -- without machines: what the adapter makes of answers

    @pytest.fixture
    def plain(self, fake: FakeMarket) -> Provider:
        return self.connect(fake)

    @pytest.fixture
    def order(self, plain: Provider, want: Want, identity_key: KeyPair) -> Order:
        key = asyncssh.import_private_key(identity_key.private)
        offer = next(offer for offer in plain.offers(want) if not misfit(offer, want))
        return order_for(offer, label(), key, want)

    def test_it_costs_what_the_offer_said(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.market.clock.advance(3600)
        live = plain.find(machine.id)
        assert isinstance(live, Machine)
        assert fake.market.spent_usd() == pytest.approx(live.price_usd_h, rel=0.01)
        assert order.offer.price_usd_h == pytest.approx(live.price_usd_h, rel=self.price_slack)

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
        self, plain: Provider, fake: FakeMarket, order: Order, kind: Any, error: type[Exception]
    ) -> None:
        fake.faults.arm(Fault(kind, "create"))
        with pytest.raises(error):
            plain.create(order)
        if error is not CreateUncertain:
            assert fake.market.rented == []
        assert len(fake.market.rented) <= 1
        again = plain.create(order)
        assert [m.id for m in fake.market.alive()] == [again.id]

    @pytest.mark.parametrize("status", [408, 409, 425, 499])
    def test_a_gateway_that_gives_up_on_a_create_promises_nothing(
        self, plain: Provider, fake: FakeMarket, order: Order, status: int
    ) -> None:
        """An adapter that knows what a conflict means may find the machine."""
        fake.faults.arm(Fault("error after", "create", status=status))
        made: Machine | None = None
        with suppress(CreateUncertain):
            made = plain.create(order)
        (rented,) = fake.market.rented
        assert made is None or (status == 409 and made.id == plain.list_own()[0].id)
        assert plain.create(order).id == plain.list_own()[0].id
        assert fake.market.alive() == [rented]

    def test_a_create_that_was_refused_everything_is_denied(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.faults.arm(Fault("denied", count=100))
        for ask in (plain.check, plain.list_own, lambda: plain.create(order)):
            with pytest.raises(ProviderDenied):
                ask()

    def test_a_wrong_key_is_denied_and_not_repeated(self, fake: FakeMarket) -> None:
        fake.key = "has-changed"
        provider = self.connect(fake, key=KEY)
        with pytest.raises(ProviderDenied) as told:
            provider.check()
        assert KEY not in str(told.value)
        assert KEY not in repr(provider)

    def test_a_busy_market_is_asked_again(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.faults.arm(Fault("too many", count=2, retry_after_s=3))
        machine = plain.create(order)
        fake.faults.arm(Fault("unavailable", count=2))
        assert isinstance(plain.find(machine.id), Machine)
        assert 3.0 in self.slept
        fake.faults.arm(Fault("too many", count=1, retry_after_s=86_400))
        with pytest.raises(ProviderUnavailable) as told:
            plain.list_own()
        assert told.value.retry_after_s == 86_400
        fake.faults.clear()
        fake.faults.arm(Fault("too many", "create", count=100))
        with pytest.raises(ProviderUnavailable):
            plain.create(msgspec.structs.replace(order, label=label()))
        assert len(fake.market.rented) == 1

    def test_a_hanging_market_is_unavailable_and_a_hanging_create_uncertain(
        self, fake: FakeMarket, order: Order
    ) -> None:
        provider = self.connect(fake, timeout_s=0.05)
        fake.faults.arm(Fault("hang", "list", count=100))
        with pytest.raises(ProviderUnavailable):
            provider.list_own()
        fake.faults.clear()
        fake.faults.arm(Fault("hang", "create"))
        with pytest.raises(CreateUncertain):
            provider.create(order)

    def test_a_page_instead_of_json_is_asked_again(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """Of a gateway: the market has not spoken."""
        machine = plain.create(order)
        fake.faults.arm(Fault("not json", count=2))
        assert isinstance(plain.find(machine.id), Machine)
        assert self.slept
        fake.faults.arm(Fault("not json", "destroy", count=2))
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert fake.market.alive() == []

    @pytest.mark.parametrize("kind", ["wrong shape", "error body", "not json"])
    def test_an_unknown_shape_is_never_an_empty_list(
        self, plain: Provider, fake: FakeMarket, order: Order, want: Want, kind: Any
    ) -> None:
        machine = plain.create(order)
        for ask in (
            plain.list_own,
            lambda: plain.find(machine.id),
            lambda: plain.offers(want),
            plain.check,
        ):
            fake.faults.clear()
            fake.faults.arm(Fault(kind, count=100))
            with pytest.raises(self.concludes_nothing[kind]):
                ask()

    def test_a_machine_that_is_listed_late_is_found_late(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.faults.arm(Fault("lost", "create"))
        fake.market.next_hidden_looks = 3
        with pytest.raises(CreateUncertain):
            plain.create(order)
        seen = [[m.label for m in plain.list_own()] for _ in range(6)]
        assert seen[0] == []
        assert seen[-1] == [order.label]

    def test_a_new_machine_that_is_shown_late_is_found_by_looking_for_it_alone(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """As a wake waits for it: it asks for no list meanwhile."""
        fake.market.next_hidden_looks = 3
        machine = plain.create(order)
        for _ in range(4):
            found = plain.find(machine.id)
        assert isinstance(found, Machine)
        assert found.endpoint is not None

    def test_not_found_once_is_no_proof(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.faults.arm(Fault("not found", "find"))
        found = plain.find(machine.id)
        assert isinstance(found, Machine) or not found.proof
        assert isinstance(plain.find(machine.id), Machine)

    def test_it_is_ended_only_when_the_market_has_proved_it(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.faults.arm(Fault("lives", "destroy"))
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert isinstance(plain.find(machine.id), Machine)
        plain.destroy(machine, never_handed_over(machine, order.label))
        found = plain.find(machine.id)
        assert isinstance(found, Absent)
        assert found.proof
        assert fake.market.alive() == []
        assert plain.residue() == []

    def test_of_an_end_long_ago_there_is_a_proof_unless_the_market_forgets(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        plain.destroy(machine, never_handed_over(machine, order.label))
        fake.forget()
        found = self.connect(fake).find(machine.id)
        assert isinstance(found, Absent)
        assert bool(found.proof) is (plain.abilities.forgets_s is None)

    def test_another_owner_s_machines_are_not_listed(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        for _ in range(30):
            self.foreign(fake)
        machine = plain.create(order)
        assert [m.id for m in plain.list_own()] == [machine.id]

    def test_no_key_of_the_account_is_sent_to_the_machine(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        plain.create(order)
        asked = msgspec.json.encode(fake.market.rented[0].request).decode()
        assert KEY not in asked
        for word in asked.replace('"', " ").split():
            if len(word) > 400:
                assert KEY.encode() not in base64.b64decode(word, validate=False)

    def test_bare_and_old_images_are_refused_before_anything_is_rented(
        self, plain: Provider
    ) -> None:
        refused = ["alpine:3.20", "busybox", "gcr.io/distroless/base", "ubuntu:20.04", "a b"]
        for image in refused if self.images else ["debian:12"]:
            with pytest.raises(InvalidInput):
                plain.check(image)

    def test_a_made_up_offer_is_no_rental(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        offer = msgspec.structs.replace(order.offer, id="made-up")
        with pytest.raises((CreateFailed, ProviderError)):
            plain.create(msgspec.structs.replace(order, offer=offer))
        assert fake.market.rented == []

    # -- what each market gives

    body: Any = "container"
    price_slack = 0.01
    concludes_nothing: ClassVar[dict[str, type[ProviderError]]] = {
        "wrong shape": UnexpectedAnswer,
        "error body": UnexpectedAnswer,
        "not json": ProviderUnavailable,
    }
    ssh_port = 22
    slept: list[float]

    @abstractmethod
    def new_fake(self) -> FakeMarket:
        """A fake of this market, with its wares."""

    @abstractmethod
    def connect(self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0) -> Provider:
        """The adapter of an account at the fake."""

    @abstractmethod
    def foreign(self, fake: FakeMarket) -> MachineId:
        """Rent a machine by hand, without our label."""


def label() -> Label:
    return Label("contract", workspace_name("contract"), secrets.token_hex(8))


def of_model(offers: list[Offer], model: str) -> list[Offer]:
    return [offer for offer in offers if offer.gpu is not None and offer.gpu.model == model]
