"""torpor beside restic and tar on a tree of many small files, in one run.

    python -m benchmarks.files [--files 100000] [--rounds 1] [--folder /dev/shm] [--keep NAME]

torpor stores into an S3 server on this machine; restic has a local repository and tar a local
archive, so that the server's work is on torpor's side. Each step of each tool runs alone. Prints a
table and keeps JSON under benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.kept import summed_up, write_result
from benchmarks.machine import BenchMachine
from benchmarks.other_tools import Cost, timed
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.shared.values import MIB

STEPS: Final = ("full", "unchanged", "restore")
_PER_FOLDER: Final = 40
_FOLDERS_ACROSS: Final = 25
_TEXT: Final = b"def f(x):\n    return [x * 2 for y in range(x) if y]\n\n" * 80


class _Tool(NamedTuple):
    full: Callable[[], Cost]
    unchanged: Callable[[], Cost]
    restore: Callable[[Path], Cost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without restic and tar")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-files-", dir=options.folder) as scratch:
        rounds = [
            _round(Path(scratch) / str(n), options.files, options.alone)
            for n in range(options.rounds)
        ]
    result = _result(rounds)
    _print(result)
    if options.keep:
        print(f"\nkept as {write_result(options.keep, result)}")


def make_files(folder: Path, count: int) -> int:
    """Small files as in environments: half are under 1 KiB, few over 10 KiB. Returns the bytes."""
    dice = random.Random(1)
    total = 0
    for number in range(count):
        group = number // _PER_FOLDER
        place = folder / f"package_{group // _FOLDERS_ACROSS:05}" / f"module_{group:06}"
        if number % _PER_FOLDER == 0:
            place.mkdir(parents=True)
        size = min(int(dice.lognormvariate(6.9, 1.2)), 60_000)
        data = (b"# %d\n" % number + _TEXT * (size // len(_TEXT) + 1))[:size]
        (place / f"name_{number % _PER_FOLDER}.py").write_bytes(data)
        total += len(data)
    return total


def _round(folder: Path, files: int, alone: bool) -> dict[str, Any]:
    folder.mkdir()
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    figures: dict[str, Any] = {"files": files}
    with (
        EmbeddedStore.start(folder / "store", *keys, "torpor") as store,
        BenchMachine(folder / "machine", store) as machine,
    ):
        workspace = machine.workspace
        figures["bytes"] = make_files(workspace, files)
        tools = {"torpor": _Tool(machine.snapshot, machine.snapshot, machine.restore)}
        if not alone:
            tools["restic"] = _restic(workspace, folder)
            tools["tar"] = _tar(workspace, folder)
        for name, tool in tools.items():
            os.sync()
            figures[name] = {"full": tool.full()._asdict(), "unchanged": tool.unchanged()._asdict()}
            if name == "torpor":
                figures["agent_store_peak_mib"] = machine.peak_bytes() / MIB
            target = folder / "restored"
            figures[name]["restore"] = tool.restore(target)._asdict()
            subprocess.run(
                ["diff", "-r", "--no-dereference", str(workspace), str(target)], check=True
            )
            shutil.rmtree(target)
        figures["agent_peak_mib"] = machine.peak_bytes() / MIB
        own = resource.getrusage(resource.RUSAGE_SELF)
        figures["control_peak_mib"] = own.ru_maxrss * 1024 / MIB
    return figures


def _restic(workspace: Path, folder: Path) -> _Tool:
    base = ["restic", "-r", str(folder / "restic"), "-q"]
    env = {**os.environ, "RESTIC_CACHE_DIR": str(folder / "cache")}
    keys = {"RESTIC_PASSWORD_FILE": secrets.token_hex(16)}
    timed([[*base, "init"]], env, keys, workspace)

    def backup() -> Cost:
        return timed([[*base, "backup", "."]], env, keys, workspace)

    def restore(target: Path) -> Cost:
        return timed([[*base, "restore", "latest", "--target", str(target)]], env, keys, workspace)

    return _Tool(backup, backup, restore)


def _tar(workspace: Path, folder: Path) -> _Tool:
    archive = str(folder / "workspace.tar")

    def pack() -> Cost:
        return timed([["tar", "-cf", archive, "."]], os.environ, {}, workspace)

    def unpack(target: Path) -> Cost:
        target.mkdir()
        return timed([["tar", "-xf", archive, "-C", str(target)]], os.environ, {}, workspace)

    return _Tool(pack, pack, unpack)


def _result(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    tools = {
        name: {
            step: {
                what: summed_up([r[name][step][what] for r in rounds])
                for what in ("wall_s", "cpu_s", "agent_cpu_s")
            }
            for step in STEPS
        }
        for name in ("torpor", "restic", "tar")
        if name in rounds[0]
    }
    peaks = ("agent_store_peak_mib", "agent_peak_mib", "control_peak_mib")
    return {
        "benchmark": "files",
        "host": host_facts(),
        "files": rounds[0]["files"],
        "bytes": rounds[0]["bytes"],
        "tools": tools,
        **{peak: max(r[peak] for r in rounds) for peak in peaks},
        "rounds": rounds,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['files']:,} files, {result['bytes']:,} bytes; wall / CPU seconds (medians)")
    print(f"{'':10}" + "".join(f"{step:>20}" for step in STEPS))
    for name, figures in result["tools"].items():
        cells = "".join(
            f"{figures[s]['wall_s']['median']:>11.2f} /{figures[s]['cpu_s']['median']:>7.2f}"
            for s in STEPS
        )
        print(f"{name:10}{cells}")
    ours = result["tools"]["torpor"]
    agent = "".join(f"{ours[s]['agent_cpu_s']['median']:>20.2f}" for s in STEPS)
    print(f"{'of agent':10}{agent}")
    print(
        f"peaks in MiB: agent {result['agent_store_peak_mib']:.0f} after the snapshots, "
        f"{result['agent_peak_mib']:.0f} in all, control side {result['control_peak_mib']:.0f}"
    )


if __name__ == "__main__":
    main()
