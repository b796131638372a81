"""A short campaign of rentals; the long one is ``make rentals``."""

from __future__ import annotations

import re

import pytest

from tests.markets import boot
from tests.markets.campaign import main, plan


@pytest.mark.usefixtures("booted_machines")
def test_a_short_campaign_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--wakes", "6"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert re.search(r"^6 wakes in .* USD by the markets; 0 violations$", printed, re.MULTILINE)


def test_five_hundred_wakes_repeat_the_seeds_that_found_a_fault() -> None:
    planned = plan(500, None)
    assert (99024, 60) in planned
    assert sum(wakes for _, wakes in planned) == 500
    assert plan(60, 7) == [(7, 60)]


def test_a_host_without_sshd_is_told_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fake machine would be waited for until the market gives it up."""
    monkeypatch.setattr(boot.os, "geteuid", lambda: 0)
    which = boot.shutil.which
    monkeypatch.setattr(
        boot.shutil,
        "which",
        lambda name, path=None: None if name == "sshd" else which(name, path=path),
    )
    assert main(["--wakes", "6"]) == 2
    assert "sshd is missing" in capsys.readouterr().err
