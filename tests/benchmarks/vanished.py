"""What a machine that vanishes costs a workspace with `save_minutes`: seconds of work, and what is
torn.

    python -m tests.benchmarks.vanished [--machines 50] [--at-once 5] [--gib 2] [--keep NAME]

On each machine of the local provider a program writes 1 % of the workspace a minute, a row a second
into an SQLite database in WAL mode, and a commit every five seconds into a git repository. The
machine is lost without a word after 70 to 190 s, and the workspace wakes from its newest own save.
Work lost: from the last row that came back until the loss. Machines and store share this host.

``month``: what such saves cost in a month of 22 days of 8 hours, where the program never rests: the
workspace, and what the saves of KEPT_DAYS have stored, which prune deletes after that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.content import make_below
from benchmarks.kept import summed_up, write_result
from flows.watch import watch
from tasks.plain_runner import PlainRunner
from tests.fixtures.fault_proxy import lists, puts
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.world import World, make_world, own_store
from torpor.control.measure.host import host_facts
from torpor.control.store_prices import LIST_PRICES
from torpor.shared.values import GIB, Machine

WRITES = """
import os, random, sqlite3, subprocess, sys, time
share = int(sys.argv[1])  # bytes to write each second
files = [os.path.join(at, name) for at, _, names in os.walk("data") for name in names]
big = [file for file in files if os.path.getsize(file) >= 65536]
rows = sqlite3.connect("rows.db", isolation_level=None)
rows.execute("PRAGMA journal_mode = WAL")
rows.execute("CREATE TABLE IF NOT EXISTS rows (unix REAL, filler BLOB)")
git = ["git", "-C", "code", "-c", "user.name=t", "-c", "user.email=t@t"]
if not os.path.isdir("code"):
    subprocess.run(["git", "init", "-q", "code"], check=True)
number = 0
while True:
    began = time.time()
    left = share
    while left > 0:
        with open(random.choice(big), "r+b") as file:
            file.seek(random.randrange(os.path.getsize(file.name) - 65535))
            file.write(os.urandom(65536))
        left -= 65536
    if number % 5 == 0:
        with open("code/number", "w") as file:
            file.write(f"{number}\\n" * 100)
        subprocess.run([*git, "add", "number"], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
    rows.execute("INSERT INTO rows VALUES (?, ?)", (time.time(), os.urandom(500)))
    number += 1
    time.sleep(max(0.0, began + 1 - time.time()))
"""
EARLIEST_S, LATEST_S = 70.0, 190.0
REQUESTS_USD: Final = {  # a million each of PUT, LIST, and GET or HEAD; deletes are free
    "cloudflare-r2": (4.50, 4.50, 0.36),  # https://developers.cloudflare.com/r2/pricing/
    "backblaze-b2": (0.0, 4.00, 0.40),  # https://www.backblaze.com/b2/b2-transactions-price.html
    "aws-s3": (5.00, 5.00, 0.40),  # https://aws.amazon.com/s3/pricing/, us-east-1
}
HOURS, DAYS, KEPT_DAYS = 8, 22, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--gib", type=float, default=[2.0], nargs="+")
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    sizes = [measure(options.machines, options.at_once, gib) for gib in options.gib]
    result = {"benchmark": "vanished", "host": host_facts(), "sizes": sizes}
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(
    machines: int, at_once: int, gib: float, lives_s: tuple[float, float] = (EARLIEST_S, LATEST_S)
) -> dict[str, Any]:
    """Lose machines, ``at_once`` at a time, each with a store of its own, so that the disk need not
    hold all that they store; ``lives_s``: between which ages."""
    dice = random.Random(1)
    ages = [dice.uniform(*lives_s) for _ in range(machines)]
    with ThreadPoolExecutor(at_once) as threads:
        lost = list(threads.map(lambda age_s: lose_one(int(gib * GIB), age_s), ages))
    seconds = sorted(each["lost_s"] for each in lost)
    return {
        "gib": gib,
        "at_once": at_once,
        "lost_s": {**summed_up(seconds), "p95": seconds[math.ceil(0.95 * len(seconds)) - 1]},
        "cpu_percent": summed_up([each["cpu_percent"] for each in lost]),
        "saves": summed_up([each["saves"] for each in lost]),
        "month": month(lost),
        "databases_whole": sum(each["database"] == "ok" for each in lost),
        "repositories_whole": sum(each["repository"] == "ok" for each in lost),
        "machines": lost,
    }


def month(lost: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Requests and bytes of the machines' saves, and their cost at list prices, in dollars."""
    saves = sum(each["saves"] for each in lost)
    per_save = {
        what: sum(each[what] for each in lost) / max(1, saves)
        for what in ("puts", "lists", "gets", "new_bytes")
    }
    saves_a_day = HOURS * 3600 * saves / sum(each["age_s"] for each in lost)
    kept = sum(each["stored_bytes"] for each in lost) / len(lost)
    kept += saves_a_day * KEPT_DAYS * per_save["new_bytes"]
    asked = [per_save[what] * saves_a_day * DAYS / 1e6 for what in ("puts", "lists", "gets")]
    return {
        "saves_a_day": saves_a_day,
        "per_save": per_save,
        "kept_bytes": kept,
        "usd": {
            name: {
                "requests": sum(price * count for price, count in zip(prices, asked, strict=True)),
                "storage": kept / 1e9 * LIST_PRICES[name].gb_month_usd,
            }
            for name, prices in REQUESTS_USD.items()
        },
    }


def lose_one(workspace_bytes: int, age_s: float) -> dict[str, Any]:
    """One workspace whose machine is lost ``age_s`` after its program began."""
    with (
        tempfile.TemporaryDirectory(prefix="torpor-vanished-") as folder,
        own_store(Path(folder) / "store") as store,
        make_world(store.server) as world,
    ):
        spec = msgspec.structs.replace(world.access.spec, save_minutes=1)
        world.access = msgspec.structs.replace(world.access, spec=spec)
        make_below(world.workspace(world.rent().id) / "data", workspace_bytes, seed=1)
        hibernate_plainly(world.opened)
        wake_plainly(world.opened)
        (machine,) = world.machines()
        stored = _stored(world)
        world.proxy.clear()
        share = max(1, workspace_bytes // 6000)
        argv = [sys.executable, "-c", WRITES, str(share)]
        with subprocess.Popen(argv, cwd=world.workspace(machine.id)) as program:
            time.sleep(age_s)
            cpu_s = _cpu_of_saves_s(world, machine)
            program.kill()
            lost_unix = time.time()
        asked = list(world.proxy.requests)
        new_bytes = _stored(world) - stored
        world.lose_machines()
        with PlainRunner(world.opened, wait_factor=0.001):
            watch.fn(dry_run=False, only_report=True)  # it closes the rental
        woken = wake_plainly(world.opened)
        place = world.workspace(world.machines()[0].id)
        last_unix, database = _last_row(place / "rows.db")
        return {
            "age_s": age_s,
            "lost_s": min(lost_unix - last_unix, age_s),
            "cpu_percent": 100 * cpu_s / age_s,
            "saves": sum(puts("/snapshots/")(*each) for each in asked),
            "puts": sum(verb == "PUT" for verb, _ in asked),
            "lists": sum(lists(*each) for each in asked),
            "gets": sum(verb in ("GET", "HEAD") and not lists(verb, key) for verb, key in asked),
            "new_bytes": new_bytes,
            "stored_bytes": stored,
            "database": database,
            "repository": _git_says(place / "code"),
            "warnings": woken.warnings,
        }


def _stored(world: World) -> int:
    return sum(found.bytes for found in world.direct.list(""))


def _cpu_of_saves_s(world: World, machine: Machine) -> float:
    """Of the process that saves, and of the saves that have ended."""
    for process in world.processes(machine.id):
        with contextlib.suppress(OSError):
            if "autosave" in argv_of(process.pid):
                return sum(process.cpu_times()[:4])
    return 0.0


def _last_row(database: Path) -> tuple[float, str]:
    """When the last row was written, 0 if none is there; and what SQLite says of the whole."""
    try:
        with contextlib.closing(sqlite3.connect(database)) as rows:
            (last,) = rows.execute("SELECT max(unix) FROM rows").fetchone()
            (said,) = rows.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as error:
        return 0.0, str(error)
    return last or 0.0, said


def _git_says(repository: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), "fsck", "--full", "--strict"],
        capture_output=True,
        text=True,
    )
    return "ok" if done.returncode == 0 else (done.stdout + done.stderr).strip()[:500]


if __name__ == "__main__":
    main()
