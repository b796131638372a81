"""One snapshot to many local machines: over limited links, and with some of them killed.

python -m tests.benchmarks.replicate links [--machines 8] [--mib 256] [--mib-s 2.5]
python -m tests.benchmarks.replicate store [--machines 8] [--mib 256] [--mib-s 2.5]
python -m tests.benchmarks.replicate kills [--machines 8] [--kill 2]

links: every machine has a link of its own for all that comes to it, from the store or from peers.
store: the store's link is limited instead, and all machines share it.
kills: machines are killed, with all their processes, while they restore.

The flow runs without a Prefect server, so that its seconds are torpor's. Here all machines start on
the cores of one host, where rented ones have their own: the link is slow, so that it is the
transfer that counts. Every machine's tree is compared with the source by a walk of its own.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import msgspec

from benchmarks.kept import write_result
from benchmarks.shaping import Shaper
from flows import hibernate, replicate
from flows.procedures.fleet import MOST_TASKS
from tasks.plain_runner import PlainRunner
from tests.fixtures.machines import destroy_all
from tests.fixtures.stores import Server
from tests.fixtures.trees import Tree, differences, facts, fill
from tests.fixtures.world import WORKSPACE, World, kill, make_world, own_store
from torpor.control.measure.host import host_facts
from torpor.control.remote.part_tracker import PeerMode
from torpor.control.remote.restore import RemoteRestore
from torpor.control.reports import ReplicateReport
from torpor.shared.values import MIB, Machine
from torpor.shared.wire.restore import Peer

PART_BYTES = 4 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["links", "store", "kills"])
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mib-s", type=float, default=2.5, help="the limited link, MiB a second")
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="torpor-replicate-") as folder,
        own_store(Path(folder)) as store,
    ):
        server = store.server
        if options.what == "kills":
            figures = kills(server, options.machines, options.kill, options.mib)
        else:
            figures = limited(
                server, options.what, options.machines, options.mib, options.mib_s * MIB
            )
    result = {"benchmark": f"replicate {options.what}", "host": host_facts(), **figures}
    for name, value in figures.items():
        print(f"{name:28}{value}")
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def limited(
    server: Server, what: str, count: int, mib: int, bytes_s: float, peers: PeerMode = "auto"
) -> dict[str, Any]:
    """Seconds to one machine and to ``count``, with the machines' links or the store's limited."""
    limit = {"machine_bytes_s" if what == "links" else "store_bytes_s": bytes_s}
    with Shaper(**limit) as shaper, shaped_world(server, shaper, mib) as (world, truth):
        single, one_s = _timed(world, truth, 1, shaper)
        many, many_s = _timed(world, truth, count, shaper, peers)
    return {
        "limited": what,
        "bytes_s": bytes_s,
        "stored_bytes": single.replicas[0].store_bytes,
        "machines": count,
        "one_s": one_s,
        "many_s": many_s,
        "many_over_one": many_s / one_s,
        "restore_many_over_one": max(r.seconds["restore"] for r in many.replicas)
        / single.replicas[0].seconds["restore"],
        "source": many.source,
        "from_store_bytes": sum(replica.store_bytes for replica in many.replicas),
        "from_peers_bytes": sum(replica.peer_bytes for replica in many.replicas),
        "one_phases_s": single.replicas[0].seconds,
        "many_phases_s": [replica.seconds for replica in many.replicas],
    }


def kills(
    server: Server, count: int, victims: int, mib: int, link_s: float = 8.0
) -> dict[str, Any]:
    """Kill ``victims`` of ``count`` machines while they restore, which takes each ``link_s``;
    without spares and with them."""
    figures: dict[str, Any] = {"machines": count, "killed": victims}
    with (
        Shaper(machine_bytes_s=mib * MIB / link_s) as shaper,
        shaped_world(server, shaper, mib) as (world, truth),
    ):
        for name, spares in (("without spares", 0), ("with spares", victims)):
            with _killing(world, shaper, victims) as killed:
                report = _replicate(world, count, spares)
            figures[name] = judged(world, truth, report, killed)
            figures[name]["leaked"] = world.leaks()
            destroy_all(world.provider)
            world.forget_rentals()
    return figures


def judged(world: World, truth: Tree, report: ReplicateReport, killed: list[str]) -> dict[str, Any]:
    """What came out: how many are identical to the source, and who was reported."""
    there = {machine.id for machine in world.machines()}
    ready = {replica.machine for replica in report.ready}
    same = [
        machine
        for machine in world.machines()
        if not differences(truth, facts(world.workspace(machine.id)))
    ]
    return {
        "ready": len(ready),
        "identical": len(same),
        "reported": sorted(set(killed) & {replica.machine for replica in report.failed}),
        "killed": sorted(killed),
        "replaced": report.replaced,
        "not_of_the_report": sorted(there ^ ready),
        "seconds": report.seconds["replicate"],
    }


@contextmanager
def shaped_world(server: Server, shaper: Shaper, mib: int) -> Iterator[tuple[World, Tree]]:
    """A workspace that is in the store only, and whose machines' traffic goes by the shaper."""
    with make_world(server, parts=64) as world:
        spec = msgspec.structs.replace(world.access.spec, part_bytes=PART_BYTES)
        world.access = msgspec.structs.replace(
            world.access, spec=spec, endpoint_url=server.endpoint_url
        )
        machine = world.rent()
        workspace = world.workspace(machine.id)
        fill(workspace, random.Random(7), big=0)
        noise = random.Random(8)
        for number in range(mib // 4):
            (workspace / f"noise-{number}").write_bytes(noise.randbytes(4 * MIB))
        truth = facts(workspace)
        with PlainRunner(world.opened):
            hibernate.fn(WORKSPACE)
        there = urlsplit(server.endpoint_url)
        port = shaper.relay(there.hostname or "", there.port or 80, what="store")
        world.access = msgspec.structs.replace(
            world.access, endpoint_url=f"http://127.0.0.1:{port}"
        )
        with _shaped_peers(shaper):
            yield world, truth


@contextmanager
def _shaped_peers(shaper: Shaper) -> Iterator[None]:
    """What a machine fetches from a peer goes by its own link too."""
    serve: Callable[..., Peer] = RemoteRestore.serve

    def shaped(restore: RemoteRestore, host: str, most_bytes: int) -> Peer:
        peer = serve(restore, host, most_bytes)
        parts = urlsplit(peer.url)
        port = shaper.relay(parts.hostname or "", parts.port or 443, what="peers")
        return Peer(f"https://127.0.0.1:{port}{parts.path}", peer.certificate)

    with patch.object(RemoteRestore, "serve", shaped):
        yield


def _timed(
    world: World, truth: Tree, count: int, shaper: Shaper, peers: PeerMode = "auto"
) -> tuple[ReplicateReport, float]:
    shaper.carried.clear()
    started = time.monotonic()
    report = _replicate(world, count, peers=peers)
    seconds = time.monotonic() - started
    same = judged(world, truth, report, [])
    if same["identical"] != count or same["not_of_the_report"]:
        raise SystemExit(f"not every machine is identical to the source: {same}")
    destroy_all(world.provider)
    world.forget_rentals()
    return report, seconds


@contextmanager
def _killing(world: World, shaper: Shaper, victims: int) -> Iterator[list[str]]:
    """Kill every process of some machines once each has fetched a little."""
    killed: list[str] = []
    over = threading.Event()
    shaper.carried.clear()

    def strike() -> None:
        while not over.wait(0.1) and len(killed) < victims:
            fetched = {home for (home, _), size in shaper.carried.copy().items() if size > MIB}
            for machine in _started(world):
                at_work = str(world.home(machine.id) / ".torpor") in fetched
                if at_work and machine.id not in killed and len(killed) < victims:
                    kill([process.pid for process in world.processes(machine.id)])
                    killed.append(machine.id)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def _replicate(
    world: World, count: int, spares: int = 0, peers: PeerMode = "auto"
) -> ReplicateReport:
    with PlainRunner(world.opened, at_once=MOST_TASKS):
        return replicate.fn(WORKSPACE, count=count, spares=spares, peers=peers)


def _started(world: World) -> list[Machine]:
    return [machine for machine in world.machines() if machine.state == "running"]


if __name__ == "__main__":
    main()
