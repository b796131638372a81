"""The agent's own limits: time to attach to it, memory and connections for one file.

python -m benchmarks.agent attach [--times 20]
python -m benchmarks.agent bigfile [--gib 8]
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.kept import write_result
from benchmarks.machine import BenchMachine
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.machine.agent.content import weights
from torpor.shared.values import GIB, MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["attach", "bigfile"])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-agent-", dir=options.folder) as scratch:
        folder = Path(scratch)
        keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
        with (
            EmbeddedStore.start(folder / "store", *keys, "torpor") as store,
            BenchMachine(folder / "machine", store) as machine,
        ):
            if options.what == "attach":
                figures = attach(machine, options.times)
            else:
                figures = _bigfile(machine, store, folder, options.gib)
    result = {"benchmark": f"agent {options.what}", "host": host_facts(), **figures}
    for name, value in figures.items():
        print(f"{name:28}{value:>16,.2f}")
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def attach(machine: BenchMachine, times: int) -> dict[str, Any]:
    """A login by SSH and the agent's first answer, ``times`` times while the agent runs."""
    costs = [machine.attach() for _ in range(times)]
    walls_s = sorted(cost.wall_s for cost in costs)
    return {
        "n": times,
        "attach_wall_s": statistics.median(walls_s),
        "attach_least_wall_s": walls_s[0],
        "attach_most_wall_s": walls_s[-1],
        "attach_cpu_s": statistics.median(cost.cpu_s for cost in costs),
    }


def _bigfile(
    machine: BenchMachine, store: EmbeddedStore, folder: Path, gib: float
) -> dict[str, Any]:
    machine.workspace.mkdir()
    with (machine.workspace / "model.bin").open("wb") as file:
        for block in range(int(gib * GIB) // (32 * MIB)):
            file.write(weights(16 * MIB, random.Random(block)))
    port = urlsplit(store.endpoint_url).port or 80
    up = _Connections(machine, port)
    stored = machine.snapshot()
    most_up = up.stop()
    peak_up = machine.peak_bytes()
    (machine.workspace / "model.bin").unlink()
    down = _Connections(machine, port)
    restored = machine.restore(folder / "restored")
    most_down = down.stop()
    return {
        "gib": gib,
        "store_wall_s": stored.wall_s,
        "restore_wall_s": restored.wall_s,
        "agent_peak_up_mib": peak_up / MIB,
        "agent_peak_mib": machine.peak_bytes() / MIB,
        "connections_up": most_up,
        "connections_down": most_down,
    }


class _Connections(threading.Thread):
    """Watches how many connections the agent has at the same time."""

    def __init__(self, machine: BenchMachine, port: int) -> None:
        super().__init__(daemon=True)
        self._machine = machine
        self._port = port
        self._most = 0
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self._most = max(self._most, self._machine.connections(self._port))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self._most


if __name__ == "__main__":
    main()
