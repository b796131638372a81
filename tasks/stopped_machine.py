"""The steps for a job's machine that its provider has stopped (not destroyed)."""

from __future__ import annotations

from collections.abc import Callable

from tasks.machines import renter
from tasks.retries import ONCE
from tasks.standing_by import job_line
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.records import Job
from torpor.control.providers.provider import Restarts
from torpor.control.rental.ending import end_machine
from torpor.control.rental.records import Rental
from torpor.control.safety import beyond_reach
from torpor.control.upkeep.lineage import sure_save
from torpor.shared.values import Machine, StoredSnapshot


@step("start machine", run_name="start {machine.id}", retries=ONCE)
def start_machine(opened: OpenWorkspace, machine: Machine) -> bool:
    """Ask the provider to start the machine; False if it cannot. Raises the provider's error."""
    provider = opened.markets.of(machine.provider)
    if not isinstance(provider, Restarts):
        return False
    provider.start(machine)
    return True


@step("find sure save")
def find_sure_save(opened: OpenWorkspace, job: Job) -> StoredSnapshot | None:
    """The save for which a job's stopped machine may be ended: its newest, or one after that. None
    if the workspace has none. Raises the error of the newest save if it is not usable."""
    spec = opened.spec
    return sure_save(opened.store, spec.name, opened.seal, job_line(job), spec.restorable)


@step("end stopped machine", run_name="end {machine.id}", retries=ONCE)
def end_stopped(
    opened: OpenWorkspace,
    machine: Machine,
    rental: Rental,
    save: StoredSnapshot,
    unused: Callable[[], None],
) -> None:
    """End a machine that does not start again; what was written there after ``save`` is lost.
    ``unused`` raises if somebody else works there."""
    warrant = beyond_reach(opened.store, save, opened.seal, machine, unused)
    end_machine(renter(opened), rental, warrant, machine)
