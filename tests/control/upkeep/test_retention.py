"""What a retention keeps and lets go, by restic's rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.control.upkeep.retention import Retention, Taken, judge
from torpor.shared.errors import InvalidInput
from torpor.shared.format.lineage import Lineage
from torpor.shared.values import SnapshotId, made_at, new_snapshot_id


def _at(text: str, mark: str = "00000000") -> SnapshotId:
    return SnapshotId(f"{text.replace('-', '').replace(':', '').replace(' ', 'T')}Z-{mark}")


def _taken(
    snapshot: SnapshotId, agent: str = "a", machine: str = "", *, verified: bool = True
) -> Taken:
    return Taken(snapshot, made_at(snapshot).timestamp(), verified, agent, machine)


def _reasons(
    taken: Sequence[Taken], retention: Retention, pinned: Any = None, **more: Any
) -> dict[SnapshotId, list[str]]:
    """Why each stays, newest first, where each goes on from all of its machine before it, unless it
    says what it goes on from."""
    lines: dict[str, Lineage] = {}
    for entry in sorted(taken, key=lambda one: (one.stored_unix, one.snapshot)):
        name = entry.lineage.snapshot if entry.lineage else entry.agent
        lines[entry.snapshot] = entry.lineage or Lineage.after(
            lines.get(name), entry.snapshot, equal=False
        )
        lines[name] = lines[entry.snapshot]
    taken = [msgspec.structs.replace(entry, lineage=lines[entry.snapshot]) for entry in taken]
    verdicts = judge(taken, retention, pinned or {}, **more)
    return {judged.snapshot: judged.reasons for judged in verdicts}


def _kept(taken: Sequence[Taken], retention: Retention, **more: Any) -> list[SnapshotId]:
    found = _reasons(taken, retention, **more)
    return [snapshot for snapshot, reasons in found.items() if reasons]


DAYS = [_at(f"2026-11-{day:02} 12:00:00") for day in range(1, 11)]
GAPS = [
    _at("2026-01-05 10:00:00"),
    _at("2026-01-05 22:00:00"),
    _at("2026-03-01 08:00:00"),  # nothing for weeks
    _at("2026-03-02 08:00:00"),
    _at("2026-03-02 09:30:00"),
    _at("2026-03-02 09:45:00"),
]
FEW = [_at("2026-11-02 12:00:00"), _at("2026-11-20 12:00:00"), _at("2026-11-28 12:00:00")]
NIGHT = [  # 23:30 and 0:30 in Berlin
    _at("2026-10-01 12:00:00"), _at("2026-11-20 22:30:00"), _at("2026-11-20 23:30:00"),
]  # fmt: skip
REPEATED = [  # both 2:30 in Berlin
    _at("2026-10-01 12:00:00"), _at("2026-10-25 00:30:00"), _at("2026-10-25 01:30:00"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("taken", "retention", "kept"),
    [
        (DAYS, Retention(last=3), [9, 8, 7]),
        (DAYS, Retention(last=100), [*reversed(range(10))]),
        ([_at("2026-11-20 12:00:00", mark) for mark in "12"], Retention(last=2), [1, 0]),
        (GAPS, Retention(hourly=2), [5, 3]),
        (GAPS, Retention(monthly=2), [5, 1]),
        (FEW, Retention(monthly=2), [2, 0]),  # not full: history reaches back as far as it can
        (FEW, Retention(monthly=1), [2]),
        (NIGHT, Retention(daily=2), [2, 0]),
        (NIGHT, Retention(daily=2, timezone="Europe/Berlin"), [2, 1]),
        (REPEATED, Retention(hourly=2, timezone="Europe/Berlin"), [2, 1]),
        ([], Retention(last=1), []),
    ],
)
def test_of_each_period_the_newest_is_kept_and_empty_periods_do_not_count(
    taken: list[SnapshotId], retention: Retention, kept: list[int]
) -> None:
    shuffled = random.Random(1).sample(taken, len(taken))
    assert _kept([*map(_taken, shuffled)], retention) == [taken[number] for number in kept]


MONDAY, SUNDAY = _at("2027-01-04 12:00:00"), _at("2027-01-03 12:00:00")
FIRST = _at("2026-12-28 12:00:00")  # Monday of 2026's week 53, which ends on that Sunday
BACKUP, SAVE = _at("2026-11-19 02:00:00"), _at("2026-11-19 23:00:00")
TODAY = [_at("2026-11-20 02:00:00"), _at("2026-11-20 03:00:00")]


@pytest.mark.parametrize(
    ("taken", "retention", "more", "reasons"),
    [
        (GAPS[2:], Retention(daily=2), {},
         [["newest", "daily 2026-03-02"], [], [], ["daily 2026-03-01"]]),
        # each rule looks at all: in borg, what `last` keeps would not count for `daily`
        (DAYS[-4:], Retention(last=2, daily=3), {},
         [["newest", "last", "daily 2026-11-10"], ["last", "daily 2026-11-09"],
          ["daily 2026-11-08"], []]),
        ([FIRST, SUNDAY, MONDAY], Retention(weekly=2), {},
         [["newest", "weekly 2027-W01"], ["weekly 2026-W53"], []]),
        (DAYS[:2], Retention(), {}, [["newest", "no retention is set"], ["no retention is set"]]),
        (DAYS[:4], Retention(last=2), {"pinned": {DAYS[0]: "the paper"}},
         [["newest", "last"], ["last"], [], ["pinned: the paper"]]),
    ],
)  # fmt: skip
def test_each_reason_is_named(
    taken: list[SnapshotId], retention: Retention, more: Any, reasons: list[list[str]]
) -> None:
    assert [*_reasons([*map(_taken, taken)], retention, **more).values()] == reasons


@pytest.mark.rule(11)
def test_saves_of_an_open_job_stay_and_use_up_no_rule() -> None:
    """The job deletes them itself: a backup must not go because a save of its day is there."""
    taken = [*map(_taken, (BACKUP, SAVE, *TODAY))]
    assert _reasons(taken, Retention(daily=2), saves={SAVE: "3f2a9c81d04e"}) == {
        TODAY[1]: ["newest", "daily 2026-11-20"],
        TODAY[0]: [],
        SAVE: ["save of job 3f2a9c81d04e"],
        BACKUP: ["daily 2026-11-19"],
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"daily": -1}, "keep_daily is -1"),
        ({"last": 10_001}, "keep_last is 10001"),
        ({"timezone": "Europe/Atlantis"}, "'Europe/Atlantis' is not a time zone"),
        ({"timezone": "../etc/passwd"}, "is not a time zone"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Retention(**options)


def test_the_snapshots_of_one_machine_displace_none_of_another_machines() -> None:
    ours = [_at(f"2026-11-{day:02} 02:00:00") for day in (18, 19, 20)]
    theirs = [_at(f"2026-11-{day:02} 03:00:00") for day in (18, 19, 20, 21, 22)]
    taken = [_taken(snapshot, "a", "m-1") for snapshot in ours]
    taken += [_taken(snapshot, "b", "m-2") for snapshot in theirs]
    found = _reasons(taken, Retention(daily=2), rented={"m-1": 0.0, "m-2": 0.0})
    assert {snapshot: reasons for snapshot, reasons in found.items() if reasons} == {
        theirs[4]: ["newest", "daily 2026-11-22"],
        theirs[3]: ["daily 2026-11-21"],
        ours[2]: ["newest of machine m-1", "daily 2026-11-20 of machine m-1"],
        ours[1]: ["daily 2026-11-19 of machine m-1"],
    }


OLD, NEW = _at("2026-10-01 12:00:00"), _at("2026-11-20 12:00:00")
OLDER = _at("2026-09-30 12:00:00")
OLD_UNIX = made_at(OLD).timestamp()


@pytest.mark.rule(11)
@pytest.mark.parametrize(
    ("machine", "retention", "rented", "stays"),
    [
        ("m-1", Retention(daily=2), {"m-2": 0.0}, False),
        ("m-1", Retention(daily=2), {"m-1": 0.0, "m-2": 0.0}, True),  # rented
        ("m-1", Retention(daily=2, weekly=1), {}, False),
        ("m-1", Retention(daily=2, monthly=2), {}, True),  # within two months
        ("m-1", Retention(last=2), {}, False),  # a month counts
        # no receipt names its machine: it may be the one that is rented
        ("", Retention(daily=2), {"m-1": OLD_UNIX - 1}, True),
        ("", Retention(daily=2), {"m-1": OLD_UNIX + 1}, False),  # asked for since
        ("", Retention(daily=2), {"m-2": OLD_UNIX - 1}, False),  # known to be another one
    ],
)
def test_of_an_ended_machine_out_of_the_window_only_the_tip_stays(
    machine: str, retention: Retention, rented: dict[str, float], stays: bool
) -> None:
    """Nothing went on from it."""
    taken = [_taken(OLDER, "a", machine), _taken(OLD, "a", machine), _taken(NEW, "b", "m-2")]
    assert _kept(taken, retention, rented=rented) == [NEW, OLD, *(OLDER,) * stays]


@pytest.mark.rule(11)
def test_daily_wakes_on_new_machines_are_thinned_as_one_line() -> None:
    """Each goes on from the last: nothing of 400 days stays because it was on a machine alone."""
    line: list[Lineage] = []
    for day in range(400):
        name = new_snapshot_id(datetime(2025, 1, 1, 12, tzinfo=timezone.utc) + timedelta(days=day))
        line.append(Lineage.after(line[-1] if line else None, name, equal=False))
    taken = [
        msgspec.structs.replace(_taken(one.snapshot, f"a{day}", f"m-{day}"), lineage=one)
        for day, one in enumerate(line)
    ]
    kept = _kept(taken, Retention(daily=7, weekly=5, monthly=12), rented={"m-399": 0.0})
    assert len(kept) == 20  # 7 + 5 + 12, of which four are in two of them


def test_machines_that_changed_nothing_are_no_lines_of_their_own() -> None:
    """Of what eight replicas stored unchanged each day, nothing stays beside their origin."""
    origin = Lineage.after(None, DAYS[0], equal=False)
    last = Lineage.after(origin, DAYS[1], equal=False)
    taken = [msgspec.structs.replace(_taken(one.snapshot), lineage=one) for one in (origin, last)]
    for number in range(8):
        name = _at("2026-11-01 18:00:00", f"0000000{number}")
        line = Lineage.after(origin, name, equal=True)
        taken.append(
            msgspec.structs.replace(_taken(name, f"b{number}", f"m-{number}"), lineage=line)
        )
    assert _kept(taken, Retention(last=1)) == [DAYS[1]]


@pytest.mark.rule(11)
def test_an_unverified_snapshot_displaces_no_verified_one_and_ages_itself() -> None:
    days, sure = DAYS[:5], {DAYS[1], DAYS[3]}
    taken = [_taken(day, verified=day in sure) for day in days]
    assert [*_reasons(taken, Retention(last=2)).values()] == [
        ["newest", "last"],
        ["newest verified", "last"],
        [],
        ["last"],
        [],
    ]


@pytest.mark.rule(11)
def test_a_machine_that_lies_about_itself_displaces_nothing_of_another() -> None:
    lines = [Lineage.after(None, name, equal=False) for name in (OLD, DAYS[0])]
    taken = [_taken(OLD, "a", "m-1"), _taken(DAYS[0], "a", "m-2")]
    taken = [
        msgspec.structs.replace(one, lineage=line) for one, line in zip(taken, lines, strict=True)
    ]
    assert _kept(taken, Retention(last=1)) == [DAYS[0], OLD]


def test_a_snapshot_that_cannot_be_read_stays() -> None:
    """Unknown is not superfluous."""
    taken = [_taken(OLD, "", verified=False), _taken(NEW)]
    assert _reasons(taken, Retention(last=1))[OLD] == ["its manifest cannot be read"]


@pytest.mark.rule(11)
@settings(max_examples=100)
@given(
    hours=st.lists(st.integers(0, 24 * 400), max_size=60),
    counts=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_snapshots_that_must_stay_are_kept(hours: list[int], counts: list[int], seed: int) -> None:
    begin = datetime(2025, 1, 1, tzinfo=timezone.utc)
    taken = [new_snapshot_id(begin + timedelta(hours=hour)) for hour in hours]
    retention = Retention(*counts)
    pinned = {name: "why" for name in taken if random.Random(f"{seed}{name}").random() < 0.1}
    found = _reasons([*map(_taken, taken)], retention, pinned)
    assert [*found] == sorted(taken, reverse=True)
    kept = [snapshot for snapshot, reasons in found.items() if reasons]
    assert set(pinned) <= set(kept)
    assert not taken or max(taken) in kept
    assert set(sorted(taken)[-counts[0] :] if counts[0] else []) <= set(kept)
    days = sorted({name[:8] for name in taken}, reverse=True)[: counts[2]]
    for day in days:
        assert max(name for name in taken if name[:8] == day) in kept
    if any(counts):
        assert len(kept) <= sum(counts) + len(pinned) + 1
    # what is left is left again: a second run deletes nothing more
    assert len(_kept([*map(_taken, kept)], retention, pinned=pinned)) == len(kept)


_HOUR = 3600.0
_COUNTS = st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(any)


@st.composite
def _fleets(draw: st.DrawFn) -> tuple[list[Taken], dict[str, float]]:
    """Snapshots of a few machines, some of them rented. The ids come from the clocks of control
    sides, which may be off; the machines of some are known from their manifests alone."""
    begin = datetime(2025, 1, 1, tzinfo=timezone.utc)
    taken, rented = [], {}
    for number in range(draw(st.integers(1, 4))):
        name = f"m-{number}"
        hours = draw(st.lists(st.integers(0, 24 * 120), min_size=1, max_size=12))
        skews = draw(st.lists(st.sampled_from([0, 0, 0, -24 * 40, 24 * 40]), min_size=12))
        known = draw(st.booleans())
        for hour, skew in zip(hours, skews, strict=False):
            snapshot = new_snapshot_id(begin + timedelta(hours=hour + skew))
            stored_unix = begin.timestamp() + hour * _HOUR
            sure = draw(st.integers(0, 3)) > 0
            taken.append(Taken(snapshot, stored_unix, sure, f"a-{number}", name if known else ""))
        if draw(st.booleans()):
            rented[name] = begin.timestamp() - _HOUR
    return taken, rented


@pytest.mark.rule(11)
@settings(max_examples=50)
@given(fleet=_fleets(), counts=_COUNTS, more=_COUNTS)
def test_no_machines_newest_goes_and_what_is_left_is_left_again(
    fleet: tuple[list[Taken], dict[str, float]], counts: list[int], more: list[int]
) -> None:
    taken, rented = fleet
    short = Retention(*counts)
    longer = Retention(*map(sum, zip(counts, more, strict=True)))
    days = {"hourly": 1 / 24, "daily": 1, "weekly": 7, "monthly": 31, "yearly": 366}
    window_s = 24 * _HOUR * max(days[rule] * getattr(short, rule) for rule in days)
    latest_unix = max(snapshot.stored_unix for snapshot in taken)

    def kept(some: list[Taken], retention: Retention) -> set[SnapshotId]:
        return {*_kept(some, retention, rented=rented)}

    left = kept(taken, short)
    for agent in {snapshot.agent for snapshot in taken}:
        own = [snapshot for snapshot in taken if snapshot.agent == agent]
        within = any(latest_unix - snapshot.stored_unix <= window_s for snapshot in own)
        if within or agent.replace("a", "m") in rented:
            assert max(snapshot.snapshot for snapshot in own) in left
            sure = [snapshot.snapshot for snapshot in own if snapshot.verified]
            assert not sure or max(sure) in left
    assert left <= kept(taken, longer)
    assert max(snapshot.snapshot for snapshot in taken) in left
    # what is left is left again: a second run deletes nothing more
    assert kept([snapshot for snapshot in taken if snapshot.snapshot in left], short) == left
