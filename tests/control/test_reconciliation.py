"""What a machine or a rental is said to be, also while runs create and destroy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from torpor.control.providers.provider import Residue
from torpor.control.reconciliation import (
    Finding,
    Reconciliation,
    choose_findings,
    choose_gone,
    compare,
)
from torpor.control.rental.records import Rental, State
from torpor.shared.errors import InvalidInput, NotOurs, UnsafeDestroy
from torpor.shared.values import Label, Machine, MachineId, SnapshotId, WorkspaceName

DEMO, DRILL, OTHER = (WorkspaceName(name) for name in ("demo", "drill--demo", "other"))
HERE, THERE = "local://here", "local://there"


def _label(lease: str, workspace: WorkspaceName = DEMO) -> Label:
    return Label("me", workspace, lease)


def _machine(name: str, label: Label, price: float = 2.0) -> Machine:
    return Machine(MachineId(name), HERE, label, "running", None, price)


def _rental(label: Label, state: State, provider: str = HERE) -> Rental:
    return Rental(label=label, provider=provider, state=state, created_unix=3600.0, offer="1")


def _compare(
    rentals: Sequence[Rental],
    before: Sequence[Machine],
    after: Sequence[Machine] | None = None,
    residue: Sequence[Residue] = (),
) -> list[Finding]:
    after = before if after is None else after
    return compare([HERE], [DEMO, DRILL], rentals, before, after, residue)


def _kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [
        (finding.kind, finding.machine.id if finding.machine else finding.rental.label.rental)
        for finding in findings
        if finding.machine or finding.rental
    ]


def test_every_finding_is_listed_and_possible_waste_comes_first() -> None:
    labels = {name: _label(name) for name in ("a", "b", "c", "d", "e")}
    drill = _label("f", DRILL)
    found = _compare(
        [
            _rental(labels["a"], "handed over"),
            _rental(labels["b"], "standing"),
            _rental(drill, "standing"),
            _rental(labels["d"], "handed over"),
            _rental(labels["e"], "standing"),
            _rental(_label("g"), "handed over", THERE),
            _rental(_label("h"), "standing", THERE),
            _rental(_label("i"), "abandoned"),
            _rental(_label("j"), "abandoned"),
        ],
        [
            _machine("ma", labels["a"]),
            _machine("mb", labels["b"]),
            _machine("mc", labels["c"]),
            _machine("mf", drill),
            _machine("mi", _label("i")),
            _machine("mx", _label("x", OTHER)),
        ],
    )
    assert _kinds(found) == [
        ("abandoned", "mi"),
        ("abandoned", "j"),
        ("unfinished", "mb"),
        ("unfinished", "mf"),
        ("without a rental", "mc"),
        ("lost", "d"),
        ("in use", "ma"),
        ("asked for", "e"),
        ("at another provider", "g"),
        ("at another provider", "h"),
        ("another workspace's", "mx"),
    ]


def test_a_machine_whose_work_is_stored_and_that_its_provider_ends_is_not_in_use() -> None:
    label = _label("a")
    stopping = msgspec.structs.replace(_machine("ma", label), state="stopping")
    rental = _rental(label, "handed over")
    assert _kinds(_compare([rental], [stopping])) == [("in use", "ma")]  # it may hold work
    stored = msgspec.structs.replace(rental, snapshot=SnapshotId("s-1"))
    (ending,) = _compare([stored], [stopping])
    assert ending.kind == "being ended" and "do not work on it" in ending.next_step
    assert _kinds(_compare([stored], [_machine("ma", label)])) == [("in use", "ma")]
    with pytest.raises(NotOurs, match="being ended"):
        choose_findings([ending], ["ma"])


def test_one_that_stands_here_is_here_whatever_the_provider_was_called() -> None:
    label = _label("a")
    found = _compare([_rental(label, "standing", THERE)], [_machine("ma", label)])
    assert _kinds(found) == [("unfinished", "ma")]


@pytest.mark.rule(5)
def test_what_came_or_went_meanwhile_is_neither_without_a_rental_nor_lost() -> None:
    came, went, ended = _label("came"), _label("went"), _label("ended")
    found = _compare(
        [_rental(went, "handed over")],
        [_machine("mw", went), _machine("me", ended)],  # its rental has ended by now
        [_machine("mc", came)],  # its rental began after they were read
    )
    assert found == []


def test_a_row_tells_what_it_is_what_it_cost_and_what_to_do() -> None:
    label, drill = _label("a"), _label("f", DRILL)
    found = _compare(
        [_rental(label, "standing"), _rental(drill, "standing"), _rental(_label("e"), "standing")],
        [_machine("ma", label), _machine("mf", drill)],
    )
    row = found[0].row(now_unix=3 * 3600.0)
    assert (row["machine"], row["state"], row["rental"]) == ("ma", "running", "a")
    assert row["since"] == "1970-01-01 01:00 UTC"
    assert row["costs"] == "2.00 $/h, at most 4.00 $ so far"
    assert "next wake or replicate continues with it" in row["next step"]
    assert found[1].row(0.0)["workspace"] == DRILL
    assert "a drill works" in found[1].row(0.0)["next step"]
    assert found[2].row(0.0)["costs"] == "no machine"
    (lost,) = _compare([_rental(label, "handed over")], [])
    assert "name rental a in `gone`" in lost.row(0.0)["next step"]
    (asked,) = _compare([_rental(drill, "standing")], [])
    assert "A later one closes the rental" in asked.row(0.0)["next step"]


def test_the_message_counts_and_names_what_was_ended() -> None:
    label = _label("a")
    found = _compare([_rental(label, "handed over")], [_machine("ma", label)])
    report = Reconciliation(DEMO, HERE, [*found, *found], ended=[MachineId("mb")])
    assert report.title() == "Workspace demo at local://here: 2 in use, 4.00 $/h in all; ended mb"
    assert Reconciliation(DEMO, HERE, [], []).title().endswith(": nothing")


@pytest.mark.rule(5)
def test_only_what_was_never_handed_over_may_be_ended() -> None:
    half, used, other = _label("half"), _label("used"), _label("x", OTHER)
    found = _compare(
        [_rental(half, "standing"), _rental(used, "handed over")],
        [
            _machine("half", half),
            _machine("used", used),
            _machine("stray", _label("stray")),
            _machine("theirs", other),
        ],
    )
    (chosen,) = choose_findings(found, ["half", "half"])
    assert chosen == (_machine("half", half), _rental(half, "standing"))
    assert choose_findings(found, []) == []
    with pytest.raises(UnsafeDestroy, match="used was handed over and may hold work"):
        choose_findings(found, ["half", "used"])
    for name in ("stray", "theirs"):
        with pytest.raises(NotOurs, match=f"{name} is .*nothing was ended"):
            choose_findings(found, ["half", name])
    with pytest.raises(InvalidInput, match=r"no machine 'nowhere'.*half, stray, used, theirs"):
        choose_findings(found, ["nowhere"])
    with pytest.raises(InvalidInput, match="it has none"):
        choose_findings([], ["nowhere"])


def test_what_outlived_its_machine_is_listed_with_its_price() -> None:
    disk = Residue(id="d1", provider=HERE, kind="disk", label=_label("a"), price_usd_h=0.5)
    used = Residue(id="d2", provider=HERE, kind="disk", label=_label("b"), price_usd_h=0.5)
    theirs = Residue(id="d3", provider=HERE, kind="disk", label=_label("x", OTHER))
    unknown = Residue(id="ip", provider=HERE, kind="address", label=None)
    free = Residue(id="s1", provider=HERE, kind="script", label=_label("a"), price_usd_h=0.0)
    found = _compare(
        [_rental(_label("b"), "handed over")],
        [_machine("mb", _label("b"))],
        residue=[disk, used, theirs, unknown, free],
    )
    rows = [finding.row(0.0) for finding in found if finding.kind == "residue"]
    assert [(row["machine"], row["state"], row["costs"]) for row in rows] == [
        ("d1", "disk", "0.50 $/h"),
        ("ip", "address", "no price known"),
        ("s1", "script", "nothing"),
    ]
    assert ["may cost money" in row["next step"] for row in rows] == [True, True, False]
    assert "2.50 $/h in all" in Reconciliation(DEMO, HERE, found, []).title()


@pytest.mark.rule(5)
def test_only_a_rental_whose_machine_no_provider_shows_is_closed_by_its_user_s_word() -> None:
    names = ("shown", "lost", "away", "silent", "asked")
    states: list[State] = ["handed over"] * 4 + ["asked"]
    at = [HERE, HERE, THERE, "local://silent", HERE]
    rentals = [_rental(_label(name), *two) for name, *two in zip(names, states, at, strict=True)]
    found = _compare(rentals, [_machine("m1", _label("shown"))])
    blocks = [HERE, "local://silent"]
    chosen = choose_gone(found, ["lost", "away", "lost"], blocks)
    assert [rental.label.rental for rental in chosen] == ["lost", "away"]
    with pytest.raises(UnsafeDestroy, match="m1 at local://here shows"):
        choose_gone(found, ["lost", "shown"], blocks)
    with pytest.raises(InvalidInput, match="local://silent did not answer"):
        choose_gone(found, ["silent"], blocks)
    for name in ("asked", "nowhere"):
        with pytest.raises(InvalidInput, match=f"{name}.*: nothing was closed"):
            choose_gone(found, [name], blocks)
