"""Load, chaos and soak of a real installation over fake markets.

    python -m tests.load.campaign --jobs 100 [--strikes 12] [--database postgres]
    python -m tests.load.campaign --minutes 30 [--database postgres]

Without strikes, the order of the queues is judged, too. ``--minutes``: mixed flows one after the
other instead of jobs. With ``--database sqlite postgres``, all is done with each, side by side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from deployments import database
from deployments.schedules import WATCH
from tests.campaign.command import Command, Found, Given, Violations
from tests.fixtures.own_installation import Alone, installed_alone
from tests.fixtures.postgres import Postgres, running_postgres
from tests.fixtures.prefect_server import talking_to
from tests.fixtures.waiting import PATIENCE_S, until
from tests.load.crowd import LOOK_S, QUEUES, Crowd, gathered
from tests.load.meter import ROLES, Meter, metered
from tests.load.soak import soak
from tests.load.strikes import Strikes
from tests.markets.boot import Machines, unfit
from tests.markets.every import Markets, opened_markets
from tests.unattended.story import switch_on
from torpor.control.measure.host import host_facts

WATCH_S: Final = 120
STRUCK_WATCH_S: Final = 30
"""As users have it, and sooner where jobs wait for it."""
WORKS_S: Final = 15.0
STRUCK_S: Final = 60.0
"""How long a command works; where it may be struck, it leaves time for that."""


def run_crowd(crowd: Crowd, strikes: Strikes, number: int, works_s: float) -> None:
    """Submit the jobs, strike while they run, and judge them once all have ended."""
    chaos = strikes.left > 0
    crowd.submit(number, works_s)
    since, over = time.monotonic(), 0
    while not crowd.look():
        strikes.look()
        if over != (over := sum(task.over for task in crowd.tasks)):
            since = time.monotonic()
            print(f"     {over} of {number} jobs have ended", flush=True)
        if time.monotonic() > since + PATIENCE_S:
            crowd.violations.add(f"no job has ended for {PATIENCE_S:.0f} s")
            break
        time.sleep(LOOK_S)
    open_states = ("RUNNING", "PENDING", "CANCELLING", "SCHEDULED")
    until(
        lambda: not [run for run in crowd.runs() if run["state_type"] in open_states],
        "no run of a job is left open",
        every_s=LOOK_S,
    )
    crowd.judge(ordered=not chaos)


def figures(crowd: Crowd, meter: Meter) -> dict[str, Any]:
    found = crowd.runs()
    jobs, runs = len(crowd.tasks), [run["id"] for run in found]
    to_gpu = [task.to_gpu_s for task in crowd.tasks if task.to_gpu_s is not None]
    waited = {
        queue: [t.taken_unix - t.submitted_unix for t in crowd.tasks if t.queue == queue]
        for queue in QUEUES
    }
    every = [wait for waits in waited.values() for wait in waits]
    taken = [t.to_gpu_s - t.taken_unix + t.submitted_unix for t in crowd.tasks if t.to_gpu_s]
    ended = [task.job.ended_unix or 0.0 for task in crowd.tasks if task.job]
    losses = crowd.preempted.total()
    return {
        "jobs": jobs,
        "minutes to the end of all": (max(ended) - crowd.tasks[0].submitted_unix) / 60,
        "wait in the queue, p50 / p95, s": _p50_p95(every),
        **{f"wait in {queue}, median, s": _median(waits) for queue, waits in waited.items()},
        "submission to GPU, p50 / p95, s": _p50_p95(to_gpu),
        "slot to GPU, p50 / p95, s": _p50_p95(taken),
        "CPU of the runs of a job, s": sum(one.cpu_s for one in meter.of(*runs)) / jobs,
        "memory of a run, median of the most, MiB": _median(
            [one.most_mib for one in meter.of(*runs)]
        ),
        **{
            f"{role}: CPU for each job, s / most memory, MiB": [
                sum(one.cpu_s for one in meter.of(role)) / jobs,
                max((one.most_mib for one in meter.of(role)), default=0.0),
            ]
            for role in ROLES
        },
        "machines that were preempted / whose job recovered": [losses, crowd.recovered],
        "runs of jobs": " ".join(
            f"{count} {state}"
            for state, count in sorted(Counter(run["state_name"] for run in found).items())
        ),
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _p50_p95(values: list[float]) -> list[float]:
    return [statistics.quantiles(values * 2, n=20, method="inclusive")[n] for n in (9, 18)]


@contextmanager
def installed(on: str) -> Iterator[tuple[Alone, Postgres | None]]:
    """An installation with that database, to whose server this process talks."""
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres()) if on == "postgres" else None
        alone = stack.enter_context(installed_alone())
        stack.enter_context(patch.dict(os.environ))
        if postgres is not None:
            os.environ["PGPASSFILE"] = str(postgres.passfile)
            database.choose(alone.installation, postgres.url())
        alone.up()
        env = alone.environment()
        os.environ.update({name: env[name] for name in env if name.startswith("PREFECT_")})
        stack.enter_context(talking_to(alone.installation, alone.server))
        yield alone, postgres


@contextmanager
def fake_markets() -> Iterator[Markets]:
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    machines = Machines(folder)
    try:
        with opened_markets(machines) as markets:
            yield markets
    finally:
        machines.end()
        shutil.rmtree(folder, ignore_errors=True)


def _carry_out(seed: int, jobs: int, given: Given) -> Found:
    violations, reports = Violations(), {}
    for on in given.database:
        with installed(on) as (alone, postgres):
            switch_on(alone.server, WATCH, STRUCK_WATCH_S if given.strikes else WATCH_S, {})
            if given.minutes:
                reports[on] = soak(alone, given.minutes, violations)
                continue
            with (
                fake_markets() as markets,
                gathered(alone, markets, jobs, seed) as crowd,
                metered(alone.installation) as meter,
            ):
                strikes = Strikes(crowd, given.strikes, postgres)
                works_s = given.works or (STRUCK_S if given.strikes else WORKS_S)
                run_crowd(crowd, strikes, jobs, works_s)
                violations += crowd.violations
                reports[on] = {
                    "figures": figures(crowd, meter),
                    "struck": dict(strikes.struck),
                    "runs": [_told(run) for run in crowd.runs()],
                }
    _tell({on: told["figures"] for on, told in reports.items()})
    what = f"{given.minutes} minutes" if given.minutes else f"{jobs} jobs, {given.strikes} strikes"
    again = f"--jobs {jobs} --strikes {given.strikes} --minutes {given.minutes}"
    return Found(
        f"{what} on {' and '.join(reports)}",
        violations,
        {"host": host_facts(), **reports},
        [f"{again} --database {' '.join(given.database)}"],
    )


def _told(run: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "work_queue_name", "state_name", "created", "start_time", "end_time")
    return {name: run[name] for name in names} | {"said": run["state"]["message"]}


def _tell(found: dict[str, dict[str, Any]]) -> None:
    """A table of the figures, a column for each database."""
    print("\n| | " + " | ".join(found) + " |\n|" + "---|" * (1 + len(found)))
    for name in next(iter(found.values())):
        cells = [_text(of[name]) for of in found.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " / ".join(map(_text, value))
    return str(value) if isinstance(value, int | str) else f"{value:.1f}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strikes", type=int, default=0, help="faults while the jobs run")
    parser.add_argument("--works", type=float, help="seconds that each command works")
    parser.add_argument("--minutes", type=float, default=0.0, help="a soak of that length instead")
    parser.add_argument("--database", nargs="+", choices=("sqlite", "postgres"), default=["sqlite"])


COMMAND: Final = Command("tests.load.campaign", "jobs", 100, _carry_out, _options, unfit)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
