"""What every provider must do. Subclass it in ``tests/control/providers`` with the fixtures."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Protocol
from urllib.parse import urlsplit

import asyncssh
import msgspec
import pytest

from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.providers.offers import misfit
from torpor.control.providers.provider import Absent, Order, Provider
from torpor.control.remote.ssh import Identity, connect
from torpor.control.rental.order import host_key_of, order_for
from torpor.control.rental.waiting import wait_until_reachable
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import HostKeyChanged, MachineUnreachable, NotOurs, UnsafeDestroy
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name

KilledCreate = Callable[[Order, int], bool]
"""Begin a create in another process and kill -9 it at its n-th step; False when it got through."""

_MOST_STEPS = 400


class ProviderContract:
    """Fixtures to give: ``provider`` (fresh, and cleaned up after), ``other_provider`` (of the same
    kind, another account), ``want`` (what it sells), ``unlabelled`` (the id of a machine at
    ``provider`` that we do not own) and ``killed_create``."""

    kill_stride = 1  # how many steps lie between the kills
    reach_stride = 1  # how many kills lie between two whose machine is waited for until it answers

    @pytest.fixture
    def ordered(self, provider: Provider, want: Want, identity_key: KeyPair) -> Ordered:
        """Orders of the first offer that fits, each under a fresh label where none is given."""
        key = asyncssh.import_private_key(identity_key.private)
        offer = next(offer for offer in provider.offers(want) if not misfit(offer, want))
        return lambda label=None: order_for(offer, label or _label(), key, want)

    def test_the_account_is_named_before_anything_is_rented(self, provider: Provider) -> None:
        assert provider.check().name
        assert provider.identity == provider.identity
        assert provider.list_own() == []

    def test_abilities_have_bounds(self, provider: Provider) -> None:
        able = provider.abilities
        assert able == provider.abilities
        assert 0 <= able.settling_s <= 7200
        assert 0 < able.ready_s <= 3600
        assert able.billing_s > 0
        assert 0 <= able.ending_s <= 86_400
        assert able.min_disk_gib >= 0
        long = able.forgets_s is None or able.forgets_s >= able.settling_s
        assert long, "a machine that may be shown late must be remembered as long"
        for source in able.notices:
            assert able.notice_s is not None, "what can be asked is a warning: state ``notice_s``"
            assert source.url == source.url.rstrip("/")
            assert urlsplit(source.url).scheme == "http"

    def test_some_offers_fit_and_each_says_what_ranking_needs(
        self, provider: Provider, want: Want
    ) -> None:
        offers = provider.offers(want)
        assert [offer for offer in offers if not misfit(offer, want)], "offers() has none that fits"
        assert len({offer.id for offer in offers}) == len(offers), "an id is of one offer"
        for offer in offers:
            assert offer.provider == provider.identity
            assert offer.region
            assert offer.domain
            assert offer.price_usd_h >= 0
            assert offer.priced_unix <= time.time(), "``priced_unix`` is when the price was asked"
            vouched = provider.abilities.many_owners or not offer.many_owners
            assert vouched, "``abilities.many_owners`` says so of all offers"
            assert (offer.gpu is None) == (offer.gpu_count == 0), "no GPU is None and 0"

    def test_what_nobody_sells_fits_nowhere(self, provider: Provider, want: Want) -> None:
        for change in (
            {"gpu": "RTX 9999"},
            {"disk_gib": 1e12},
            {"max_price_usd_h": -1.0},
            {"regions": ["nowhere"]},
            {"architecture": "vax"},
        ):
            wanted = msgspec.structs.replace(want, **change)
            assert all(misfit(offer, wanted) for offer in provider.offers(wanted)), change

    @pytest.mark.rule(5)
    def test_the_same_label_is_the_same_machine(self, provider: Provider, ordered: Ordered) -> None:
        label = _label()
        first = provider.create(ordered(label))
        again = provider.create(ordered(label))
        other = provider.create(ordered())
        assert again.id == first.id, "a second create() with the same order rents another machine"
        assert first.id != other.id, "an order of another label is another machine"
        assert {m.id for m in provider.list_own()} == {first.id, other.id}, "list_own() has each"

    @pytest.mark.rule(5)
    def test_creates_at_once_with_one_label_make_one_machine(
        self, provider: Provider, ordered: Ordered
    ) -> None:
        if provider.abilities.idempotency == "lookup":
            return  # one attempt is never sent twice (torpor.control.rental)
        order, together = ordered(), Barrier(4)

        def create(_: int) -> MachineId:
            together.wait(PATIENCE_S)
            return provider.create(order).id

        with ThreadPoolExecutor(4) as pool:
            made = set(pool.map(create, range(4)))
        assert len(made) == 1
        assert {m.id for m in provider.list_own()} == made

    def test_an_unknown_machine_is_absent(self, provider: Provider) -> None:
        assert isinstance(provider.find(MachineId("no-such-machine")), Absent)
        assert isinstance(provider.find(MachineId("../../etc")), Absent)
        assert provider.list_own() == []

    def test_a_created_machine_is_found_and_listed_and_shows_the_key_that_was_ordered(
        self, provider: Provider, ordered: Ordered, identity_key: KeyPair
    ) -> None:
        order = ordered()
        machine = provider.create(order)
        shown = (machine.label, machine.provider)
        assert shown == (order.label, provider.identity), "create() says what it rented"
        live = self._reach(provider, machine)
        assert provider.find(machine.id) == live, "find() says the same again"
        listed = [(m.id, m.label) for m in provider.list_own()]
        assert listed == [(machine.id, order.label)], "list_own() shows it with its label"
        endpoint, how = live.endpoint, provider.abilities.host_key
        if how == "stated":
            assert endpoint.host_key is not None
        if how != "installed":
            return
        key = asyncssh.import_private_key(identity_key.private)
        right, wrong = host_key_of(key, order.label).public, host_key_of(key, _label()).public

        async def login(host_key: str) -> None:
            pinned = msgspec.structs.replace(endpoint, host_key=host_key)
            connection, seen = await connect(pinned, Identity(identity_key.private))
            connection.close()
            assert seen == right

        def shows_it() -> bool:
            try:
                asyncio.run(login(right))
            except (HostKeyChanged, MachineUnreachable):
                return False  # the image's own sshd, which the start script restarts
            return True

        def refuses() -> bool:
            try:
                asyncio.run(login(wrong))
            except MachineUnreachable:
                return False  # sshd restarts
            except HostKeyChanged:
                return True
            raise AssertionError("a wrong key was accepted")

        until(shows_it, "the machine shows the key that was ordered")
        until(refuses, "a wrong key is refused")

    @pytest.mark.rule(2)
    def test_hands_off_a_machine_without_our_label(
        self, provider: Provider, unlabelled: MachineId
    ) -> None:
        live = provider.find(unlabelled)
        assert live.label is None, "a machine that somebody else rented has no label of ours"
        listed = [m.id for m in provider.list_own()]
        assert unlabelled not in listed, "list_own() shows a machine that is not ours"
        label = _label()
        with pytest.raises(NotOurs):
            never_handed_over(live, label)
        claimed = msgspec.structs.replace(live, label=label)
        with pytest.raises(NotOurs):
            provider.destroy(claimed, never_handed_over(claimed, label))
        assert provider.find(unlabelled) == live

    @pytest.mark.rule(1)
    def test_destroy_wants_a_warrant_for_this_very_machine(
        self, provider: Provider, other_provider: Provider, ordered: Ordered
    ) -> None:
        label = _label()
        machine = self._reach(provider, provider.create(ordered(label)))
        sibling = provider.create(ordered())
        relabelled = msgspec.structs.replace(machine, label=_label())
        moved = msgspec.structs.replace(machine, provider=other_provider.identity)
        wrong = [
            (machine, _warrant(sibling)),
            (machine, _warrant(relabelled)),
            (machine, _warrant(moved)),
            (relabelled, _warrant(relabelled)),
            (moved, _warrant(machine)),
        ]
        for claimed, warrant in wrong:
            with pytest.raises((NotOurs, UnsafeDestroy)):
                provider.destroy(claimed, warrant)
        with pytest.raises((NotOurs, UnsafeDestroy)):
            other_provider.destroy(machine, _warrant(machine))
        assert provider.find(machine.id) == machine, "a refused destroy() changes nothing"

    @pytest.mark.rule(1)
    def test_a_forged_warrant_destroys_nothing(self, provider: Provider, ordered: Ordered) -> None:
        class Yes(Warrant):
            def __init__(self) -> None:
                pass

            def check(self, live: Machine) -> None:
                pass

        machine = provider.create(ordered())
        with pytest.raises(UnsafeDestroy):
            Warrant(object(), machine, "because")
        with pytest.raises(UnsafeDestroy):
            provider.destroy(machine, Yes())
        with pytest.raises((UnsafeDestroy, AttributeError)):
            provider.destroy(machine, Warrant.__new__(Warrant))
        assert [m.id for m in provider.list_own()] == [machine.id]

    def test_destroyed_is_gone_and_stays_gone(self, provider: Provider, ordered: Ordered) -> None:
        label = _label()
        machine = provider.create(ordered(label))
        kept = provider.create(ordered())
        self._destroy(provider, machine)
        provider.destroy(machine, _warrant(machine))
        assert [m.id for m in provider.list_own()] == [kept.id]

        successor = provider.create(ordered(label))
        if successor.id != machine.id:
            provider.destroy(machine, _warrant(machine))
            assert {m.id for m in provider.list_own()} == {kept.id, successor.id}

    @pytest.mark.rule(5)
    def test_a_create_killed_at_any_step_is_completed_by_the_next(
        self, provider: Provider, ordered: Ordered, killed_create: KilledCreate
    ) -> None:
        for step in itertools.count(1, self.kill_stride):
            label = _label()
            was_killed = killed_create(ordered(label), step)
            assert len(provider.list_own()) <= 1, f"step {step}"
            machine = provider.create(ordered(label))
            assert [m.id for m in provider.list_own()] == [machine.id], f"step {step}"
            if not was_killed or step % self.reach_stride == 0:
                machine = self._reach(provider, machine)
            self._destroy(provider, machine)
            if not was_killed:
                return
            assert step < _MOST_STEPS

    def test_a_create_killed_at_any_step_leaves_nothing_that_cannot_be_destroyed(
        self, provider: Provider, ordered: Ordered, killed_create: KilledCreate
    ) -> None:
        for step in itertools.count(1, self.kill_stride):
            label = _label()
            was_killed = killed_create(ordered(label), step)
            for machine in provider.list_own():
                assert machine.label == label, f"step {step}"
                self._destroy(provider, machine)
            if not was_killed:
                return
            assert step < _MOST_STEPS

    def _reach(self, provider: Provider, machine: Machine) -> Machine:
        return wait_until_reachable(provider, machine.id, timeout_s=PATIENCE_S)

    def _destroy(self, provider: Provider, machine: Machine) -> None:
        for _ in range(100):
            provider.destroy(machine, _warrant(machine))
            live = provider.find(machine.id)
            gone = isinstance(live, Absent) and live.proof
            if gone and machine.label not in [left.label for left in provider.residue()]:
                return
        pytest.fail(f"{machine.id} is not gone, with all that belongs to it, after 100 calls")


class Ordered(Protocol):
    def __call__(self, label: Label | None = None, /) -> Order: ...


def _label() -> Label:
    return Label("contract", workspace_name("contract"), secrets.token_hex(8))


def _warrant(machine: Machine) -> Warrant:
    return never_handed_over(machine, machine.label)
