"""The gate of a job: its supervisor keeps it."""

from __future__ import annotations

import os

import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.supervised import Machine
from tests.fixtures.waiting import background, until
from torpor.machine.gate.record import GateRecord
from torpor.shared.errors import MachineError


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


def test_a_log_that_is_still_restored_is_waited_for_and_never_made_anew(
    supervised: Machine,
) -> None:
    (supervised.home / "workspaces" / WORKSPACE).mkdir(parents=True)
    record = GateRecord(supervised.home, WORKSPACE)
    supervised.log.parent.mkdir()
    record.begin(b"id", {7: os.fsencode(supervised.log)})
    with background(lambda: supervised.shell("echo later", gate=WORKSPACE)) as started:
        until(lambda: record.wanted.new() == [7], "it is asked for")
        assert not supervised.log.exists() and supervised.state().state == "none"
        (supervised.work / "staged").write_text("before\n")
        (supervised.work / "staged").rename(supervised.log)
        record.give([7])
        assert started().attempt == 1
    supervised.ended()
    assert supervised.log.read_text().startswith("before\n")
    supervised.log.unlink()
    record.begin(b"id", {7: os.fsencode(supervised.log)})
    record.end()
    with pytest.raises(MachineError, match="start the command when all is restored"):
        supervised.shell("echo never", attempt=2, gate=WORKSPACE)
    assert not supervised.log.exists()


def test_a_command_that_is_started_after_its_restore_has_failed_gets_errors(
    supervised: Machine,
) -> None:
    """It must not take the workspace for one without these files."""
    record = _begins(supervised)
    record.end()
    supervised.shell("exec 3> read; cat model 2>&3; ls 2>&3", gate=WORKSPACE)
    supervised.ended()
    assert supervised.file("read").count("Input/output error") == 2
