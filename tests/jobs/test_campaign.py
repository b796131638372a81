"""A short campaign of jobs; the long one is ``make jobs``."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.jobs.campaign import main
from tests.markets import boot


@pytest.mark.usefixtures("booted_machines")
def test_a_short_campaign_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--strikes", "8"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert re.search(r"^\d+ jobs, 8 strikes .* 0 violations$", printed, re.MULTILINE)


def test_without_sshd_there_is_one_message_and_no_time_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which
    monkeypatch.setattr(
        boot.shutil, "which", lambda name, **given: None if name == "sshd" else found(name, **given)
    )
    monkeypatch.setattr(boot.os, "geteuid", lambda: 0)
    assert main(["--strikes", "8"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "sshd is missing" in said.err
    assert "openssh-server" in said.err
