"""The sync flow: what it moves, what it refuses, what it reports."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import flows
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.trees import differences, facts, fill, mutate
from torpor.control.reports import SyncReport
from torpor.shared.errors import InvalidInput, UnsavedWork
from torpor.shared.values import MIB


@pytest.fixture
def root(sealed_lab: Lab) -> Path:
    """The workspace on a rented machine."""
    machine = sealed_lab.rent()
    root = sealed_lab.workspace(machine.id)
    fill(root, random.Random(1), big=2)
    return root


def _sync(lab: Lab, **options: object) -> SyncReport:
    report: SyncReport = run_plainly(lab.opened, flows.sync, **options)
    return report


def test_a_machine_goes_back_and_forth(sealed_lab: Lab, root: Path) -> None:
    lab = sealed_lab
    first, before = hibernate_plainly(lab.opened, destroy=False), facts(root)
    mutate(root, random.Random(2))
    with pytest.raises(UnsavedWork, match="Nothing was changed: save them with `save_first`"):
        _sync(lab, snapshot=first.snapshot)
    mine = facts(root)

    back = _sync(lab, snapshot=first.snapshot, save_first=True, full_check=True)
    assert differences(before, facts(root)) == []
    assert (back.last, back.snapshot) == (back.saved, first.snapshot)
    assert back.checked == "every byte and attribute"
    assert len(back.rows()) <= 10  # a page in the UI

    forth = _sync(lab)  # the newest one is what was saved
    assert differences(mine, facts(root)) == []
    assert (forth.last, forth.snapshot) == (first.snapshot, back.saved)
    assert 0 < forth.stored_bytes < first.stored_bytes

    (root / "more").write_bytes(b"not kept")
    lost = _sync(lab, discard_local=True)
    assert differences(mine, facts(root)) == []
    assert lost.discarded == ["more"]
    saved = hibernate_plainly(lab.opened, destroy=False)
    assert saved.new_bytes == 0
    assert lab.verify_listed() == 3


def test_an_agent_that_is_killed_costs_nothing_twice(sealed_lab: Lab, root: Path) -> None:
    lab = sealed_lab
    machine = lab.machines()[0].id
    first = hibernate_plainly(lab.opened, destroy=False)
    (root / "weights-0.bin").write_bytes(os.urandom(9 * MIB))
    (root / "new").write_bytes(b"new")
    second, after = hibernate_plainly(lab.opened, destroy=False), facts(root)
    _sync(lab, snapshot=first.snapshot)
    lab.market.near[machine].restart()
    report = _sync(lab, snapshot=second.snapshot)
    assert differences(after, facts(root)) == []
    assert report.last == first.snapshot


def test_impossible_syncs_are_refused(sealed_lab: Lab, root: Path) -> None:
    hibernate_plainly(sealed_lab.opened, destroy=False)
    with pytest.raises(InvalidInput, match="is on no machine"):
        _sync(sealed_lab, machine="local:nowhere")
