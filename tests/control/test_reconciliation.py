"""What a machine or a lease is said to be, also while runs create and destroy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from torpor.control.ledger import Lease
from torpor.control.reconciliation import Finding, Reconciliation, choose, compare
from torpor.shared.errors import InvalidInput, NotOurs, UnsafeDestroy
from torpor.shared.values import Label, Machine, MachineId, WorkspaceName

DEMO, DRILL, OTHER = (WorkspaceName(name) for name in ("demo", "drill--demo", "other"))
HERE, THERE = "local://here", "local://there"


def _label(lease: str, workspace: WorkspaceName = DEMO) -> Label:
    return Label("me", workspace, lease)


def _machine(name: str, label: Label, price: float = 2.0) -> Machine:
    return Machine(MachineId(name), HERE, label, "running", None, price)


def _lease(label: Label, state: Literal["creating", "handed over"], provider: str = HERE) -> Lease:
    return Lease(label, provider, state, 3600.0)


def _compare(
    leases: Sequence[Lease], before: Sequence[Machine], after: Sequence[Machine] | None = None
) -> list[Finding]:
    return compare(HERE, [DEMO, DRILL], leases, before, before if after is None else after)


def _kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [
        (finding.kind, finding.machine.id if finding.machine else finding.lease.label.rental)
        for finding in findings
        if finding.machine or finding.lease
    ]


def test_every_finding_is_listed_and_possible_waste_comes_first() -> None:
    labels = {name: _label(name) for name in ("a", "b", "c", "d", "e")}
    drill = _label("f", DRILL)
    found = _compare(
        [
            _lease(labels["a"], "handed over"),
            _lease(labels["b"], "creating"),
            _lease(drill, "creating"),
            _lease(labels["d"], "handed over"),
            _lease(labels["e"], "creating"),
            _lease(_label("g"), "handed over", THERE),
            _lease(_label("h"), "creating", THERE),
        ],
        [
            _machine("ma", labels["a"]),
            _machine("mb", labels["b"]),
            _machine("mc", labels["c"]),
            _machine("mf", drill),
            _machine("mx", _label("x", OTHER)),
        ],
    )
    assert _kinds(found) == [
        ("unfinished", "mb"),
        ("unfinished", "mf"),
        ("without a lease", "mc"),
        ("lost", "d"),
        ("in use", "ma"),
        ("asked for", "e"),
        ("at another provider", "g"),
        ("at another provider", "h"),
        ("another workspace's", "mx"),
    ]


def test_one_that_stands_here_is_here_whatever_the_provider_was_called() -> None:
    label = _label("a")
    found = _compare([_lease(label, "creating", THERE)], [_machine("ma", label)])
    assert _kinds(found) == [("unfinished", "ma")]


def test_what_came_or_went_meanwhile_is_neither_without_a_lease_nor_lost() -> None:
    came, went, ended = _label("came"), _label("went"), _label("ended")
    found = _compare(
        [_lease(went, "handed over")],
        [_machine("mw", went), _machine("me", ended)],  # its lease is closed by now, and it is gone
        [_machine("mc", came)],  # its lease was written after the leases were read
    )
    assert found == []


def test_a_row_tells_what_it_is_what_it_cost_and_what_to_do() -> None:
    label, drill = _label("a"), _label("f", DRILL)
    found = _compare(
        [_lease(label, "creating"), _lease(drill, "creating"), _lease(_label("e"), "creating")],
        [_machine("ma", label), _machine("mf", drill)],
    )
    row = found[0].row(now_unix=3 * 3600.0)
    assert (row["machine"], row["state"], row["lease"]) == ("ma", "running", "a")
    assert row["since"] == "1970-01-01 01:00 UTC"
    assert row["costs"] == "2.00 $/h, at most 4.00 $ so far"
    assert "next wake or replicate continues with it" in row["next step"]
    assert found[1].row(0.0)["workspace"] == DRILL
    assert "a drill works" in found[1].row(0.0)["next step"]
    assert found[2].row(0.0)["costs"] == "no machine"
    (lost,) = _compare([_lease(label, "handed over")], [])
    assert "delete workspaces/demo/leases/a in the bucket" in lost.row(0.0)["next step"]
    (asked,) = _compare([_lease(drill, "creating")], [])
    assert "A later one removes the lease" in asked.row(0.0)["next step"]


def test_the_message_counts_and_names_what_was_ended() -> None:
    label = _label("a")
    found = _compare([_lease(label, "handed over")], [_machine("ma", label)])
    report = Reconciliation(DEMO, HERE, [*found, *found], ended=[MachineId("mb")])
    assert report.message() == "Workspace demo at local://here: 2 in use; ended mb"
    assert Reconciliation(DEMO, HERE, [], []).message().endswith(": nothing")


def test_only_what_was_never_handed_over_may_be_ended() -> None:
    half, used, other = _label("half"), _label("used"), _label("x", OTHER)
    found = _compare(
        [_lease(half, "creating"), _lease(used, "handed over")],
        [
            _machine("half", half),
            _machine("used", used),
            _machine("stray", _label("stray")),
            _machine("theirs", other),
        ],
    )
    (chosen,) = choose(found, ["half", "half"])
    assert chosen == (_machine("half", half), _lease(half, "creating"))
    assert choose(found, []) == []
    with pytest.raises(UnsafeDestroy, match="used was handed over and may hold work"):
        choose(found, ["half", "used"])
    for name in ("stray", "theirs"):
        with pytest.raises(NotOurs, match=f"{name} is .*nothing was ended"):
            choose(found, ["half", name])
    with pytest.raises(InvalidInput, match=r"no machine 'nowhere'.*half, stray, used, theirs"):
        choose(found, ["nowhere"])
    with pytest.raises(InvalidInput, match="it has none"):
        choose([], ["nowhere"])
