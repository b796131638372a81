"""Lineage: which snapshots have the work of which."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.manifests import SNAPSHOT, honest
from torpor.shared.format.lineage import (
    MOST_ANCESTORS,
    MOST_SAVES,
    Lineage,
    Work,
    chain,
    lineage_of,
    recorded,
)
from torpor.shared.values import SnapshotId


def _id(number: int) -> SnapshotId:
    return SnapshotId(
        f"20261120T{number // 3600:02}{number // 60 % 60:02}{number % 60:02}Z-00000000"
    )


def _line(*numbers: int, equal: tuple[int, ...] = ()) -> Lineage:
    """The lineage of the last of these snapshots, each of which goes on from the one before."""
    line = None
    for number in numbers:
        line = Lineage.after(line, _id(number), equal=number in equal)
    assert line is not None
    return line


@pytest.mark.parametrize(
    ("mine", "other", "has"),
    [
        (_line(1), _line(1), True),
        (_line(1, 2, 3), _line(1), True),
        (_line(1), _line(1, 2), False),
        (_line(1, 3), _line(1, 2), False),  # two machines went on from 1
        (_line(1, 3), _line(2), False),  # never seen, though it is older
        (_line(1), _line(1, 2, equal=(2,)), True),  # nothing had changed in 2
        (_line(1, 5), _line(1, 2, 3, equal=(2, 3)), True),
        (_line(1, 2, equal=(2,)), _line(1, 3, equal=(3,)), True),
        (_line(1, 2, equal=(2,)), _line(1, 3), False),
        (Lineage.unknown(_id(3)), _line(1, 2), False),  # what is not known has nothing
        (Lineage.after(Lineage.unknown(_id(3)), _id(5), equal=False), _line(1, 2), False),
        (Lineage.after(Lineage.unknown(_id(3)), _id(5), equal=False), _line(3), True),
    ],
)
def test_a_snapshot_has_the_work_of_what_it_goes_on_from(
    mine: Lineage, other: Lineage, has: bool
) -> None:
    assert Work([mine]).has(other) is has


def test_a_deleted_snapshot_breaks_no_line() -> None:
    """Nobody asks whether 2 is still there."""
    assert Work([_line(1, 2, 3)]).has(_line(1))


def test_a_long_line_has_what_it_names_and_what_its_oldest_ancestors_name() -> None:
    lines: dict[SnapshotId, Lineage] = {}
    for number in range(3 * MOST_ANCESTORS):
        before = lines.get(_id(number - 1))
        lines[_id(number)] = Lineage.after(before, _id(number), equal=False)
    newest = lines[_id(3 * MOST_ANCESTORS - 1)]
    assert (len(newest.ancestors), newest.whole) == (MOST_ANCESTORS, False)
    first, another = _line(0), _line(1, 5000)
    assert not Work([newest]).has(first)
    assert Work(chain(newest, lines.get)).has(first)
    assert not Work(chain(newest, lines.get)).has(another)
    few = {_id(number): lines[_id(number)] for number in (300, 600, 900)}  # the others are deleted
    assert Work(chain(newest, few.get)).has(first)
    del few[_id(600)]
    assert not Work(chain(newest, few.get)).has(first)


def test_a_thousand_autosaves_push_no_ancestor_out() -> None:
    base = Lineage.after(None, _id(0), equal=False)
    line = base
    for number in range(1, 1000):
        line = Lineage.after(line, _id(number), equal=False, autosave=True)
    assert (line.ancestors, line.whole, line.parent) == ([base.snapshot], True, base.snapshot)
    assert line.saves == [_id(number) for number in range(998, 998 - MOST_SAVES, -1)]
    kept = Lineage.after(line, _id(1000), equal=False)
    assert Work([kept]).names(_id(999)) and not Work([kept]).names(_id(1))
    assert Lineage.after(kept, _id(1001), equal=False).ancestors == [_id(1000), base.snapshot]
    assert Work([line]).has(_line(0))
    assert not Work([line]).has(_line(0, MOST_ANCESTORS + 200))


def test_half_a_day_of_autosaves_that_nobody_deletes_is_one_line() -> None:
    """A control side was away: the newest names only the last of them itself."""
    lines = {_id(0): Lineage.after(None, _id(0), equal=False)}
    for number in range(1, 5 * MOST_SAVES):
        before = lines[_id(number - 1)]
        lines[_id(number)] = Lineage.after(before, _id(number), equal=False, autosave=True)
    newest = Lineage.after(lines[_id(5 * MOST_SAVES - 1)], _id(5 * MOST_SAVES), equal=False)
    assert not Work([newest]).names(_id(1))
    assert all(Work(chain(newest, lines.get)).names(name) for name in lines)


def test_it_is_in_the_manifest() -> None:
    line = Lineage.after(_line(1, 2), SNAPSHOT, equal=True)
    assert lineage_of(honest(environment={"kernel": "6.1", **line.record()})) == line
    assert line.parent == _id(2)
    assert line.content == _id(2)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "x",
        {},
        {"content": SNAPSHOT, "ancestors": ["../x"], "whole": True},
        {"content": "../x", "ancestors": [], "whole": True},
        {"content": SNAPSHOT, "ancestors": [_id(1)] * (MOST_ANCESTORS + 1), "whole": True},
        {"content": SNAPSHOT, "ancestors": 7, "whole": True},
    ],
)
def test_what_does_not_fit_is_not_known(said: Any) -> None:
    """A machine writes it."""
    manifest = honest(environment={} if said is None else {"lineage": said})
    assert recorded(manifest) is None
    assert lineage_of(manifest) == Lineage.unknown(SNAPSHOT)
