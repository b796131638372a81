"""How the database of `make up`'s server grows with a schedule of `watch`, and the server at rest.

    python -m benchmarks.growth [--days 7] [--every-s 120] [--runs 3] [--rest-s 60] [--keep NAME]

Real runs of `watch` show which rows a run adds. Copies of them, moved in time, fill a copy of the
database, and each simulated hour Prefect's own code deletes what is too old. The first day is
repeated without that. Prints JSON; --keep keeps it under benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.kept import write_result
from deployments import server
from deployments.down import down
from deployments.installation import CHECKOUT, Installation
from deployments.server import Server
from deployments.up import up
from torpor.control.measure.host import host_facts
from torpor.control.ports import free_ports
from torpor.control.supervision import LOCK, children_of, living

TABLES: Final = (
    "flow_run",
    "flow_run_state",
    "task_run",
    "task_run_state",
    "log",
    "artifact",
    "events",
    "event_resources",
)
SETTLE_S: Final = 15.0
"""Events and task runs are written some seconds after they happen."""
HOUR_S: Final = 3600
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME: Final = re.compile(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--every-s", type=int, default=120)
    parser.add_argument("--runs", type=int, default=3, help="real runs of watch")
    parser.add_argument("--rest-s", type=float, default=60.0)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.days, options.every_s, options.runs, options.rest_s)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(days: int, every_s: int, runs: int, rest_s: float) -> dict[str, Any]:
    """An installation of its own: at rest, then with runs of `watch`, then its simulated future."""
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        installation = Installation(Path(folder).resolve())
        try:
            used = up(installation, free_ports(1)[0])
            rest = at_rest(installation, rest_s)
            before = _ids(installation.database)
            for _ in range(runs):
                _watch(used)
            time.sleep(SETTLE_S)
        finally:
            down(installation, machines=True)
        template = _rows(installation.database, before)
        (installation.folder / "template.json").write_text(json.dumps(template))
        grown = {
            "kept": _grown(installation, used, 1, every_s, deletes=False),
            "deleted": _grown(installation, used, days, every_s, deletes=True),
        }
    return {
        "benchmark": "growth",
        "host": host_facts(),
        "every_s": every_s,
        "rows_per_run": {table: len(rows) / runs for table, rows in template.items()},
        "settings": server.SETTINGS,
        "at_rest": rest,
        "database_bytes_after_each_day": grown,
    }


def at_rest(installation: Installation, seconds: float) -> dict[str, dict[str, float]]:
    """Percent of one core and resident bytes of each role while nothing is asked for."""
    parent = living(installation.folder)
    pids = {**children_of(installation.folder), **({LOCK: parent.pid} if parent else {})}
    processes = {role: psutil.Process(pid) for role, pid in pids.items()}
    before = {role: _cpu_s(process) for role, process in processes.items()}
    time.sleep(seconds)
    return {
        role: {
            "cpu_percent": 100 * (_cpu_s(process) - before[role]) / seconds,
            "rss_bytes": process.memory_info().rss,
        }
        for role, process in processes.items()
    }


def grow(folder: Path, days: int, every_s: int, deletes: bool = True) -> list[int]:
    """Fill the database in ``folder``; its bytes after each day. In a process with its settings."""
    template: dict[str, list[Row]] = json.loads((folder / "template.json").read_text())
    runs = _by_run(template)
    began = datetime.fromisoformat(min(row["created"] for row in template["flow_run"]))
    database = folder / "prefect" / "prefect.db"
    after = []
    for hour in range(24 * days):
        with contextlib.closing(sqlite3.connect(database)) as opened:
            opened.execute("PRAGMA synchronous = OFF")
            for number in range(HOUR_S // every_s):
                moved = timedelta(hours=hour, seconds=number * every_s)
                _add(opened, runs[number % len(runs)], moved)
            opened.commit()
        if deletes:
            asyncio.run(_vacuum(began + timedelta(hours=hour + 1)))
        if hour % 24 == 23:
            with contextlib.closing(sqlite3.connect(database)) as opened:
                opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            after.append(database.stat().st_size)
    return after


def _grown(
    installation: Installation, used: Server, days: int, every_s: int, *, deletes: bool
) -> list[int]:
    folder = installation.folder / f"grown-{deletes}"
    (folder / "prefect").mkdir(parents=True)
    shutil.copy(installation.database, folder / "prefect")
    shutil.copy(installation.folder / "template.json", folder)
    script = "import json, sys\nfrom pathlib import Path\nfrom benchmarks.growth import grow\n"
    script += f"print(json.dumps(grow(Path({str(folder)!r}), {days}, {every_s}, {deletes})))"
    env = server.environment(installation, used) | server.SETTINGS
    env |= {"PREFECT_HOME": str(folder / "prefect")}
    env |= {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect/prefect.db"
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=CHECKOUT,
        env=env,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [int(number) for number in json.loads(done.stdout.splitlines()[-1])]


async def _vacuum(now: datetime) -> None:
    """What Prefect's service does every hour, at that time."""
    from prefect.server.database import provide_database_interface
    from prefect.server.services import db_vacuum

    vars(db_vacuum)["now"] = lambda _: now.replace(tzinfo=UTC)
    db = provide_database_interface()
    await db_vacuum.vacuum_old_flow_runs(db=db)
    await db_vacuum.vacuum_events_with_retention_overrides(db=db)
    await db_vacuum.vacuum_old_events(db=db)


def _by_run(template: dict[str, list[Row]]) -> list[dict[str, list[Row]]]:
    """The rows of all runs, and of each event among them, as one unit to repeat."""
    count = len(template["flow_run"])
    parts: list[dict[str, list[Row]]] = [{table: [] for table in TABLES} for _ in range(count)]
    owner: dict[str, int] = {row["id"]: n for n, row in enumerate(template["flow_run"])}
    for table in TABLES:
        for row in template[table]:
            named = [owner[name] for name in _ID.findall(json.dumps(row)) if name in owner]
            number = named[0] if named else 0
            owner.setdefault(row["id"], number)
            parts[number][table].append(row)
    return parts


def _add(database: sqlite3.Connection, rows: dict[str, list[Row]], moved: timedelta) -> None:
    """A copy of the rows under new ids, later by ``moved``."""
    new = {row["id"]: str(uuid.uuid4()) for table in rows.values() for row in table}

    def again(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = _ID.sub(lambda match: new.get(match[0], match[0]), value)
        if _TIME.fullmatch(value):
            return f"{datetime.fromisoformat(value) + moved:%Y-%m-%d %H:%M:%S.%f}"
        return value

    for table, found in rows.items():
        for row in found:
            if table == "flow_run":
                row = {**row, "idempotency_key": str(uuid.uuid4())}
            columns = ", ".join(f'"{name}"' for name in row)
            marks = ", ".join("?" for _ in row)
            database.execute(
                f"INSERT INTO {table} ({columns}) VALUES ({marks})",  # noqa: S608 - our own names
                [again(value) for value in row.values()],
            )


def _watch(used: Server) -> None:
    """A run of the deployment `watch`, to its end."""
    user, _, password = used.login.partition(":")
    with httpx.Client(base_url=used.api_url, auth=(user, password), timeout=60.0) as client:
        found = client.get("/deployments/name/watch/watch").raise_for_status().json()
        wanted = {"state": {"type": "SCHEDULED"}, "parameters": {"dry_run": False}}
        made = client.post(f"/deployments/{found['id']}/create_flow_run", json=wanted)
        run = made.raise_for_status().json()["id"]
        while (seen := client.get(f"/flow_runs/{run}").json())["state_type"] != "COMPLETED":
            if seen["state_type"] in ("FAILED", "CRASHED", "CANCELLED"):
                raise RuntimeError(f"the run {run} of watch: {seen['state']}")
            time.sleep(1.0)


def _tables(database: Path) -> Iterator[tuple[str, list[Row]]]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.row_factory = sqlite3.Row
        for table in TABLES:
            found = opened.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - our own names
            yield table, [dict(row) for row in found]


def _ids(database: Path) -> set[str]:
    return {row["id"] for _, rows in _tables(database) for row in rows}


def _rows(database: Path, before: set[str]) -> dict[str, list[Row]]:
    return {
        table: [row for row in rows if row["id"] not in before] for table, rows in _tables(database)
    }


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


if __name__ == "__main__":
    main()
