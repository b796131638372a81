"""The Prefect server of `torpor up` on SQLite beside PostgreSQL, with many clients at once.

    python -m benchmarks.databases postgresql://USER@HOST/EMPTY_DATABASE
        [--clients 1,8,32,100] [--runs 200] [--rounds 3] [--keep NAME]

A run is made, runs and completes: three requests, each sent once, so that a refusal (503) is seen.
Prefect's own client would repeat it. Each round asks one database after the other. Prints JSON;
--keep keeps it under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.kept import write_result
from deployments import database, parent, server
from deployments.installation import Installation
from deployments.server import Server
from torpor.control.measure.host import host_facts
from torpor.control.ports import free_ports
from torpor.control.supervision import children_of
from torpor.shared.values import MIB

ANSWER_S: Final = 120.0
STATES: Final = ("RUNNING", "COMPLETED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("postgres", help="an empty database; the password is in ~/.pgpass")
    parser.add_argument("--clients", default="1,8,32,100")
    parser.add_argument("--runs", type=int, default=200, help="of each number of clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    clients = [int(number) for number in options.clients.split(",")]
    result = measure(options.postgres, clients, options.runs, options.rounds)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        write_result(options.keep, result)


def measure(postgres: str, clients: list[int], runs: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    with _serving(None) as on_sqlite, _serving(postgres) as on_postgres:
        servers = {"sqlite": on_sqlite, "postgresql": on_postgres}
        for _ in range(rounds):
            for number in clients:
                for name, (used, _) in servers.items():
                    found.setdefault(f"{name}, {number} clients", []).append(
                        _ask(used, number, runs)
                    )
        memory = {name: _memory_mib(made) for name, (_, made) in servers.items()}
    rows = {name: _summary(rounds_) for name, rounds_ in found.items()}
    return {"host": host_facts(), "runs": runs, "n": rounds, "rows": rows, "memory_mib": memory}


@contextmanager
def _serving(url: str | None) -> Iterator[tuple[Server, Installation]]:
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        made = Installation(Path(folder).resolve())
        if url is not None:
            database.choose(made, url)
        used = server.server_of(made, free_ports(1)[0])
        began = parent.start(made, used)
        try:
            yield used, made
        finally:
            parent.stop(began)


def _ask(used: Server, clients: int, runs: int) -> dict[str, float]:
    """Runs a second that completed, refusals, and the seconds from a run's making to its end."""
    user, _, password = used.login.partition(":")
    took: list[float] = []
    lock = threading.Lock()
    with httpx.Client(
        base_url=used.api_url,
        auth=(user, password),
        timeout=ANSWER_S,
        limits=httpx.Limits(max_connections=clients),
        trust_env=False,
    ) as client:
        flow = client.post("/flows/", json={"name": "measured"}).json()["id"]

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return client.post(path, json=body).raise_for_status()

        def run(_: int) -> None:
            began = time.monotonic()
            try:
                made = post("/flow_runs/", {"flow_id": flow, "state": {"type": "PENDING"}}).json()
                for state in STATES:
                    post(f"/flow_runs/{made['id']}/set_state", {"state": {"type": state}})
            except httpx.HTTPStatusError:
                return
            with lock:
                took.append(time.monotonic() - began)

        began = time.monotonic()
        _at_once(run, clients, runs)
        seconds = time.monotonic() - began
        client.delete(f"/flows/{flow}")
    p95 = statistics.quantiles(took, n=20)[-1] if len(took) > 1 else float("nan")
    return {"runs_s": len(took) / seconds, "failed": float(runs - len(took)), "p95_s": p95}


def _at_once(run: Callable[[int], None], clients: int, runs: int) -> None:
    with ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(run, range(runs)):
            pass


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median, least and most of each figure."""
    return {
        name: {
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "most": round(max(values), 3),
        }
        for name in rounds[0]
        for values in [[found[name] for found in rounds]]
    }


def _memory_mib(installation: Installation) -> int:
    pid = children_of(installation.folder)[server.ROLE]
    return int(psutil.Process(pid).memory_info().rss) // MIB


if __name__ == "__main__":
    main()
