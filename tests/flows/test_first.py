"""Wake and replicate say when what comes first can be used, and hand over only at the end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly, replicate_plainly, sent, wake_plainly
from tests.fixtures.rentals import standing
from tests.fixtures.short_agent import installing
from tests.fixtures.trees import Tree, differences, facts, fill
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental.renting import Tenancy
from torpor.control.reports import Replica, WakeReport
from torpor.control.store.manifests import find_snapshot
from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB
from torpor.shared.wire.restore import Checked

EVENT = "torpor.workspace.first-restored"
FIRST = ["lib", "weights-2.bin"]


class Kept:
    """A workspace that is in the store only."""

    def __init__(self, lab: Lab, truth: Tree) -> None:
        self.lab = lab
        self.truth = truth

    def identical(self, count: int) -> None:
        machines = self.lab.machines()
        assert len(machines) == count
        for machine in machines:
            assert not differences(self.truth, facts(self.lab.workspace(machine.id)))


@pytest.fixture(scope="module")
def kept(short_agent_source: Path) -> Iterator[Kept]:
    with installing(short_agent_source), make_lab() as lab:
        machine = lab.rent()
        fill(lab.workspace(machine.id), random.Random(2), big=4)
        truth = facts(lab.workspace(machine.id))
        hibernate_plainly(lab.wanting(parts=16, part_bytes=4 * MIB))
        yield Kept(lab, truth)


@pytest.fixture
def ordered(kept: Kept) -> Iterator[Any]:
    sent.clear()
    yield kept.lab.wanting(parts=16, part_bytes=4 * MIB, first=[*FIRST, "no such"])
    destroy_all(kept.lab.market)
    kept.lab.forget_rentals()


def test_wake_says_when_what_comes_first_can_be_used(
    kept: Kept, ordered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, handed_over = RemoteRestore.finish_first, Tenancy.hand_over
    seen: list[str] = []

    def finishes(self: RemoteRestore) -> Checked:
        checked = finish(self)
        (machine,) = kept.lab.machines()
        now = facts(kept.lab.workspace(machine.id))
        first = {p: f for p, f in kept.truth.items() if os.fsdecode(p).split("/")[0] in FIRST}
        assert differences(first, {path: now[path] for path in first}) == []
        seen.append("usable")
        return checked

    def hands_over(self: Tenancy, **given: Any) -> None:
        handed_over(self, **given)
        seen.append("handed over")

    monkeypatch.setattr(RemoteRestore, "finish_first", finishes)
    monkeypatch.setattr(Tenancy, "hand_over", hands_over)
    report = wake_plainly(ordered)
    assert seen == ["usable", "handed over"]
    kept.identical(1)
    assert "first: nothing in the snapshot matches 'no such'" in report.warnings
    assert report.first is not None
    assert report.first.bytes < report.bytes / 2
    assert {"what": "first", "value": report.first.words()} in report.rows()
    (event,) = (event for event in sent if event["event"] == EVENT)
    assert event["payload"]["machine"] == report.machine
    assert event["payload"]["names"] == report.first.names == 43


@pytest.mark.rule(5)
def test_a_wake_that_fails_after_that_destroys_its_machine(
    kept: Kept, ordered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: RemoteRestore) -> None:
        raise InvalidInput("the rest is not to be had")

    monkeypatch.setattr(RemoteRestore, "finish", fails)
    with pytest.raises(InvalidInput, match="not to be had"):
        wake_plainly(ordered, retries=0)
    assert [event["event"] for event in sent if event["event"] == EVENT] == [EVENT]
    assert kept.lab.machines() == []
    assert kept.lab.leaks() == []


@pytest.mark.parametrize("peers", ["always", "never"])
def test_replicate_says_it_of_every_machine(kept: Kept, ordered: Any, peers: str) -> None:
    report = replicate_plainly(ordered, count=2, peers=peers)
    kept.identical(2)
    assert len(report.ready) == 2
    for replica in report.ready:
        assert replica.first is not None
        assert replica.first.words() in replica.row()["words"]
    machines = [event["payload"]["machine"] for event in sent if event["event"] == EVENT]
    assert sorted(machines) == sorted(replica.machine for replica in report.ready)


@pytest.mark.parametrize("flow", ["wake", "replicate"])
def test_a_machine_that_has_it_already_is_continued(kept: Kept, ordered: Any, flow: str) -> None:
    machine, _ = standing(ordered)
    assert machine.endpoint is not None
    wanted = find_snapshot(ordered.store, ordered.spec.name, None)
    with ordered.log_in(machine.endpoint, ordered.identity) as session:
        restore = RemoteRestore(
            session,
            ordered.store,
            wanted,
            ordered.key,
            "killed",
            paths=ordered.spec.paths,
            first=ordered.spec.first,
        )
        for part in restore.begin().parts:
            if part.first:
                restore.restore_part(part)
        assert restore.finish_first().differences == []
        restore.end()
    weights = kept.lab.workspace(machine.id) / "weights-2.bin"
    restored = os.lstat(weights)
    if flow == "wake":
        report: WakeReport | Replica = wake_plainly(ordered)
    else:
        (report,) = replicate_plainly(ordered, count=1).ready
    kept.identical(1)
    assert report.machine == machine.id
    assert report.first is not None
    assert (report.first.bytes, report.first.names) == (0, 43)
    assert os.lstat(weights).st_ctime_ns == restored.st_ctime_ns
