"""One snapshot to several machines: identical, each on its own, and nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

import tasks.machines
from flows import replicate
from flows.procedures import fleet
from flows.procedures.fleet import Fleet
from flows.procedures.rented_machine import rented_machine
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.errors import raises
from tests.fixtures.lab import DEMO, FolderMarket, Lab, make_lab
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly, plain, replicate_plainly, wake_plainly
from tests.fixtures.rentals import asked, handed_over, standing
from tests.fixtures.short_agent import installing
from tests.fixtures.trees import Tree, differences, facts, fill
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import World
from torpor.control.providers.provider import Order
from torpor.control.remote.part_tracker import Member, PartTracker
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental import renting
from torpor.control.rental.records import Rental, Rentals
from torpor.control.safety import Warrant
from torpor.control.store.manifests import find_snapshot
from torpor.shared.errors import (
    CreateFailed,
    HandedOver,
    InvalidInput,
    MachineError,
    MachineUnreachable,
    ProviderDenied,
    SnapshotDamaged,
    StoreDenied,
    StoreUnavailable,
)
from torpor.shared.values import MIB, Machine, MachineId, Want
from torpor.shared.wire.restore import Peer, RestorePlan


class Kept:
    """A workspace that is in the store only, in several packs."""

    def __init__(self, lab: Lab | World, truth: Tree) -> None:
        self.lab = lab
        self.truth = truth

    def replicate(self, **options: Any) -> Any:
        return replicate_plainly(self.lab.opened, retries=0, **options)

    def identical(self, count: int) -> None:
        """So many machines, all handed over, all with the very same workspace."""
        machines = self.lab.machines()
        assert len(machines) == count
        for machine in machines:
            assert not differences(self.truth, facts(self.lab.workspace(machine.id)))
        assert self.lab.leaks() == []

    def unfinished(self, *, restored: int, at: str = "") -> Machine:
        """A machine as a run that was killed leaves it, some parts of a restore on its disk; ``at``
        is what the provider was called then."""
        opened = self.lab.opened
        machine, _ = standing(opened, at)
        assert machine.endpoint is not None
        wanted = find_snapshot(opened.store, opened.spec.name, None)
        with opened.log_in(machine.endpoint, opened.identity) as session:
            paths = opened.spec.paths
            restore = RemoteRestore(
                session, opened.store, wanted, opened.key, "killed", paths=paths
            )
            plan = restore.begin()
            for part in plan.parts[:restored]:
                restore.restore_part(part)
            restore.end()
        return machine


def _stored(lab: Lab | World) -> Kept:
    machine = lab.rent()
    fill(lab.workspace(machine.id), random.Random(2), big=4)
    truth = facts(lab.workspace(machine.id))
    hibernate_plainly(lab.opened)
    return Kept(lab, truth)


@pytest.fixture(scope="module")
def stored() -> Iterator[Kept]:
    with make_lab() as lab:
        lab.opened = lab.wanting(parts=16, part_bytes=4 * MIB)
        yield _stored(lab)


@pytest.fixture
def kept(stored: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(fleet, "WATCH_S", 0.3)
    yield stored
    destroy_all(stored.lab.market)
    stored.lab.forget_rentals()


def test_every_machine_gets_the_same_and_the_store_is_asked_once(
    world: World, short_agent_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers reach each other by their SSH servers."""
    spec = msgspec.structs.replace(world.access.spec, parts=16, part_bytes=4 * MIB)
    world.access = msgspec.structs.replace(world.access, spec=spec)
    kept = _stored(world)
    monkeypatch.setattr(fleet, "WATCH_S", 0.3)
    world.proxy.clear()
    all_there = threading.Barrier(3, timeout=PATIENCE_S)
    join = PartTracker.join

    def joins(self: PartTracker, plan: RestorePlan, peer: Peer | None) -> Member:
        """One that is done before the others are there does not wait for them."""
        member = join(self, plan, peer)
        with suppress(threading.BrokenBarrierError):  # the report says why one is not there
            all_there.wait()
        return member

    monkeypatch.setattr(PartTracker, "join", joins)
    with installing(short_agent_source):
        report = kept.replicate(count=3, peers="always")
    assert (len(report.ready), report.failed, report.missing) == (3, [], 0)
    stored = sum(replica.store_bytes + replica.peer_bytes for replica in report.replicas) / 3
    assert sum(replica.store_bytes for replica in report.replicas) == stored
    packs = [path for _, path in world.proxy.requests if "/packs/" in path]
    assert len(packs) == len(set(packs))
    assert [row["state"] for row in report.rows()] == ["ready"] * 3
    assert "3 of 3 machines" in report.title()
    kept.identical(3)
    with raises(InvalidInput, "is on 3 machines", "Choose one in `machine`"):
        hibernate_plainly(kept.lab.opened)
    victim = report.ready[0].machine
    assert hibernate_plainly(kept.lab.opened, machine=victim).destroyed
    kept.identical(2)


def test_spares_that_are_not_needed_are_destroyed(kept: Kept) -> None:
    report = kept.replicate(count=1, spares=2, peers="never")
    assert (len(report.ready), report.replaced) == (1, 0)
    kept.identical(1)


def test_a_machine_of_the_user_s_own_gets_it_too_and_is_never_destroyed(kept: Kept) -> None:
    own, full = kept.lab.rent(), kept.lab.rent()
    kept.lab.workspace(full.id).mkdir()
    (kept.lab.workspace(full.id) / "work").write_text("mine")
    named = []
    for machine in (own, full):
        assert machine.endpoint is not None
        named.append(f"{machine.endpoint.user}@{machine.endpoint.host}:{machine.endpoint.port}")
    report = kept.replicate(count=1, machines=named)
    assert {replica.machine for replica in report.ready} > {named[0]}
    (failed,) = report.failed
    assert failed.machine == named[1]
    assert "is not empty" in failed.words
    assert (report.wanted, report.missing) == (3, 1)
    assert (kept.lab.workspace(full.id) / "work").read_text() == "mine"
    assert len(kept.lab.machines()) == 3
    assert not differences(kept.truth, facts(kept.lab.workspace(own.id)))


def test_what_cannot_be_asked_for_is_refused_before_anything_is_rented(kept: Kept) -> None:
    for options in (
        {"count": 0},
        {"count": 65},
        {"count": 64, "machines": ["me@here:22"]},
        {"count": 1, "spares": 17},
        {"count": 1, "machines": ["me@here", "me@here:22"]},
        {"count": 1, "machines": ["nowhere"]},
        {"count": 1, "peers": "sometimes"},
    ):
        with pytest.raises(InvalidInput):
            kept.replicate(**options)
    assert kept.lab.machines() == []
    assert kept.lab.leaks() == []


def test_when_no_machine_comes_up_the_flow_fails_and_none_is_left(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: RemoteRestore, *_: object, **__: object) -> None:
        raise StoreDenied("403 AccessDenied")

    monkeypatch.setattr(RemoteRestore, "restore_part", denied)
    with raises(MachineError, "none of 2 machines", StoreDenied.__name__, "run replicate again"):
        kept.replicate(count=2)
    assert kept.lab.machines() == []
    assert kept.lab.leaks() == []


def test_no_machine_is_replaced_while_one_that_failed_cannot_be_ended(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: RemoteRestore, *_: object, **__: object) -> None:
        raise StoreDenied("403 AccessDenied")

    def refused(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        raise ProviderDenied("401: the key was revoked")

    monkeypatch.setattr(RemoteRestore, "restore_part", denied)
    with (
        monkeypatch.context() as broken,
        raises(MachineError, "none of 1 machines", "could not be destroyed"),
    ):
        broken.setattr(FolderMarket, "destroy", refused)
        kept.replicate(count=1, spares=2)
    assert len(kept.lab.machines()) == 3, "those that it began with"


@pytest.mark.rule(5)
def test_a_killed_run_is_continued_and_its_surplus_machines_are_destroyed(kept: Kept) -> None:
    left = {kept.unfinished(restored=restored).id for restored in (0, 2, 1)}
    with raises(InvalidInput, "did not finish", "3 machines", "run replicate again"):
        wake_plainly(kept.lab.opened, retries=0)
    report = kept.replicate(count=1)
    assert {replica.machine for replica in report.ready} < left
    kept.identical(1)


@pytest.mark.rule(5)
def test_cancelling_destroys_what_was_not_handed_over(kept: Kept) -> None:
    look = Fleet._look_at_machines

    def interrupted(self: Fleet) -> None:
        if any(c.restore is not None for c in self._running.values()):
            raise KeyboardInterrupt
        look(self)

    with (
        patch.object(Fleet, "_look_at_machines", interrupted),
        patch.object(RemoteRestore, "restore_part", lambda *_, **__: time.sleep(1)),
        pytest.raises(KeyboardInterrupt),
    ):
        kept.replicate(count=2, spares=1)
    assert kept.lab.machines() == []
    assert kept.lab.leaks() == []


def test_a_machine_that_another_run_holds_is_left_to_it_and_not_counted(kept: Kept) -> None:
    machine = kept.unfinished(restored=1)
    assert machine.endpoint is not None
    opened = kept.lab.opened
    wanted = find_snapshot(opened.store, opened.spec.name, None)
    with opened.log_in(machine.endpoint, opened.identity) as session:
        paths = opened.spec.paths
        other = RemoteRestore(session, opened.store, wanted, opened.key, "another", paths=paths)
        other.begin(resume=True)
        report = kept.replicate(count=1)
        other.end()
    assert (len(report.ready), report.replaced) == (1, 1)
    assert "works on workspace" in report.failed[0].words
    assert {machine.id for machine in kept.lab.machines()} == {machine.id, report.ready[0].machine}


def test_a_run_killed_before_the_host_was_renamed_is_continued(kept: Kept) -> None:
    machine = kept.unfinished(restored=1, at="local://before/machines")
    wake_plainly(kept.lab.opened, retries=0)
    assert [machine.id for machine in kept.lab.machines()] == [machine.id]
    kept.identical(1)


def test_a_machine_that_another_run_hands_over_first_is_not_reported_as_ones_own(
    kept: Kept,
) -> None:
    machine = kept.unfinished(restored=1)
    opened = kept.lab.opened
    (rental,) = opened.rentals.open()
    theirs = [rental]

    def before(step: str) -> None:
        if step == "hand over machine" and theirs:
            opened.rentals.change(theirs.pop(), state="handed over", machine=machine.id)

    with PlainRunner(opened, before=before, wait_factor=0.001):
        report = replicate.fn(DEMO, count=1)
    (ready,) = report.ready
    assert ready.machine != machine.id
    kept.identical(2)


def test_a_machine_that_is_gone_before_its_session_is_open_is_not_tried_again(
    kept: Kept,
) -> None:
    opened, tried = kept.lab.opened, []

    def before(step: str) -> None:
        if step == "open session":
            tried.append(step)
            kept.lab.lose_machines()

    with (
        PlainRunner(opened, before=before, wait_factor=0.001),
        raises(MachineError, "none of 1 machines came up", "cannot be reached any more"),
    ):
        replicate.fn(DEMO, count=1)
    assert len(tried) == 1


@pytest.mark.rule(5)
def test_a_machine_that_another_run_handed_over_is_left_alone(kept: Kept) -> None:
    opened = kept.lab.opened
    machine, rental = standing(opened)
    with plain(opened), _held(opened, rental):
        opened.rentals.change(rental, state="handed over")
    assert [machine.id for machine in kept.lab.machines()] == [machine.id]


@pytest.mark.rule(5)
def test_one_that_is_handed_over_while_it_is_about_to_be_destroyed_is_left_alone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider may answer minutes after the records were read: they are read right before."""
    opened = kept.lab.opened
    left, rental = standing(opened)
    destroy = FolderMarket.destroy

    def slow(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        opened.rentals.change(rental, state="handed over")
        destroy(self, machine, warrant)

    with monkeypatch.context() as late:
        late.setattr(FolderMarket, "destroy", slow)
        with plain(opened), _held(opened, rental):
            pass
    assert [machine.id for machine in kept.lab.machines()] == [left.id]


@pytest.mark.rule(5)
def test_a_machine_that_another_run_handed_over_while_it_was_waited_for_is_not_ended(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next offer is another rental, so it cannot be the machine of that run's user."""
    opened, waits, reach = kept.lab.opened, list[str](), renting.wait_until_reachable

    def too_late_once(provider: FolderMarket, machine: MachineId, **options: Any) -> Machine:
        waits.append(machine)
        if len(waits) == 1:
            (rental,) = opened.rentals.open()
            opened.rentals.change(rental, state="handed over")
            raise MachineUnreachable("it never answered here")
        return reach(provider, machine, **options)

    monkeypatch.setattr(renting, "wait_until_reachable", too_late_once)
    (offer,) = opened.providers[0].offers(Want())
    offers = [offer, msgspec.structs.replace(offer, id="another")]
    monkeypatch.setattr(FolderMarket, "offers", lambda *_: offers)
    report = kept.replicate(count=1)
    assert len(report.ready) == 1
    assert {machine.id for machine in kept.lab.machines()} == {waits[0], report.ready[0].machine}


@pytest.mark.rule(5)
def test_a_failed_run_leaves_a_machine_while_the_records_cannot_be_read(kept: Kept) -> None:
    opened = kept.lab.opened
    _, rental = standing(opened)
    away = patch.object(Rentals, "of", side_effect=StoreUnavailable("the store is away"))
    with (
        plain(opened),
        pytest.raises(StoreUnavailable, match="torpor left it alone; reconcile lists it"),
        _held(opened, rental),
    ):
        away.start()
    away.stop()
    assert len(kept.lab.machines()) == 1
    with plain(opened), _held(opened, rental):
        pass
    assert kept.lab.machines() == []


@pytest.mark.rule(5)
def test_a_machine_that_this_run_held_and_lost_to_another_one_is_left_alone(kept: Kept) -> None:
    """It lost its connection; meanwhile another run continued with it and handed it over."""
    opened = kept.lab.opened
    with plain(opened), pytest.raises(SnapshotDamaged), rented_machine(opened) as tenancy:
        tenancy.holds_nothing_else()
        assert tenancy.rental is not None
        opened.rentals.change(tenancy.rental, state="handed over")
        raise SnapshotDamaged("the other one restored another snapshot")
    assert [machine.id for machine in kept.lab.machines()] == [tenancy.machine.id]


@pytest.mark.rule(5)
def test_two_wakes_at_once_hand_over_one_machine(kept: Kept) -> None:
    """The second began before the first one's machine was listed."""
    opened = kept.lab.opened
    with (
        plain(opened),
        pytest.raises(HandedOver, match="use that one"),
        rented_machine(opened) as second,
    ):
        theirs, _ = handed_over(opened)
        rental = opened.rentals.of(theirs.label)  # type: ignore[arg-type]
        assert rental is not None
        opened.rentals.seen(rental)
        second.hand_over(alone=True)
    assert [machine.id for machine in kept.lab.machines()] == [theirs.id]


def test_a_request_without_a_machine_is_no_reason_to_stop_at_the_first_offer(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was killed before it created one; what was on sale then is not on sale any more."""
    opened = kept.lab.opened
    request = asked(opened)
    create = FolderMarket.create

    def sold_out(self: FolderMarket, order: Order) -> Machine:
        if order.offer.id == "sold":
            raise CreateFailed("sold out")
        return create(self, order)

    monkeypatch.setattr(FolderMarket, "create", sold_out)
    offer = opened.providers[0].offers(Want())[0]
    monkeypatch.setattr(
        FolderMarket, "offers", lambda *_: [msgspec.structs.replace(offer, id="sold"), offer]
    )
    wake_plainly(opened, retries=0)
    kept.identical(1)
    opened.rentals.change(request, created_unix=0.0)
    with plain(opened):
        assert tasks.machines.renting(opened).end_abandoned()
    assert [rental.state for rental in opened.rentals.open()] == ["handed over"]


@contextmanager
def _held(opened: OpenWorkspace, rental: Rental) -> Iterator[None]:
    """A run that may end the machine of this rental, and does at its end."""
    with tasks.machines.renting(opened) as held:
        held.claim(rental)
        yield


def test_machines_restore_at_the_same_time_each_from_the_store(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.benchmarks.replicate links` measures eight machines' time over one's."""
    both_restore = threading.Barrier(2, timeout=PATIENCE_S)
    restore_part = RemoteRestore.restore_part
    begun: list[RemoteRestore] = []
    lock = threading.Lock()

    def together(self: RemoteRestore, *arguments: Any, **options: Any) -> Any:
        with lock:
            is_first = all(restore is not self for restore in begun)
            begun.append(self)
        if is_first:
            both_restore.wait()  # breaks, and fails the run, where one waits for the other's end
        return restore_part(self, *arguments, **options)

    monkeypatch.setattr(RemoteRestore, "restore_part", together)
    report = kept.replicate(count=2, peers="never")
    assert len(report.ready) == 2
    first, second = report.replicas
    assert first.store_bytes == second.store_bytes > 0
    assert first.peer_bytes == second.peer_bytes == 0
    kept.identical(2)
