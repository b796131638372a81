"""What each encoding costs over lines of limited rate and into a local store, beside the choices.

    python -m benchmarks.lines [--mib 1024] [--rounds 3] [--only LINE ...] [--keep NAME]

One pass of a snapshot of BF16 weights, packages, JSON lines and random bytes, as the agent makes
it, by a process of its own. A line leads to a process that reads packs in the kernel at that rate
and throws them away, so that nearly all of the cores is left to the agent. The local store is
SeaweedFS on the same cores, in memory. `fastest` and `balanced` are the choices of the Tuning
block; each other row is a fixed encoding. Prints a table, and how much longer each choice took than
the fastest encoding that it may take; --keep keeps JSON under benchmarks/results. All of it takes
about 20 minutes, most of them over the slowest line.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import resource
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.content import make_below
from benchmarks.feed import thrown_away
from benchmarks.kept import summed_up, write_result
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.machine.agent.memory import keep_freed_chunks
from torpor.machine.agent.passes import Means, Pass, Workers
from torpor.machine.agent.workers import WORKERS
from torpor.machine.pipeline.buffers import PackBuffers
from torpor.machine.pipeline.chunks import ChunkTable
from torpor.machine.pipeline.contents import Contents
from torpor.machine.pipeline.journal import Journal
from torpor.machine.pipeline.numbers import Numbers
from torpor.machine.pipeline.upload import Source
from torpor.machine.tree.names import Names
from torpor.machine.tree.plan import cut
from torpor.machine.tree.walk import walk
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import BALANCED, FASTEST, SMALLEST, Effort, Step
from torpor.shared.format.keys import Seal
from torpor.shared.format.names import pack_key
from torpor.shared.format.sizes import PACK_BYTES
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB, Grant, ObjectKey, WorkspaceName
from torpor.shared.wire.snapshot import PassesOutcome

LINES: Final = {
    "200 Mbit/s": 25e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9,
    "local store": 0.0,
}  # fmt: skip
"""Bytes a second of each line; 0 is a store on this host."""
CHOICES: Final = {"balanced": BALANCED, "fastest": FASTEST}
FIXED: Final = {step.name: (step,) for step in (*FASTEST, *SMALLEST)}
_RANDOM_SHARE: Final = 0.1
_PACKS: Final = 1000  # of one pass, at most
_NEVER_UNIX: Final = 1 << 40
_WORKSPACE: Final = WorkspaceName("lines")


@dataclass(frozen=True)
class Cost:
    """What one pass took. ``words``: the steps that were chosen."""

    wall_s: float
    cpu_s: float
    stored_bytes: int
    words: str


@dataclass(frozen=True)
class Row:
    """One encoding over one line, in rounds."""

    line: str
    encoding: str
    plain_bytes: int
    costs: Sequence[Cost]

    @property
    def wall_s(self) -> float:
        return statistics.median(cost.wall_s for cost in self.costs)

    def figures(self) -> dict[str, Any]:
        summed = {
            name: summed_up([getattr(cost, name) for cost in self.costs])
            for name in ("wall_s", "cpu_s", "stored_bytes")
        }
        words = [cost.words for cost in self.costs]
        return {"line": self.line, "encoding": self.encoding, **summed, "words": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[*LINES], help="some of the lines")
    parser.add_argument("--encodings", nargs="*", default=[*FIXED, *CHOICES])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-lines-", dir=options.folder) as scratch:
        rows = measure(
            Path(scratch), options.mib * MIB, options.rounds, options.only, options.encodings
        )
    print(table(rows))
    print(*losses(rows), sep="\n")
    result = {"benchmark": "lines", "host": host_facts(), "mib": options.mib}
    result |= {"plain_bytes": rows[0].plain_bytes, "rows": [row.figures() for row in rows]}
    if options.keep:
        print(f"\nkept as {write_result(options.keep, result)}")


def measure(
    folder: Path, size: int, rounds: int, lines: Sequence[str], encodings: Sequence[str]
) -> list[Row]:
    """Each encoding over each line, in turn, so that what disturbs one round disturbs them all."""
    content = folder / "workspace"
    make_below(content, int(size * (1 - _RANDOM_SHARE)), seed=1)
    dice = random.Random(1)
    with (content / "random.bin").open("wb") as file:
        for _ in range(int(size * _RANDOM_SHARE) // MIB):
            file.write(dice.randbytes(MIB))
    plain = sum(path.stat().st_size for path in content.rglob("*") if path.is_file())
    steps = {**FIXED, **CHOICES}
    rows = []
    for line in lines:
        costs: dict[str, list[Cost]] = {encoding: [] for encoding in encodings}
        for _, encoding in itertools.product(range(rounds), encodings):
            with _store(folder, LINES[line]) as grants:
                costs[encoding].append(_in_a_process(content, folder, steps[encoding], grants))
            print(line, encoding, costs[encoding][-1], flush=True)
        rows += [Row(line, encoding, plain, some) for encoding, some in costs.items()]
    return rows


def stored_by(step: Step, content: Path, folder: Path) -> int:
    """The bytes that a snapshot of ``content`` stores at one fixed encoding, whatever the line."""
    with _thrown_away(0.0) as grants:
        return one_pass(content, folder, (step,), grants).stored_bytes


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| line | encoding | wall s | CPU s | stored | what it chose |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = row.figures()
        words = row.costs[-1].words if row.encoding in CHOICES else ""
        lines.append(
            f"| {row.line} | {row.encoding} | {row.wall_s:.2f} | {figures['cpu_s']['median']:.2f} "
            f"| {figures['stored_bytes']['median'] / row.plain_bytes:.3f} | {words} |"
        )
    return "\n".join(lines)


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """How much longer each choice took than the fastest fixed encoding that it may take."""
    for line in dict.fromkeys(row.line for row in rows):
        walls = {row.encoding: row.wall_s for row in rows if row.line == line}
        for choice, steps in CHOICES.items():
            fixed = {step.name: walls[step.name] for step in steps if step.name in walls}
            if choice in walls and fixed:
                best = min(fixed, key=lambda name: fixed[name])
                more = walls[choice] / fixed[best] - 1
                yield f"{line}: {choice} took {more:+.1%} beside {best}, its fastest"


Grants = Sequence[Grant]


@contextmanager
def _store(folder: Path, bytes_s: float) -> Iterator[Grants]:
    if bytes_s:
        with _thrown_away(bytes_s) as grants:
            yield grants
        return
    names = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    with (
        tempfile.TemporaryDirectory(dir=folder) as room,
        EmbeddedStore.start(Path(room), *names, "torpor") as server,
    ):
        store = S3Store.connect(server.settings("torpor", root=bytes(32)))
        yield [store.grant("PUT", key, expires_s=3600) for key in _keys()]


@contextmanager
def _thrown_away(bytes_s: float) -> Iterator[Grants]:
    with thrown_away(bytes_s) as url:
        yield [Grant(key, "PUT", url, _NEVER_UNIX) for key in _keys()]


def _keys() -> list[ObjectKey]:
    return [pack_key(_WORKSPACE, secrets.token_bytes(16)) for _ in range(_PACKS)]


def _in_a_process(content: Path, folder: Path, steps: Sequence[Step], grants: Grants) -> Cost:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_send_cost, args=(content, folder, steps, grants, there))
    process.start()
    there.close()
    try:
        cost: Cost = here.recv()
        return cost
    finally:
        process.join()


def _send_cost(
    content: Path, folder: Path, steps: Sequence[Step], grants: Grants, to: Connection
) -> None:
    keep_freed_chunks()
    to.send(one_pass(content, folder, steps, grants))


def one_pass(content: Path, folder: Path, steps: Sequence[Step], grants: Grants) -> Cost:
    """Walk, read, encode and send everything below ``content``."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    effort = Effort(steps)
    roots = [bytes(content)]
    seen = walk(roots, Names(1), None, lambda: None)
    jobs = cut(seen.unread, roots)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        source = Source(
            roots, seen.unread, Seal(None), ChunkTable(), Contents(seen, jobs),
            Numbers(roots, seen.unread), Journal(Path(room) / "journal"), PackBuffers(PACK_BYTES),
            Encoder(effort),
        )  # fmt: skip
        work = Pass(seen, source, jobs, PassesOutcome(0, 0, 0, 0, 0, []), began)
        unused = iter(grants)
        work.store(
            Means(
                grants=lambda: unused,
                sender=lambda failed: Transfer(cancelled=failed),
                workers=Workers(WORKERS, lambda check: nullcontext()),
                moved=lambda size: None,
                check=lambda: None,
            )
        )
    ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    _, stored = work.take_stored()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(ended - began, cpu, stored, effort.words)


if __name__ == "__main__":
    main()
