"""What torpor says would be lost with a whole machine, and how much longer a snapshot takes for it.

    python -m tests.benchmarks.what_is_lost [--outside 200000] [--times 5] [--keep NAME]

The market is a fake of Vast.ai on loopback. Its machine is real: it has a root of its own over this
host's /usr and /etc, so this needs root. It is looked at twice. Untouched: as it was rented, with a
workspace. Used: with a second disk, a conda environment in /opt, an edited /etc, a package of pip
in the system, and ``outside`` files in /data. Snapshots of the unchanged workspace, which are the
shortest there are, are taken in turns with and without the look.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks.kept import summed_up, write_result
from flows import create, hibernate, wake
from flows.procedures.save import Snapshot
from tasks.machines import chosen_machine, open_session
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.machines import new_key_pair
from tests.markets.boot import BootedMachine, Machines
from tests.markets.every import DEMO, Markets, opened_markets
from torpor.control.measure.host import host_facts
from torpor.control.remote.agent import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.remote.ssh import Identity
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3 import S3Store
from torpor.shared.values import Machine, WorkspaceSpec

MARKET = "vast"
MOST_LOOK_S = 60.0
_IN_A_FOLDER = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", type=int, default=200_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    with tempfile.TemporaryDirectory(prefix="torpor-lost-", dir="/dev/shm") as scratch:
        place = Path(scratch) / "machines"
        place.mkdir()
        machines = Machines(place)
        try:
            with (
                EmbeddedStore.start(Path(scratch) / "store", *keys, "torpor") as running,
                opened_markets(machines) as markets,
            ):
                store = S3Store.connect(running.settings("torpor", root=bytes(32)))
                figures = measure(markets, store, options.outside, options.times)
        finally:
            machines.end()
    result = {"benchmark": "what_is_lost", "host": host_facts(), **figures}
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(markets: Markets, store: ObjectStore, outside: int, times: int) -> dict[str, Any]:
    """The report and the seconds, of the untouched machine and of the used one."""
    opened = OpenWorkspace(
        spec=WorkspaceSpec(DEMO, ["~/workspace"]),
        store=store,
        providers=(markets.provider(MARKET),),
        identity=Identity(new_key_pair().private),
        owner="benchmark",
        sealing=None,
    )
    with PlainRunner(opened):
        create.fn(DEMO)
    workspace = markets.workspace(MARKET)
    workspace.mkdir(exist_ok=True)
    (workspace / "train.py").write_text("print()\n")
    untouched = _looked_at(opened, times)
    with PlainRunner(opened):
        wake.fn(DEMO)
    use(markets.body(MARKET), outside)
    return {"outside_files": outside, "untouched": untouched, "used": _looked_at(opened, times)}


def use(machine: BootedMachine, outside: int) -> None:
    """Leave all over the machine what a user leaves there."""
    root, (disk, site) = machine.root, _prepare(machine)
    for number in range(outside):
        folder = root / f"data/raw/d{number // _IN_A_FOLDER:04}"
        if number % _IN_A_FOLDER == 0:
            folder.mkdir(parents=True)
        (folder / f"file-{number:06}").write_bytes(b"x" * (number % 100 + 1))
    written = {
        f"{disk}/checkpoints/last.pt": b"x" * 3_000_000,
        "opt/conda/envs/train/bin/python": b"x" * 2_000_000,
        "opt/conda/envs/train/conda-meta/numpy-2.1.json": b"{}",
        "opt/conda/envs/train/lib/python3.12/site-packages/numpy-2.1.dist-info/RECORD": b"",
        "etc/systemd/system/train.service": b"[Service]\n",
        f"{site}/lostandfound/__init__.py": b"x" * 100_000,
        f"{site}/lostandfound-1.0.dist-info/METADATA": b"Name: lostandfound\nVersion: 1.0\n",
        f"{site}/lostandfound-1.0.dist-info/RECORD": (
            b"lostandfound/__init__.py,,100000\nlostandfound-1.0.dist-info/METADATA,,\n"
            b"lostandfound-1.0.dist-info/RECORD,,\n"
        ),
    }
    for name, content in written.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    with (root / "etc/bash.bashrc").open("a") as file:
        file.write("export EDITED=1\n")


def _prepare(machine: BootedMachine) -> tuple[str, str]:
    """Mount a second disk; where it is, and where the system's pip installs."""
    disk = "/mnt/nvme"
    script = (
        f"mkdir -p {disk} && mount -t tmpfs tmpfs {disk} && python3 -c "
        "'import site; print(site.getsitepackages()[0])'"
    )
    inside = ["nsenter", f"--target={machine.first()}", "--mount", "--root", "--wd=/"]
    done = subprocess.run([*inside, "sh", "-c", script], capture_output=True, text=True, check=True)
    return disk, done.stdout.strip()


def _looked_at(opened: OpenWorkspace, times: int) -> dict[str, Any]:
    """What a hibernation says, after snapshots with and without the look."""
    alone, without, beside = [], [], []
    with PlainRunner(opened):
        live = chosen_machine(opened, "", to_store=True)
        with open_session(opened, live) as session:
            _snapshot(opened, session, live, ends=False)
            for _ in range(times):  # in turns: the host is never as idle twice
                alone.append(_look(opened, session))
                without.append(_snapshot(opened, session, live, ends=False))
                beside.append(_snapshot(opened, session, live, ends=True))
    # It waits for the look's end, so that the report is whole on a busy host too.
    patient = structs.replace(opened.spec, left_behind="refuse", left_behind_gib=1e6)
    with PlainRunner(replace(opened, spec=patient)):
        report = hibernate.fn(DEMO)
    return {
        "report": report.lost,
        "look_s": summed_up(alone),
        "unchanged_snapshot_s": summed_up(without),
        "unchanged_snapshot_with_look_s": summed_up(beside),
        "longer_by_s": statistics.median(beside) - statistics.median(without),
    }


def _look(opened: OpenWorkspace, session: Agent) -> float:
    """Seconds of the look by itself."""
    remote = RemoteSnapshot(session, opened.store, opened.spec, None, secrets.token_hex(8))
    remote.begin()
    started = time.monotonic()
    remote.losses(rented=True, whole=True, wait_s=MOST_LOOK_S)
    taken_s = time.monotonic() - started
    remote.end(committed=False)
    return taken_s


def _snapshot(opened: OpenWorkspace, session: Agent, machine: Machine, *, ends: bool) -> float:
    """Seconds of a snapshot; with ``ends`` it has the look, as in a hibernation."""
    started = time.monotonic()
    guards = () if ends else None
    with Snapshot(opened, session, machine, guards) as snapshot:
        snapshot.store_changes()
        snapshot.commit()
        snapshot.verify()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
