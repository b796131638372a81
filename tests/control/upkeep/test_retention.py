"""What a retention keeps and lets go, by restic's rules."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.control.upkeep.retention import Judged, Retention, Taken
from torpor.control.upkeep.retention import judge as judge_taken
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId, made_at, new_snapshot_id


def _at(text: str, mark: str = "00000000") -> SnapshotId:
    return SnapshotId(f"{text.replace('-', '').replace(':', '').replace(' ', 'T')}Z-{mark}")


def _taken(
    snapshot: SnapshotId, agent: str = "a", machine: str = "", *, verified: bool = True
) -> Taken:
    return Taken(snapshot, made_at(snapshot).timestamp(), verified, agent, machine)


def judge(
    snapshots: list[SnapshotId],
    retention: Retention,
    pinned: Mapping[SnapshotId, str],
    saves: Mapping[SnapshotId, str] = {},
) -> list[Judged]:
    """The verdicts on the verified snapshots of one machine."""
    return judge_taken([_taken(one) for one in snapshots], retention, pinned, saves)


def _kept(snapshots: list[SnapshotId], retention: Retention) -> dict[SnapshotId, list[str]]:
    return {one.snapshot: one.reasons for one in judge(snapshots, retention, {}) if one.kept}


def test_the_time_of_a_snapshot_stands_in_its_id() -> None:
    assert made_at(_at("2026-11-20 23:49:13")) == datetime(
        2026, 11, 20, 23, 49, 13, tzinfo=timezone.utc
    )


def test_last_keeps_the_newest_so_many() -> None:
    days = [_at(f"2026-11-{day:02} 12:00:00") for day in range(1, 8)]
    random.Random(1).shuffle(days)
    assert sorted(_kept(days, Retention(last=3))) == sorted(days)[-3:]
    assert len(_kept(days, Retention(last=100))) == 7


def test_of_each_period_the_newest_is_kept_and_empty_periods_do_not_count() -> None:
    taken = [
        _at("2026-01-05 10:00:00"),
        _at("2026-01-05 22:00:00"),
        _at("2026-03-01 08:00:00"),  # nothing for weeks
        _at("2026-03-02 08:00:00"),
        _at("2026-03-02 09:30:00"),
        _at("2026-03-02 09:45:00"),
    ]
    daily = _kept(taken, Retention(daily=3))
    assert daily == {
        taken[5]: ["newest", "daily 2026-03-02"],
        taken[2]: ["daily 2026-03-01"],
        taken[1]: ["daily 2026-01-05"],
    }
    hourly = _kept(taken, Retention(hourly=2))
    assert list(hourly) == [taken[5], taken[3]]
    assert list(_kept(taken, Retention(monthly=2))) == [taken[5], taken[1]]


def test_rules_look_at_all_snapshots_each_on_its_own() -> None:
    """In borg, what ``last`` keeps would not count for ``daily``."""
    taken = [_at(f"2026-11-{day:02} 12:00:00") for day in range(1, 11)]
    kept = _kept(taken, Retention(last=2, daily=3))
    assert list(kept) == taken[:-4:-1]
    assert kept[taken[-1]] == ["newest", "last", "daily 2026-11-10"]


def test_a_rule_that_is_not_full_keeps_the_oldest_too() -> None:
    """As restic does: history reaches back as far as it can."""
    taken = [_at("2026-11-02 12:00:00"), _at("2026-11-20 12:00:00"), _at("2026-11-28 12:00:00")]
    assert list(_kept(taken, Retention(monthly=2))) == [taken[2], taken[0]]
    assert list(_kept(taken, Retention(monthly=1))) == [taken[2]]


def test_weeks_begin_on_monday_and_belong_to_iso_years() -> None:
    sunday, monday = _at("2027-01-03 12:00:00"), _at("2027-01-04 12:00:00")
    first = _at("2026-12-28 12:00:00")  # Monday of 2026's week 53, which ends on that Sunday
    kept = _kept([first, sunday, monday], Retention(weekly=2))
    assert kept == {monday: ["newest", "weekly 2027-W01"], sunday: ["weekly 2026-W53"]}


def test_days_begin_where_the_user_is() -> None:
    late, early = _at("2026-11-20 22:30:00"), _at("2026-11-20 23:30:00")  # 23:30 and 0:30 in Berlin
    assert list(_kept([late, early], Retention(daily=2))) == [early, late]  # full: the oldest too
    older = _at("2026-10-01 12:00:00")
    assert list(_kept([older, late, early], Retention(daily=2))) == [early, older]
    berlin = Retention(daily=2, timezone="Europe/Berlin")
    assert list(_kept([older, late, early], berlin)) == [early, late]


def test_an_hour_that_the_clock_repeats_counts_as_two() -> None:
    first, second = _at("2026-10-25 00:30:00"), _at("2026-10-25 01:30:00")  # both 2:30 in Berlin
    older = _at("2026-10-01 12:00:00")
    kept = _kept([older, first, second], Retention(hourly=2, timezone="Europe/Berlin"))
    assert list(kept) == [second, first]


def test_without_a_rule_everything_stays() -> None:
    taken = [_at(f"2026-11-{day:02} 12:00:00") for day in (1, 2)]
    assert _kept(taken, Retention()) == {
        taken[1]: ["newest", "no retention is set"],
        taken[0]: ["no retention is set"],
    }
    assert judge([], Retention(last=1), {}) == []


def test_the_newest_and_the_pinned_stay_and_use_up_no_rule() -> None:
    taken = [_at(f"2026-11-{day:02} 12:00:00") for day in range(1, 6)]
    verdicts = judge(taken, Retention(last=2), {taken[0]: "the paper"})
    assert {one.snapshot: one.reasons for one in verdicts} == {
        taken[4]: ["newest", "last"],
        taken[3]: ["last"],
        taken[2]: [],
        taken[1]: [],
        taken[0]: ["pinned: the paper"],
    }


def test_saves_of_an_open_job_stay_and_use_up_no_rule() -> None:
    """The job deletes them itself: a backup must not go because a save of its day is there."""
    backup, save = _at("2026-11-19 02:00:00"), _at("2026-11-19 23:00:00")
    today = [_at("2026-11-20 02:00:00"), _at("2026-11-20 03:00:00")]
    verdicts = judge([backup, save, *today], Retention(daily=2), {}, {save: "3f2a9c81d04e"})
    assert {one.snapshot: one.reasons for one in verdicts} == {
        today[1]: ["newest", "daily 2026-11-20"],
        today[0]: [],
        save: ["save of job 3f2a9c81d04e"],
        backup: ["daily 2026-11-19"],
    }


def test_two_snapshots_of_one_second_are_two() -> None:
    one, other = _at("2026-11-20 12:00:00", "00000001"), _at("2026-11-20 12:00:00", "00000002")
    assert len(_kept([one, other], Retention(last=2))) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"daily": -1}, "keep_daily is -1"),
        ({"last": 10_001}, "keep_last is 10001"),
        ({"timezone": "Europe/Atlantis"}, "'Europe/Atlantis' is not a time zone"),
        ({"timezone": "../etc/passwd"}, "is not a time zone"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Retention(**options)  # type: ignore[arg-type]


def test_the_snapshots_of_one_machine_displace_none_of_another_machines() -> None:
    ours = [_at(f"2026-11-{day:02} 02:00:00") for day in (18, 19, 20)]
    theirs = [_at(f"2026-11-{day:02} 03:00:00") for day in (18, 19, 20, 21, 22)]
    taken = [_taken(one, "a", "m-1") for one in ours] + [_taken(one, "b", "m-2") for one in theirs]
    verdicts = judge_taken(taken, Retention(daily=2), {}, {}, {"m-1": 0.0, "m-2": 0.0})
    assert {one.snapshot: one.reasons for one in verdicts if one.kept} == {
        theirs[4]: ["newest", "daily 2026-11-22"],
        theirs[3]: ["daily 2026-11-21"],
        ours[2]: ["newest of machine m-1", "daily 2026-11-20 of machine m-1"],
        ours[1]: ["daily 2026-11-19 of machine m-1"],
    }


def test_an_ended_machine_out_of_the_window_is_not_judged_alone() -> None:
    """It was hibernated, and its work went on elsewhere."""
    old, new = _at("2026-10-01 12:00:00"), _at("2026-11-20 12:00:00")
    taken = [_taken(old, "a", "m-1"), _taken(new, "b", "m-2")]

    def kept(retention: Retention, rented: dict[str, float]) -> list[SnapshotId]:
        return [one.snapshot for one in judge_taken(taken, retention, {}, {}, rented) if one.kept]

    assert kept(Retention(daily=1), {"m-2": 0.0}) == [new]
    assert kept(Retention(daily=1), {"m-1": 0.0, "m-2": 0.0}) == [new, old]  # rented
    assert kept(Retention(daily=1, weekly=1), {}) == [new]
    assert kept(Retention(daily=1, monthly=2), {}) == [new, old]  # within two months
    assert kept(Retention(last=1), {}) == [new]  # a month counts


def test_what_was_stored_last_stays_though_a_clock_that_was_behind_named_it_older() -> None:
    """Without it, the next run would find the machine out of the window, and delete the rest."""
    first, behind, newest = (_at(f"2026-10-{day} 12:00:00") for day in ("01", "10", "15"))
    stored_unix = made_at(_at("2026-11-01 12:00:00")).timestamp()
    taken = [
        _taken(first, "a", "m-1"),
        _taken(newest, "a", "m-1"),
        Taken(behind, stored_unix, verified=True, agent="a", machine="m-1"),
        _taken(_at("2026-12-20 12:00:00"), "b", "m-2"),
    ]
    verdicts = judge_taken(taken, Retention(monthly=2), {})
    assert {one.snapshot: one.reasons for one in verdicts if one.snapshot == behind} == {
        behind: ["stored last of machine m-1"]
    }
    left = [one for one in taken if any(v.kept for v in verdicts if v.snapshot == one.snapshot)]
    assert all(one.kept for one in judge_taken(left, Retention(monthly=2), {}))


def test_a_machine_that_no_snapshot_names_may_be_the_one_that_is_rented() -> None:
    """Snapshots of older versions have no receipt that names their machine."""
    old, new = _at("2026-10-01 12:00:00"), _at("2026-11-20 12:00:00")
    taken = [_taken(old, "a"), _taken(new, "b", "m-2")]
    before = made_at(old).timestamp() - 1
    for rented, stays in (
        ({"m-1": before}, True),
        ({"m-1": before + 2}, False),  # asked for since
        ({"m-2": before}, False),  # known to be another one
    ):
        verdicts = judge_taken(taken, Retention(daily=1), {}, {}, rented)
        assert [one.kept for one in verdicts] == [True, stays], rented


def test_an_unverified_snapshot_displaces_no_verified_one_and_ages_itself() -> None:
    days = [_at(f"2026-11-{day:02} 12:00:00") for day in (16, 17, 18, 19, 20)]
    sure = {days[1], days[3]}
    taken = [_taken(one, verified=one in sure) for one in days]
    verdicts = judge_taken(taken, Retention(last=2), {})
    assert {one.snapshot: one.reasons for one in verdicts} == {
        days[4]: ["newest", "last"],
        days[3]: ["newest verified", "last"],
        days[2]: [],
        days[1]: ["last"],
        days[0]: [],
    }


def test_a_machine_that_lies_about_itself_displaces_nothing_of_another() -> None:
    ours, lies = _at("2026-11-19 12:00:00"), _at("2026-11-20 12:00:00")
    taken = [_taken(ours, "a", "m-1"), _taken(lies, "a", "m-2")]
    assert all(one.kept for one in judge_taken(taken, Retention(last=1), {}))


def test_a_snapshot_that_cannot_be_read_stays() -> None:
    """Unknown is not superfluous."""
    older, newer = _at("2026-11-19 12:00:00"), _at("2026-11-20 12:00:00")
    verdicts = judge_taken(
        [_taken(older, "", verified=False), _taken(newer)], Retention(last=1), {}
    )
    assert verdicts[1].reasons == ["its manifest cannot be read"]


@settings(max_examples=200)
@given(
    hours=st.lists(st.integers(0, 24 * 400), max_size=60),
    counts=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_snapshots_that_must_stay_are_kept(hours: list[int], counts: list[int], seed: int) -> None:
    begin = datetime(2025, 1, 1, tzinfo=timezone.utc)
    taken = [new_snapshot_id(begin + timedelta(hours=hour)) for hour in hours]
    retention = Retention(*counts)
    pinned = {one: "why" for one in taken if random.Random(f"{seed}{one}").random() < 0.1}
    verdicts = judge(taken, retention, pinned)
    assert [one.snapshot for one in verdicts] == sorted(taken, reverse=True)
    kept = [one.snapshot for one in verdicts if one.kept]
    assert set(pinned) <= set(kept)
    assert not taken or max(taken) in kept
    assert set(sorted(taken)[-counts[0] :] if counts[0] else []) <= set(kept)
    days = sorted({one[:8] for one in taken}, reverse=True)[: counts[2]]
    for day in days:
        assert max(one for one in taken if one[:8] == day) in kept
    if any(counts):
        assert len(kept) <= sum(counts) + len(pinned) + 1
    # what is left is left again: a second run deletes nothing more
    assert all(one.kept for one in judge(kept, retention, pinned))


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


@settings(max_examples=300)
@given(fleet=_fleets(), counts=_COUNTS, more=_COUNTS)
def test_no_machines_newest_goes_and_each_is_judged_as_if_it_were_alone(
    fleet: tuple[list[Taken], dict[str, float]], counts: list[int], more: list[int]
) -> None:
    taken, rented = fleet
    short = Retention(*counts)
    longer = Retention(*(one + other for one, other in zip(counts, more, strict=True)))
    days = {"hourly": 1 / 24, "daily": 1, "weekly": 7, "monthly": 31, "yearly": 366}
    window_s = 24 * _HOUR * max(days[rule] * getattr(short, rule) for rule in days)
    latest_unix = max(one.stored_unix for one in taken)

    def kept(some: list[Taken], retention: Retention) -> set[SnapshotId]:
        return {one.snapshot for one in judge_taken(some, retention, {}, {}, rented) if one.kept}

    left = kept(taken, short)
    for agent in {one.agent for one in taken}:
        own = [one for one in taken if one.agent == agent]
        within = any(latest_unix - one.stored_unix <= window_s for one in own)
        if within or agent.replace("a", "m") in rented:
            assert max(one.snapshot for one in own) in left
            sure = [one.snapshot for one in own if one.verified]
            assert not sure or max(sure) in left
            assert kept(own, short) <= left
    assert left <= kept(taken, longer)
    assert max(one.snapshot for one in taken) in left
    # what is left is left again: a second run deletes nothing more
    assert kept([one for one in taken if one.snapshot in left], short) == left
