"""A wake on a machine with another home than the snapshot's machine says which paths differ."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, replicate_plainly, wake_plainly

ADVICE = "name an absolute path in the block's `paths`"


def test_a_wake_and_a_replicate_to_another_home_say_so(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (market,) = lab.opened.providers
    elsewhere = msgspec.structs.replace(market.abilities, kind="container")
    monkeypatch.setattr(market, "abilities", elsewhere)
    machine = lab.rent()
    before = lab.home(machine.id)
    lab.workspace(machine.id).mkdir()
    (lab.workspace(machine.id) / "run").write_text(f"#!{before}/workspace/venv/bin/python\n")
    hibernate_plainly(lab.opened)
    with caplog.at_level(logging.WARNING):
        woken = wake_plainly(lab.opened)
    (said,) = woken.warnings
    assert f"{before}/workspace is {lab.home(woken.machine)}/workspace here" in said
    assert ADVICE in said
    assert said in caplog.text
    (replica,) = replicate_plainly(lab.opened, count=1).ready
    assert replica.warnings[0].startswith(f"{before}/workspace is ")


def test_an_absolute_path_is_the_same_everywhere(lab: Lab, tmp_path: Path) -> None:
    lab.opened = lab.wanting(paths=[f"{tmp_path}/work"])
    lab.rent()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("kept")
    hibernate_plainly(lab.opened)
    (tmp_path / "work" / "file").unlink()
    assert wake_plainly(lab.opened).warnings == []
