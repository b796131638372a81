"""The simulation of spot machines, on traces whose results were computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.spot import HOURS, SPOT_SHARE, WAYS, Times, Way, measure, simulate
from benchmarks.spot_traces import Zone, traces

TICK_S = 600.0
WORK_S = 3600.0


def zone(ticks: str) -> Zone:
    """``#``: up for ten minutes."""
    return Zone("z", TICK_S, [tick == "#" for tick in ticks])


ALWAYS, DOWN = zone("#"), zone(".")
# Up for an hour, then down for twenty minutes.
HOUR_UP = zone("######..")
ONLY = Way("only", "only")


def test_a_zone_says_when_a_machine_is_lost() -> None:
    market = zone("##.#")
    assert [market.is_up(at_s) for at_s in (0, 1199, 1200, 1799, 1800, 2400)] == [
        True, True, False, False, True, True,
    ]  # fmt: skip
    assert [market.lost_at_s(at_s) for at_s in (0, 1199, 1800, 2400)] == [1200, 1200, 3600, 3600]
    assert (market.seconds, market.share_up) == (2400, 0.75)


def test_on_demand_is_never_lost() -> None:
    found = simulate([DOWN], 0, WORK_S, Way("on demand", "never"))
    assert (found.state, found.took_s, found.spot_s) == ("succeeded", 4020, 0)
    assert (found.on_demand_s, found.cost(), found.attempts) == (4020, 4020 / 3600, 1)


def test_an_hour_of_work_over_one_loss() -> None:
    """Woken in 300 s; saves begin 180, 540, 1260 and 2700 s after that. The machine is lost at
    3600, so 3300 s of work were done and 2700 kept, and the loss is seen at 3660. At 4800 the zone
    is up again; looks are at 3660, 3720, 3840, 4140 and 4740, so the next one is at 5340. The
    remaining 900 s end at 5340 + 300 + 900 + 120 = 6660."""
    found = simulate([HOUR_UP], 0, WORK_S, ONLY)
    assert (found.state, found.took_s, found.attempts) == ("succeeded", 6660, 2)
    assert (found.lost_s, found.spot_s, found.on_demand_s) == (600, 3600 + 1320, 0)
    assert found.cost() == pytest.approx(SPOT_SHARE * 4920 / 3600)


def test_a_notice_keeps_all_but_its_own_seconds() -> None:
    found = simulate([HOUR_UP], 0, WORK_S, Way("n", "only", times=Times(notice_s=120)))
    assert found.lost_s == 120
    assert found.took_s == 5340 + 300 + 420 + 120


def test_even_saves_lose_more() -> None:
    """The only save begins 1800 s after the command."""
    found = simulate([HOUR_UP], 0, WORK_S, Way("even", "only", "at even intervals"))
    assert found.lost_s == 1500
    assert found.took_s == 5340 + 300 + 1800 + 120


def test_without_saves_a_job_starts_from_zero_each_time_and_may_never_end() -> None:
    way = Way("none", "only", "never", gives_up=False)
    assert simulate([HOUR_UP], 0, WORK_S, way).state == "unfinished"
    found = simulate([zone("######..########")], 0, WORK_S, way)
    assert (found.state, found.lost_s, found.took_s) == ("succeeded", 3300, 5340 + 4020)


def test_the_policy_gives_up_after_three_losses_without_progress() -> None:
    """A save takes longer than each machine is up. They are rented at 0, 2340 and 4140, and lost at
    1200, 3000 and 4800."""
    slow = Way("slow", "only", times=Times(save_s=890))
    found = simulate([zone("##.")], 0, WORK_S, slow)
    assert (found.state, found.attempts, found.took_s) == ("preempted", 3, 4860)
    assert (found.spot_s, found.on_demand_s) == (1200 + 660 + 660, 0)


def test_allowed_goes_on_demand_without_an_offer_and_after_two_losses() -> None:
    allowed = Way("a", "allowed")
    at_once = simulate([HOUR_UP], 3600, WORK_S, allowed)
    assert (at_once.spot_s, at_once.on_demand_s) == (0, 4020)
    other = zone("######..######..........")
    found = simulate([HOUR_UP, other], 0, WORK_S, allowed)
    # lost at 3600 with 2700 s kept, and seen at 3660, when no zone is up
    assert (found.spot_s, found.on_demand_s) == (3600, 300 + 900 + 120)
    slow = Way("slow", "allowed", times=Times(save_s=890))
    twice = simulate([zone("##."), zone("..#")], 0, WORK_S, slow)
    # lost at 1200 and 1800, without a save; at 1860 a zone is up, and is not used
    assert (twice.spot_s, twice.on_demand_s, twice.attempts) == (1200 + 540, 4020, 3)


def test_a_machine_that_is_lost_while_it_wakes_is_paid_for_and_no_attempt() -> None:
    way = Way("w", "only", times=Times(wake_s=900))
    found = simulate([zone("#.######")], 0, 600, way)
    assert found.attempts == 1
    assert found.spot_s == 600 + 900 + 600 + 120


def test_all_ways_are_measured_on_every_group() -> None:
    rows = measure({"g": [HOUR_UP, ALWAYS]}, starts=2)
    assert len(rows) == 2 * len(HOURS) * len(WAYS)
    for row in rows:
        assert row["n"] == (4 if row["zones"] == "one zone" else 2)
        if row["way"] == "on demand":
            assert row["time"]["median"] == row["cost"]["p95"] == 1


def test_traces_are_read_from_a_folder_and_their_commit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "us-west-2a_v100_8.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 0, 16]}))
    with traces(tmp_path) as (folder, commit):
        read = Zone.read(folder / path.name)
    assert (read.name, read.seconds, read.share_up) == ("us-west-2a", 1800, pytest.approx(2 / 3))
    assert commit


def test_traces_that_cannot_be_fetched_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.spot_traces.URL", "file:///nowhere/spot-traces")
    told = r"(?s)cannot be fetched from file:///nowhere.*name their folder with --traces"
    with pytest.raises(SystemExit, match=told), traces(None):
        raise AssertionError("it was fetched")
