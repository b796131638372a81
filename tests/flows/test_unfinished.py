"""What a killed wake of a job left is ended with the job; what others rented stays."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from flows import job, wake, watch
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.rentals import not_handed_over, standing
from torpor.control.jobs.records import Job, Jobs, Stop
from torpor.shared.errors import RunCancelled
from torpor.shared.values import MachineId

_ID = "3f2a9c81d04e"


def _cancelled(lab: Lab) -> Job:
    """A job that was cancelled while its run was killed in a wake."""
    jobs = Jobs(lab.store, WORKSPACE)
    made = Job(id=_ID, workspace=WORKSPACE, block=WORKSPACE, command=["true"], created_unix=1.0)
    jobs.leave(jobs.take(made, "killed"))
    jobs.ask_stop(_ID, Stop("cancelled", "hibernate", "enough", 2.0))
    with PlainRunner(lab.opened, wait_factor=0.1):
        return job.fn(WORKSPACE, [], job=_ID).job


@pytest.mark.rule(16)
@pytest.mark.parametrize("of", [_ID, "", "0" * 12], ids=["this job", "a user", "another job"])
def test_a_stopped_job_ends_the_unfinished_machine_of_its_own_wake_only(
    stored: Lab, of: str
) -> None:
    machine, rental = standing(stored.opened)
    stored.opened.rentals.change(rental, job=of)
    assert _cancelled(stored).state == "cancelled"
    assert [machine.id for machine in stored.machines()] == ([] if of == _ID else [machine.id])
    assert len(stored.snapshots()) == 1


@pytest.mark.rule(16)
def test_a_whole_restore_is_hibernated_and_not_just_ended(stored: Lab) -> None:
    """The wake was killed right before it handed its machine over."""
    wake_plainly(replace(stored.opened, job=_ID))
    (rental,) = stored.opened.rentals.open()
    assert rental.job == _ID
    not_handed_over(stored.opened, rental)
    ended = _cancelled(stored)
    assert ended.state == "cancelled"
    assert stored.machines() == []
    assert ended.final == stored.snapshots()[0].snapshot
    assert len(stored.snapshots()) == 2


def test_a_job_whose_command_never_began_wakes_what_others_have_saved_since(
    needs_server: None, stored: Lab
) -> None:
    """Its machine was used by a job that came first, which hibernated it."""
    (before,) = stored.snapshots()
    (stored.workspace(MachineId(wake_plainly(stored.opened).machine)) / "theirs").touch()
    hibernate_plainly(stored.opened)
    jobs = Jobs(stored.store, WORKSPACE)
    begun = Job(
        id=_ID,
        workspace=WORKSPACE,
        block=WORKSPACE,
        command=["ls", "theirs"],
        created_unix=1.0,
        newest=before.snapshot,
        rented=MachineId("m-0123456789ab-01234567"),
    )
    jobs.leave(jobs.take(begun, "killed"))
    with PlainRunner(stored.opened, wait_factor=0.1):
        assert job.fn(WORKSPACE, [], job=_ID).job.state == "succeeded"


def test_watch_names_a_machine_whose_wake_ended_before_it_started_the_programs(
    needs_server: None, stored: Lab
) -> None:
    opened = replace(
        stored.opened, spec=msgspec.structs.replace(stored.opened.spec, programs=["true"])
    )

    def strike(step: str) -> None:
        if step == "start programs":
            raise RunCancelled("killed")

    with pytest.raises(RunCancelled), PlainRunner(opened, before=strike):
        wake.fn(WORKSPACE)
    with PlainRunner(opened):
        (row,) = watch.fn([WORKSPACE]).rows()
    assert "its programs were not started" in row["reason"]
    hibernate_plainly(opened)
    wake_plainly(opened)
    (rental,) = opened.rentals.open()
    assert not rental.starting


@pytest.mark.rule(16)
def test_a_machine_that_another_run_took_up_is_not_the_jobs_any_more(stored: Lab) -> None:
    _, rental = standing(stored.opened)
    stored.opened.rentals.change(rental, job=_ID)
    woken = wake_plainly(stored.opened)
    (now,) = stored.opened.rentals.open()
    assert (now.machine, now.job) == (woken.machine, "")
    assert _cancelled(stored).state == "cancelled"
    assert len(stored.machines()) == 1
