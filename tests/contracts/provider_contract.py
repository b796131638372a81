"""What every provider must do. Subclass it in ``tests/control/providers`` with the fixtures."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import msgspec
import pytest

from torpor.control.providers.seam import Provider
from torpor.control.providers.waiting import wait_until_reachable
from torpor.control.safety import Warrant, never_handed_over
from torpor.shared.errors import NotOurs, UnsafeDestroy
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name

KilledCreate = Callable[[Label, int], bool]
"""Begin a create in another process and kill -9 it at its n-th step; False when it got through."""

_MOST_STEPS = 400


class ProviderContract:
    """Fixtures to give: ``provider`` (fresh, and cleaned up after), ``other_provider`` (of the same
    kind, another account), ``ssh_public_key``, ``want``, ``unlabelled`` (the id of a machine at
    ``provider`` that we do not own) and ``killed_create``."""

    timeout_s = 30.0
    kill_stride = 1  # how many steps lie between the kills
    reach_stride = 1  # how many kills lie between two whose machine is waited for until it answers

    def test_offers_fit_and_the_cheapest_comes_first(self, provider: Provider, want: Want) -> None:
        offers = provider.offers(want)
        assert offers
        assert [o.price_usd_h for o in offers] == sorted(o.price_usd_h for o in offers)
        assert all(o.disk_gib >= want.disk_gib for o in offers)
        assert all(o.provider == provider.identity for o in offers)
        assert len({o.id for o in offers}) == len(offers)

    def test_nothing_on_sale_is_an_empty_list(self, provider: Provider, want: Want) -> None:
        replace = msgspec.structs.replace
        assert provider.offers(replace(want, gpu="NoSuchGpu9000")) == []
        assert provider.offers(replace(want, disk_gib=1e12)) == []
        assert provider.offers(replace(want, max_price_usd_h=-1.0)) == []

    def test_a_created_machine_is_reached_found_and_listed(
        self, provider: Provider, want: Want, ssh_public_key: str
    ) -> None:
        label = _label()
        machine = self._create(provider, want, label, ssh_public_key)
        assert machine.label == label
        assert machine.provider == provider.identity
        live = self._reach(provider, machine)
        assert live.endpoint is not None
        assert provider.find(machine.id) == live
        assert [m.id for m in provider.list_own()] == [machine.id]
        assert provider.list_own()[0].label == label

    def test_the_same_label_is_the_same_machine(
        self, provider: Provider, want: Want, ssh_public_key: str
    ) -> None:
        label = _label()
        first = self._create(provider, want, label, ssh_public_key)
        again = self._create(provider, want, label, ssh_public_key)
        other = self._create(provider, want, _label(), ssh_public_key)
        assert again.id == first.id != other.id
        assert {m.id for m in provider.list_own()} == {first.id, other.id}

    def test_creates_at_once_with_one_label_make_one_machine(
        self, provider: Provider, want: Want, ssh_public_key: str
    ) -> None:
        label, together = _label(), Barrier(4)

        def create(_: int) -> MachineId:
            together.wait(self.timeout_s)
            return self._create(provider, want, label, ssh_public_key).id

        with ThreadPoolExecutor(4) as pool:
            made = set(pool.map(create, range(4)))
        assert len(made) == 1
        assert {m.id for m in provider.list_own()} == made

    def test_an_unknown_machine_is_none(self, provider: Provider) -> None:
        assert provider.find(MachineId("no-such-machine")) is None
        assert provider.find(MachineId("../../etc")) is None
        assert provider.list_own() == []

    def test_hands_off_a_machine_without_our_label(
        self, provider: Provider, unlabelled: MachineId
    ) -> None:
        live = provider.find(unlabelled)
        assert live is not None
        assert live.label is None
        assert unlabelled not in [m.id for m in provider.list_own()]
        label = _label()
        with pytest.raises(NotOurs):
            never_handed_over(live, label)
        claimed = msgspec.structs.replace(live, label=label)
        with pytest.raises(NotOurs):
            provider.destroy(claimed, never_handed_over(claimed, label))
        assert provider.find(unlabelled) == live

    def test_destroy_wants_a_warrant_for_this_very_machine(
        self,
        provider: Provider,
        other_provider: Provider,
        want: Want,
        ssh_public_key: str,
    ) -> None:
        label = _label()
        machine = self._reach(provider, self._create(provider, want, label, ssh_public_key))
        sibling = self._create(provider, want, _label(), ssh_public_key)
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
        assert provider.find(machine.id) == machine

    def test_a_forged_warrant_destroys_nothing(
        self, provider: Provider, want: Want, ssh_public_key: str
    ) -> None:
        class Yes(Warrant):
            def __init__(self) -> None:
                pass

            def check(self, live: Machine) -> None:
                pass

        machine = self._reach(provider, self._create(provider, want, _label(), ssh_public_key))
        with pytest.raises(UnsafeDestroy):
            Warrant(object(), machine, "because")
        with pytest.raises(UnsafeDestroy):
            provider.destroy(machine, Yes())
        with pytest.raises((UnsafeDestroy, AttributeError)):
            provider.destroy(machine, Warrant.__new__(Warrant))
        assert provider.find(machine.id) == machine

    def test_destroyed_is_gone_and_stays_gone(
        self, provider: Provider, want: Want, ssh_public_key: str
    ) -> None:
        label = _label()
        machine = self._create(provider, want, label, ssh_public_key)
        kept = self._reach(provider, self._create(provider, want, _label(), ssh_public_key))
        self._destroy(provider, machine)
        provider.destroy(machine, _warrant(machine))
        assert provider.list_own() == [kept]

        successor = self._reach(provider, self._create(provider, want, label, ssh_public_key))
        if successor.id != machine.id:
            provider.destroy(machine, _warrant(machine))
            assert provider.find(successor.id) == successor

    def test_a_create_killed_at_any_step_is_completed_by_the_next(
        self, provider: Provider, want: Want, ssh_public_key: str, killed_create: KilledCreate
    ) -> None:
        for step in itertools.count(1, self.kill_stride):
            label = _label()
            was_killed = killed_create(label, step)
            assert len(provider.list_own()) <= 1, f"step {step}"
            machine = self._create(provider, want, label, ssh_public_key)
            assert [m.id for m in provider.list_own()] == [machine.id], f"step {step}"
            if not was_killed or step % self.reach_stride == 0:
                machine = self._reach(provider, machine)
            self._destroy(provider, machine)
            if not was_killed:
                return
            assert step < _MOST_STEPS

    def test_a_create_killed_at_any_step_leaves_nothing_that_cannot_be_destroyed(
        self, provider: Provider, killed_create: KilledCreate
    ) -> None:
        for step in itertools.count(1, self.kill_stride):
            label = _label()
            was_killed = killed_create(label, step)
            for machine in provider.list_own():
                assert machine.label == label, f"step {step}"
                self._destroy(provider, machine)
            if not was_killed:
                return
            assert step < _MOST_STEPS

    def _create(self, provider: Provider, want: Want, label: Label, ssh_public_key: str) -> Machine:
        return provider.create(provider.offers(want)[0], label, ssh_public_key)

    def _reach(self, provider: Provider, machine: Machine) -> Machine:
        return wait_until_reachable(provider, machine.id, timeout_s=self.timeout_s)

    def _destroy(self, provider: Provider, machine: Machine) -> None:
        for _ in range(100):
            provider.destroy(machine, _warrant(machine))
            live = provider.find(machine.id)
            if live is None or live.state == "gone":
                return
        pytest.fail(f"{machine.id} is not gone after 100 calls")


def _label() -> Label:
    return Label("contract", workspace_name("contract"), secrets.token_hex(8))


def _warrant(machine: Machine) -> Warrant:
    assert machine.label is not None
    return never_handed_over(machine, machine.label)
