"""A short campaign of rentals; the long one is ``make rentals``."""

from __future__ import annotations

import re

import pytest

from tests.markets.campaign import main


@pytest.mark.usefixtures("booted_machines")
def test_a_short_campaign_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--wakes", "6"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert re.search(r"^6 wakes in .* USD by the markets; 0 violations$", printed, re.MULTILINE)
