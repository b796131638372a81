"""torpor beside tar+lz4+s5cmd and restic on one workspace, against one S3 server, in one run.

    python -m benchmarks.peers [--gib 2] [--rounds 1] [--line-mib-s 0] [--folder /dev/shm]
                               [--keep NAME]

Prints a table and keeps JSON under benchmarks/results. restic is Debian sid's where apt can get it,
and the installed one elsewhere; its restore has a new cache, as on a new machine. Each step of each
tool runs alone; the S3 server (SeaweedFS) shares the machine with them, as it would on a small
host. ``--line-mib-s`` puts a line of that rate, each way, between all tools and the server: what a
rented machine has. What torpor stores depends on line and cores, so that a last line says what it
stores at zstd 3, whatever they are.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.content import make_below
from benchmarks.current_restic import use_current_restic
from benchmarks.kept import summed_up, write_result
from benchmarks.lines import stored_by
from benchmarks.machine import BenchMachine
from benchmarks.other_tools import PEERS, Tool
from benchmarks.shaping import Shaper
from benchmarks.workspace import change_workspace, tree_bytes
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.shared.codecs.effort import BALANCED
from torpor.shared.values import GIB, MIB

FIXED: Final = BALANCED[1]
PEER_BUCKETS = {"restic": "restic", "tar+lz4+s5cmd": "tarball"}
RESTS_S = 0.5
"""torpor reads a file twice that was changed less than 0.1 s before its scan. Nobody hibernates so
soon after a change."""
STEPS = ("full", "unchanged", "incremental", "restore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--line-mib-s", type=float, default=0.0, help="0: as fast as loopback is")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="torpor-restic-") as programs:
        version = use_current_restic(Path(programs))
        for _ in range(options.rounds):  # each in a folder of its own: memory holds one
            with tempfile.TemporaryDirectory(prefix="torpor-peers-", dir=options.folder) as scratch:
                rounds.append(_round(Path(scratch), options.gib, options.line_mib_s * MIB))
    measured = _result(rounds, options.gib)
    result = {"line_mib_s": options.line_mib_s, "restic": version, **measured}
    _print(result)
    if options.keep:
        print(f"\nkept as {write_result(options.keep, result)}")


def _round(folder: Path, gib: float, line_bytes_s: float) -> dict[str, Any]:
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    figures: dict[str, Any] = {}
    with (
        EmbeddedStore.start(folder / "store", *keys, "torpor") as server,
        _over_a_line(server, line_bytes_s) as store,
    ):
        for bucket in PEER_BUCKETS.values():
            store.make_bucket(bucket)
        with BenchMachine(folder / "machine", store) as machine:
            workspace = machine.workspace
            make_below(workspace, int(gib * GIB), seed=1)
            figures["files"], figures["bytes"] = tree_bytes(workspace)
            fixed = stored_by(FIXED, workspace, folder)
            ours = Tool("torpor", "", machine.snapshot, machine.snapshot, machine.restore)
            tools = {"torpor": (ours, "torpor")}
            for name, bucket in PEER_BUCKETS.items():
                peer = PEERS[name](store.settings(bucket), "all", workspace, folder / "cache")
                tools[name] = (peer, bucket)
            _steps(tools, workspace, folder, store, figures)
            figures["torpor"]["stored_fixed"] = fixed
    return figures


@contextmanager
def _over_a_line(server: EmbeddedStore, bytes_s: float) -> Iterator[EmbeddedStore]:
    """The server behind a line of that rate; 0 is the server itself."""
    if not bytes_s:
        yield server
        return
    with Shaper(line_bytes_s=bytes_s) as shaper:
        port = urlsplit(server.endpoint_url).port or 80
        relay = shaper.relay("127.0.0.1", port, what="store")
        yield replace(server, endpoint_url=f"http://127.0.0.1:{relay}")


def _steps(
    tools: dict[str, tuple[Tool, str]],
    workspace: Path,
    folder: Path,
    store: EmbeddedStore,
    figures: dict[str, Any],
) -> None:
    os.sync()
    for name, (tool, bucket) in tools.items():
        figures[name] = {"full": tool.full()._asdict()}
        figures[name]["stored_full"] = _stored(store, bucket)
    for name, (tool, _) in tools.items():
        figures[name]["unchanged"] = tool.again()._asdict()
    before = {name: _stored(store, bucket) for name, (_, bucket) in tools.items()}
    figures["changed_bytes"] = change_workspace(workspace, 0.01)
    os.sync()
    time.sleep(RESTS_S)
    for name, (tool, bucket) in tools.items():
        figures[name]["incremental"] = tool.again()._asdict()
        figures[name]["stored_incremental"] = _stored(store, bucket) - before[name]
    for name, (tool, _) in tools.items():
        target = folder / "restored"
        figures[name]["restore"] = tool.restore(target)._asdict()
        _compare(workspace, target)
        shutil.rmtree(target)


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
        for what in ("stored_full", "stored_incremental", "stored_fixed"):
            if what in rounds[0][name]:
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
    print(
        f"{result['files']:,} files, {result['bytes']:,} bytes; {result['restic']}; "
        "wall / CPU seconds (medians)"
    )
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
        stored = ours["stored_full"]["median"] / _stored_full(result, name)
        print(f"{'ours / ' + name:16}"[:22] + cells[22 - 16 :] + f"{stored:>16.2f}")
    gib = result["bytes"] / GIB
    print(f"ours: {ours['full']['cpu_s']['median'] / gib:.2f} CPU seconds per GiB")
    fixed = ours["stored_fixed"]["median"]
    share = fixed / _stored_full(result, "restic")
    print(f"ours at {FIXED.name}: {fixed:,.0f} bytes stored, {share:.3f} of restic's")


def _stored_full(result: dict[str, Any], name: str) -> float:
    return float(result["tools"][name]["stored_full"]["median"])


if __name__ == "__main__":
    main()
