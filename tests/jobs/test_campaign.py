"""A short campaign of jobs; the long one is ``make jobs``."""

from __future__ import annotations

import re

import pytest

from tests.jobs.campaign import COMMAND


@pytest.mark.rule(16)
@pytest.mark.usefixtures("booted_machines")
def test_a_short_campaign_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code = COMMAND.main(["--strikes", "8"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert re.search(r"^\d+ jobs, 8 strikes .* 0 violations$", printed, re.MULTILINE)
