"""The gate of a job: its supervisor keeps it."""

from __future__ import annotations

import os

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.supervised import Machine
from tests.fixtures.waiting import until
from torpor.machine.gate.record import GateRecord


def _begins(machine: Machine) -> GateRecord:
    """A restore of the job's workspace that has one file to give."""
    (machine.home / "workspaces" / WORKSPACE).mkdir(parents=True)
    record = GateRecord(machine.home, WORKSPACE)
    record.begin(b"id", {7: os.fsencode(machine.work / "model")})
    return record


def test_a_job_starts_before_its_files_are_there(supervised: Machine) -> None:
    record = _begins(supervised)
    supervised.shell("cat model > read; ls > listed", gate=WORKSPACE)
    until(lambda: record.wanted.new() == [7], "the command waits")
    assert supervised.state().state == "running"
    (supervised.work.parent / "staged").write_text("weights")
    (supervised.work.parent / "staged").rename(supervised.work / "model")
    record.give([7])
    record.end()
    assert (supervised.ended().status, supervised.file("read")) == (0, "weights")
    until(lambda: not supervised.kept().supervisor.lives, "the supervisor leaves")


def test_a_job_whose_supervisor_is_killed_gets_an_error(supervised: Machine) -> None:
    record = _begins(supervised)
    supervised.shell("exec 3> read; cat model 2>&3", gate=WORKSPACE)
    until(lambda: record.wanted.new() == [7], "the command waits")
    supervised.supervisor_dies()
    assert "Function not implemented" in supervised.file("read")
    assert supervised.state().state == "lost"


def test_a_job_without_a_restore_has_no_gate(supervised: Machine) -> None:
    supervised.shell("grep Seccomp: /proc/self/status > filters", gate=WORKSPACE)
    with_gate = supervised.file("filters")
    supervised.ended()
    supervised.shell("grep Seccomp: /proc/self/status > other", attempt=2)
    assert supervised.file("other") == with_gate
