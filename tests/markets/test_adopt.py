"""A machine that its user rents at a market is adopted, and hibernated with proof."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import asyncssh
import msgspec
import pytest

from deployments.market import abilities_of
from flows import adopt, create, hibernate, reconcile, wake
from tasks import adoption
from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import new_key_pair
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly
from tests.fixtures.trees import differences, kept, let_settle
from tests.fixtures.waiting import until
from tests.markets.every import FAKES, Markets, block_of
from torpor.control.jobs.records import Job
from torpor.control.providers.offers import misfit
from torpor.control.remote.ssh import Identity
from torpor.control.rental.adoption import AdoptReport, provider_of
from torpor.control.rental.greeting import greeting_fault
from torpor.control.rental.order import host_key_of, order_for
from torpor.machine.supervisor.folder import AutosaveFolder
from torpor.shared.errors import (
    HostKeyChanged,
    InvalidInput,
    MachineDenied,
    MachineInUse,
    NoCapacity,
    NotOurs,
    UnsafeDestroy,
    UnsavedWork,
    WorkspaceAwake,
    WorkspaceInvalid,
)
from torpor.shared.values import Label, Machine, MachineId, SnapshotId, WorkspaceName

NAMES = tuple(name for name in FAKES if abilities_of(block_of(name)).adopts)
STATED = ("vast", "runpod", "lambda", "verda")
"""The markets that say what a machine costs."""
STRANGER = Label("another-user", WorkspaceName("theirs"), "0123456789abcdef")


class Mine:
    """A machine at one market that its user has rented, and that lets the workspace's key in."""

    def __init__(self, name: str, markets: Markets, opened: OpenWorkspace) -> None:
        self.provider: Any = markets.provider(name)
        self.opened = replace(opened, providers=(self.provider,))
        self.name, self.markets = name, markets
        self.market = f"{self.provider.identity.partition(':')[0]}"
        label = opened.rentals.new_label("nobody")
        self.host_key = host_key_of(opened.identity.load(), label).public
        markets.fakes[name].may_adopt()
        self.id = self._rent(label)
        (self.rented,) = markets.fakes[name].market.alive()
        markets.fakes[name].disown(self.rented)
        self.provider.mark(msgspec.structs.replace(self.find(), label=label), None)
        until(lambda: self._greets(), "its SSH server shows the key of its first start")
        self.workspace = markets.workspace(name)

    def find(self) -> Machine:
        found = self.provider.find(self.id)
        assert isinstance(found, Machine)
        return found

    def _rent(self, label: Label) -> MachineId:
        want, key = self.opened.spec.want, self.opened.identity.load()
        for offer in self.provider.offers(want):
            if not misfit(offer, want):
                with suppress(NoCapacity):
                    made: Machine = self.provider.create(order_for(offer, label, key, want))
                    return made.id
        raise AssertionError(f"{self.name} has no room")

    def _greets(self) -> bool:
        live = self.provider.find(self.id)
        key = self.opened.identity.load()
        return (
            live.endpoint is not None and greeting_fault(live.endpoint, self.host_key, key) is None
        )

    def plant(self) -> None:
        self.workspace.mkdir()
        (self.workspace / "weights.bin").write_bytes(bytes(range(256)) * 4096)
        outside = self.workspace.parent / "elsewhere"
        outside.mkdir()
        (outside / "data.bin").write_bytes(b"not in the workspace" * 100_000)
        let_settle()

    def adopt(self, **options: Any) -> AdoptReport:
        options = {"dry_run": False, "price_usd_h": 0.0 if self.name in STATED else 2.5} | options
        return run_plainly(self.opened, adopt, f"{self.market}:{self.id}", **options)


@pytest.fixture
def mine(markets: Markets, rented_workspace: OpenWorkspace) -> Mine:
    made = Mine("vast", markets, rented_workspace)
    made.plant()
    return made


@pytest.mark.rule(2)
@pytest.mark.parametrize("name", NAMES)
def test_at_each_market_it_is_adopted_and_hibernated_with_proof(
    name: str, markets: Markets, rented_workspace: OpenWorkspace
) -> None:
    mine = Mine(name, markets, rented_workspace)
    mine.plant()
    truth = kept(mine.workspace)
    looked = mine.adopt(dry_run=True)
    assert looked.state == "can be adopted"
    assert mine.find().label is None
    assert mine.opened.rentals.open() == []
    assert looked.bytes >= 1 << 20
    assert any("/root/elsewhere" in line for line in looked.outside), looked.outside
    assert any("DESTROY" in row["value"] for row in looked.rows())

    report = mine.adopt(host_key=looked.host_key)
    assert (report.state, report.host_key) == ("adopted", mine.host_key)
    (rental,) = mine.opened.rentals.open()
    assert (rental.state, rental.adopted, rental.machine) == ("handed over", True, mine.id)
    assert rental.price_usd_h == pytest.approx(mine.rented.usd_h if name in STATED else 2.5)
    assert rental.host_key == mine.host_key
    later = replace(mine.opened, providers=(markets.provider(name),))  # knows only the records
    (found,) = run_plainly(later, reconcile).findings
    assert (found.kind, found.machine and found.machine.id) == ("in use", mine.id)
    assert found.price_usd_h > 0
    with pytest.raises(WorkspaceAwake):
        run_plainly(later, create)
    with pytest.raises(UnsafeDestroy):
        run_plainly(later, reconcile, abandoned=True, end=[mine.id])
    run_plainly(later, reconcile, abandoned=True)
    assert markets.alive() == [name]

    with pytest.raises(UnsavedWork, match=r"you wrote beside the workspace .*/root/elsewhere"):
        hibernate_plainly(later)
    stored = hibernate_plainly(later, accept_lost=["~/*"])
    assert stored.destroyed
    assert any("/root/elsewhere" in line for line in stored.lost)
    assert markets.alive() == []
    ended = mine.opened.rentals.ended(rental.label.rental)
    assert ended is not None
    assert ended.snapshot == stored.snapshot
    with plain(later, wait_factor=1.0):
        wake.fn(rented_workspace.spec.name)
    assert not differences(truth, kept(markets.workspace(name)))
    with plain(later):
        hibernate.fn(rented_workspace.spec.name)


def test_given_up_it_runs_on_and_is_nobody_s(mine: Mine) -> None:
    mine.adopt()
    assert run_plainly(mine.opened, adopt, release=True).state == "can be given up"
    others = run_plainly(mine.opened, adopt, "vast:999", release=True, dry_run=False)
    assert others.state == "not adopted"
    (rental,) = mine.opened.rentals.open()
    mine.opened.rentals.change(rental, snapshot=SnapshotId("s-1"))  # of an end that came to nothing
    report = run_plainly(mine.opened, adopt, release=True, dry_run=False)
    assert (report.state, report.machine) == ("given up", mine.id)
    ended = mine.opened.rentals.ended(rental.label.rental)
    assert ended is not None and ended.snapshot is None  # its user goes on working there
    assert mine.find().label is None
    assert mine.opened.rentals.open() == []
    assert run_plainly(mine.opened, reconcile).findings == []
    assert mine.markets.alive() == ["vast"]
    assert run_plainly(mine.opened, adopt, release=True, dry_run=False).state == "not adopted"
    mine.adopt()
    assert hibernate_plainly(mine.opened, accept_lost=["~/*"]).destroyed


def test_given_up_it_saves_the_workspace_no_more(mine: Mine) -> None:
    """It has the workspace's key and grants for an hour."""
    mine.opened = replace(
        mine.opened, spec=msgspec.structs.replace(mine.opened.spec, save_minutes=5)
    )
    mine.adopt()
    folder = AutosaveFolder(mine.workspace.parent / ".torpor", mine.opened.spec.name)
    assert folder.take() is None  # its process lives
    run_plainly(mine.opened, adopt, release=True, dry_run=False)
    assert folder.take() is not None


def test_a_machine_on_which_a_job_runs_is_not_given_up(mine: Mine) -> None:
    """Its driver would hand the machine the workspace's key and grants again."""
    mine.adopt()
    name = mine.opened.spec.name
    record = Job(id="3f2a9c81d04e", workspace=name, block=name, command=["true"], created_unix=1.0)
    job = mine.opened.jobs.take(record, "a run")
    with pytest.raises(MachineInUse, match=f"job {job.id} .* `torpor job cancel {job.id}`"):
        run_plainly(mine.opened, adopt, release=True, dry_run=False)
    assert mine.opened.rentals.open()
    mine.opened.jobs.end(job)
    report = run_plainly(mine.opened, adopt, release=True, dry_run=False)
    assert report.state == "given up"


@pytest.mark.rule(2)
@pytest.mark.parametrize("step", ["record_adoption", "mark_adopted", "after the mark"])
def test_a_kill_between_two_steps_is_completed_by_the_next_adopt(
    step: str, mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    flow = sys.modules["flows.adopt"]  # the package's name of it is the flow
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "after the mark":
            patch.setattr(flow, "AdoptReport", killed)
        else:
            patch.setattr(flow, step, killed)
        mine.adopt()
    recorded = mine.opened.rentals.open()
    assert len(recorded) == (0 if step == "record_adoption" else 1)
    if recorded:  # nobody rents a second machine beside it
        run_plainly(mine.opened, reconcile, abandoned=True)
        with pytest.raises(WorkspaceAwake):
            run_plainly(mine.opened, create)
    mine.adopt()
    (rental,) = mine.opened.rentals.open()
    assert mine.find().label == rental.label
    assert [rental] == (recorded or [rental])
    assert mine.markets.alive() == ["vast"]
    assert hibernate_plainly(mine.opened, accept_lost=["~/*"]).destroyed


@pytest.mark.rule(2)
def test_what_is_not_the_user_s_to_give_is_refused(mine: Mine) -> None:
    with pytest.raises(NotOurs, match="is not in this account"):
        run_plainly(mine.opened, adopt, "vast:987654", dry_run=False)
    mine.rented.stopped = True
    with pytest.raises(UnsafeDestroy, match="start it first"):
        mine.adopt()
    mine.rented.stopped = False

    mine.provider.mark(mine.find(), STRANGER)
    with pytest.raises(NotOurs, match=r"workspace theirs and owner another-user"):
        mine.adopt()
    mine.provider.mark(mine.find(), None)

    spec = msgspec.structs.replace(mine.opened.spec, name=WorkspaceName("beside"))
    beside = replace(mine.opened, spec=spec)
    mine.adopt()
    with pytest.raises(NotOurs, match="of workspace demo"):
        run_plainly(beside, adopt, f"vast:{mine.id}", dry_run=False)
    mine.provider.mark(mine.find(), None)  # the record alone says so
    with pytest.raises(NotOurs, match="of workspace demo already"):
        run_plainly(beside, adopt, f"vast:{mine.id}", dry_run=False)
    assert beside.rentals.open() == []
    assert mine.markets.alive() == ["vast"]


def test_a_workspace_that_is_awake_elsewhere_is_refused(
    mine: Mine, rented_workspace: OpenWorkspace
) -> None:
    with plain(replace(mine.opened, providers=(mine.markets.provider("lambda"),)), wait_factor=1.0):
        create.fn(rented_workspace.spec.name)
    with pytest.raises(WorkspaceAwake, match="already, so"):
        mine.adopt()
    assert mine.find().label is None


@pytest.mark.rule(2)
def test_another_host_key_is_refused_before_and_after(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_host_key()
    with pytest.raises(HostKeyChanged):
        mine.adopt(host_key=other)
    assert mine.opened.rentals.open() == []
    with pytest.raises(InvalidInput, match="no OpenSSH public key"):
        mine.adopt(host_key="SHA256:abc")
    mine.adopt(host_key=f"{mine.host_key} root@box")
    (rental,) = mine.opened.rentals.open()
    mine.opened.rentals.change(rental, host_key=other)  # as if the machine had another one now
    with pytest.raises(HostKeyChanged):
        hibernate_plainly(mine.opened, retries=0)
    with pytest.raises(HostKeyChanged):
        mine.adopt()
    with pytest.raises(HostKeyChanged, match="and you expect"):
        mine.adopt(host_key=mine.host_key)
    assert mine.markets.alive() == ["vast"]


def test_nothing_is_recorded_where_the_workspace_is_not_there(mine: Mine) -> None:
    for path, says in (("~/nosuch", "does not exist"), ("~/empty", "is empty")):
        (mine.workspace.parent / "empty").mkdir(exist_ok=True)
        spec = msgspec.structs.replace(mine.opened.spec, paths=["~/workspace", path])
        with pytest.raises(WorkspaceInvalid, match=says):
            run_plainly(replace(mine.opened, spec=spec), adopt, f"vast:{mine.id}", dry_run=False)
    assert mine.opened.rentals.open() == []
    assert mine.find().label is None


def test_a_machine_that_does_not_let_torpor_in_is_not_adopted(mine: Mine) -> None:
    stranger = Identity(new_key_pair().private)
    with pytest.raises(MachineDenied, match="authorized_keys") as told:
        run_plainly(
            replace(mine.opened, identity=stranger), adopt, f"vast:{mine.id}", dry_run=False
        )
    assert stranger.public_key() in str(told.value)
    assert mine.opened.rentals.open() == []


def test_a_market_that_states_no_price_wants_one(
    markets: Markets, rented_workspace: OpenWorkspace
) -> None:
    mine = Mine("hostkey", markets, rented_workspace)
    with pytest.raises(InvalidInput, match="--price"):
        mine.adopt(price_usd_h=0.0)


@pytest.mark.parametrize("name", sorted(FAKES.keys() - set(NAMES)))
def test_a_market_whose_machines_are_not_adopted_says_why(name: str, markets: Markets) -> None:
    provider = markets.provider(name)
    market = provider.identity.partition(":")[0]
    why = f"no machine of {provider.identity} can be adopted: {provider.abilities.not_adopted}"
    with pytest.raises(InvalidInput, match=re.escape(why)):
        provider_of(f"{market}:1", [], [provider], [provider])


def new_host_key() -> str:
    key = asyncssh.generate_private_key("ssh-ed25519")
    return " ".join(key.export_public_key().decode().split()[:2])


def test_a_key_has_a_fingerprint_as_ssh_shows_it() -> None:
    assert adoption.fingerprint(new_host_key()).startswith("SHA256:")
