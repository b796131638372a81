"""A short campaign of rentals; the long one is ``make rentals``."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from tests.campaign.command import Command
from tests.jobs.campaign import COMMAND as JOBS
from tests.markets.campaign import COMMAND


@pytest.mark.usefixtures("booted_machines")
def test_a_short_campaign_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code = COMMAND.main(["--wakes", "6"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert re.search(
        r"^6 wakes .* USD by the markets in \d+ s; 0 violations$", printed, re.MULTILINE
    )


def test_five_hundred_wakes_repeat_the_seeds_that_found_a_fault() -> None:
    planned = COMMAND.plan(500, None)
    assert (99024, 60) in planned
    assert sum(wakes for _, wakes in planned) == 500
    assert COMMAND.plan(60, 7) == [(7, 60)]


@pytest.mark.parametrize("command", [COMMAND, JOBS], ids=["rentals", "jobs"])
def test_a_host_without_sshd_is_told_so_at_once(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fake machine would be waited for until the market gives it up."""
    which = shutil.which
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        shutil, "which", lambda name, **given: None if name == "sshd" else which(name, **given)
    )
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "sshd is missing" in said.err
    assert "openssh-server" in said.err
