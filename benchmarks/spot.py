"""Jobs on spot machines, on a simulated clock over traces of real ones: cost and time.

    python -m benchmarks.spot [--traces FOLDER] [--starts 100] [--keep NAME]

Without --traces, git fetches the traces from GitHub. When a job saves, and what becomes of it after
a loss, is decided by torpor's own policy, on the records that jobs have. The times of a machine are
stated, not measured: see ``Times``. The traces have no prices: a spot machine costs SPOT_SHARE of
the same one on demand.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from benchmarks.kept import write_result
from benchmarks.spot_traces import URL, Zone, traces
from torpor.control.jobs.policy import Spot, is_hopeless, save_interval_s, spot_for, wait_s
from torpor.control.jobs.records import Attempt, Job
from torpor.control.measure.host import host_facts
from torpor.shared.values import MachineId, WorkspaceName

HOURS: Final = (24, 48, 96)
HOUR_S: Final = 3600.0
SPOT_SHARE: Final = 0.3
SAVE_MINUTES: Final = 30.0
MOST_S: Final = 60 * 24 * HOUR_S
"""A job that has not ended by then counts as unfinished."""
GROUPS: Final = {
    "8 x V100, 2 zones, 27 days": "availability/1-node/aws-10-26-2022/*_v100_8.json",
    "1 x V100, 9 zones, 45 days": "availability/1-node/aws-02-15-2023/*_v100_1.json",
}


class Times(NamedTuple):
    """The times of a machine, in seconds."""

    wake_s: float = 300.0  # from the request until the command runs
    save_s: float = 60.0  # from reading the files until the snapshot is verified
    end_s: float = 120.0  # the last hibernation
    seen_s: float = 60.0  # until a loss is noticed
    notice_s: float = 0.0  # before a loss; a save begins then


Saves = Literal["by the policy", "at even intervals", "never"]


class Way(NamedTuple):
    """How a job is run."""

    name: str
    spot: Spot
    saves: Saves = "by the policy"
    times: Times = Times()
    gives_up: bool = True


NOTICED: Final = Times(notice_s=120.0)
WAYS: Final = (
    Way("on demand", "never"),
    Way("spot only", "only"),
    Way("spot only, 2 min notice", "only", times=NOTICED),
    Way("spot allowed", "allowed"),
    Way("spot allowed, 2 min notice", "allowed", times=NOTICED),
    Way("spot only, a save every 30 min", "only", "at even intervals"),
    Way("spot only, restarted without saves", "only", "never", gives_up=False),
    Way("spot allowed, without saves", "allowed", "never"),
)


class Outcome(NamedTuple):
    state: str
    took_s: float
    spot_s: float
    on_demand_s: float
    lost_s: float
    attempts: int

    def cost(self) -> float:
        """In hours of the machine on demand."""
        return (self.on_demand_s + SPOT_SHARE * self.spot_s) / HOUR_S


def simulate(zones: Sequence[Zone], begin_s: float, work_s: float, way: Way) -> Outcome:
    """One job that needs ``work_s`` of work, begun at ``begin_s`` of the traces."""
    times, now_s, done_s, lost_s = way.times, begin_s, 0.0, 0.0
    rented = {True: 0.0, False: 0.0}
    refusals = 0
    job = Job(
        id="0" * 12,
        workspace=WorkspaceName("demo"),
        block="demo",
        command=["train"],
        save_minutes=SAVE_MINUTES,
        spot=way.spot,
        created_unix=begin_s,
    )

    def ended(state: str) -> Outcome:
        took_s = now_s - begin_s
        return Outcome(state, took_s, rented[True], rented[False], lost_s, len(job.attempts))

    while now_s - begin_s < MOST_S:
        if way.gives_up and is_hopeless(job):
            return ended("preempted")
        wanted = spot_for(job)
        zone = next((zone for zone in zones if wanted != "never" and zone.is_up(now_s)), None)
        if zone is None and wanted == "only":
            refusals += 1
            now_s += wait_s(refusals)
            continue
        refusals = 0
        spot = zone is not None
        gone_s = zone.lost_at_s(now_s) if zone is not None else math.inf
        began_s = now_s + times.wake_s
        finish_s = began_s + work_s - done_s + times.end_s
        if finish_s <= gone_s:
            rented[spot] += finish_s - now_s
            job = _with(job, _attempt(job, spot, began_s))
            now_s = finish_s
            return ended("succeeded")
        rented[spot] += gone_s - now_s
        now_s = gone_s + times.seen_s
        if gone_s <= began_s:  # the wake failed, and the command never began
            continue
        worked_s = min(gone_s - began_s, work_s - done_s)
        kept_s = min(_kept_s(job, spot, gone_s - began_s, way), worked_s)
        job = _with(job, _attempt(job, spot, began_s))
        job = job.with_attempt(
            end="machine lost", saved=kept_s > 0, seen_unix=gone_s, ended_unix=now_s
        )
        done_s += kept_s
        lost_s += worked_s - kept_s
    return ended("unfinished")


def _kept_s(job: Job, spot: bool, up_s: float, way: Way) -> float:
    """The work in the newest save of a command that began so long before its machine was lost."""
    if way.saves == "never":
        return 0.0
    kept_s = 0.0
    for begun in itertools.count():
        interval_s = save_interval_s(job, spot and way.saves == "by the policy", begun)
        if kept_s + interval_s + way.times.save_s > up_s:
            break
        kept_s += interval_s
    if way.times.notice_s >= way.times.save_s:
        kept_s = max(kept_s, up_s - way.times.notice_s)
    return kept_s


def _attempt(job: Job, spot: bool, began_s: float) -> Attempt:
    return Attempt(
        number=len(job.attempts) + 1,
        machine=MachineId("m"),
        provider="trace",
        rental="r",
        spot=spot,
        price_usd_h=SPOT_SHARE if spot else 1.0,
        began_unix=began_s,
        seen_unix=began_s,
    )


def _with(job: Job, attempt: Attempt) -> Job:
    return msgspec.structs.replace(job, attempts=[*job.attempts, attempt])


def measure(groups: dict[str, list[Zone]], starts: int) -> list[dict[str, Any]]:
    """A row for each group, choice of zones, length and way."""
    rows = []
    for (group, zones), hours in itertools.product(groups.items(), HOURS):
        for choice, sets in (("one zone", [[zone] for zone in zones]), ("any zone", [zones])):
            for way in WAYS:
                found = [
                    simulate(chosen, start * chosen[0].seconds / starts, hours * HOUR_S, way)
                    for chosen in sets
                    for start in range(starts)
                ]
                rows.append({"group": group, "zones": choice, **_row(hours, way, found)})
    return rows


def _row(hours: int, way: Way, found: Sequence[Outcome]) -> dict[str, Any]:
    """Time and cost are those of the jobs that succeeded, over the same on demand."""
    alone_s = way.times.wake_s + hours * HOUR_S + way.times.end_s
    done = [outcome for outcome in found if outcome.state == "succeeded"]
    return {
        "hours": hours,
        "way": way.name,
        "n": len(found),
        "succeeded": len(done),
        "preempted": sum(outcome.state == "preempted" for outcome in found),
        "time": _spread([outcome.took_s / alone_s for outcome in done]),
        "cost": _spread([outcome.cost() * HOUR_S / alone_s for outcome in done]),
        "cost_of_preempted": _spread(
            [outcome.cost() * HOUR_S / alone_s for outcome in found if outcome.state == "preempted"]
        ),
        "lost_h": _spread([outcome.lost_s / HOUR_S for outcome in done]),
        "attempts": _spread([float(outcome.attempts) for outcome in done]),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "n": len(values),
        "median": statistics.median(values),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "min": ordered[0],
        "max": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="a folder that has the repository's files")
    parser.add_argument("--starts", type=int, default=100, help="jobs for each set of zones")
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with traces(options.traces) as (folder, commit):
        groups = {
            name: [Zone.read(path) for path in sorted(folder.glob(pattern))]
            for name, pattern in GROUPS.items()
        }
    if missing := [name for name, zones in groups.items() if not zones]:
        raise SystemExit(f"the folder has no traces of {', '.join(missing)}: see {URL}")
    rows = measure(groups, options.starts)
    _print(groups, rows)
    if options.keep:
        result = {
            "benchmark": "spot",
            "host": host_facts(),
            "traces": {"url": URL, "commit": commit, "files": GROUPS},
            "share_up": {
                group: {zone.name: zone.share_up for zone in zones}
                for group, zones in groups.items()
            },
            "spot_share_of_price": SPOT_SHARE,
            "stated_s": {way.name: way.times._asdict() for way in WAYS},
            "save_minutes": SAVE_MINUTES,
            "rows": rows,
        }
        print(f"kept as {write_result(options.keep, result)}")


def _print(groups: dict[str, list[Zone]], rows: list[dict[str, Any]]) -> None:
    for group, zones in groups.items():
        print(group + ": up " + ", ".join(f"{zone.name} {zone.share_up:.0%}" for zone in zones))
    print("time and cost of the jobs that succeeded, over the same job on demand: median and p95")
    header: tuple[str, ...] = ()
    for row in rows:
        if header != (header := (row["group"], row["zones"], f"{row['hours']} h of work")):
            print("\n" + ", ".join(header))
        print(
            f"{row['way']:36}{100 * row['succeeded'] / row['n']:>5.3g} % done{_pair(row['time'])}"
            f"{_pair(row['cost'])}{_pair(row['lost_h'])} h lost"
        )


def _pair(spread: dict[str, float] | None) -> str:
    return " " * 16 if spread is None else f"{spread['median']:>9.2f}{spread['p95']:>7.2f}"


if __name__ == "__main__":
    main()
