"""What the benchmark measures on one GPU, as rows and as one JSON document."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from benchmarks.codecs import Rate, host, rate_of
from benchmarks.codecs_gpu.coders import (
    ALGORITHMS,
    PART_BYTES,
    STOCK,
    Coder,
    Nvcomp,
    Torpor,
    coded_planes,
)
from gpu_kernels.cuda import Gpu
from torpor.control.measure.host import host_facts
from torpor.machine.agent.gpu_worker import GpuWorker
from torpor.shared.codecs.gpu import decode_chunk, encode_chunk
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.values import MIB

WEIGHTS: Final = "weights BF16"
"""The kind of data that the goals are about."""
THREADS: Final = (1, 8)
END_TO_END_CHUNKS: Final = 32
_STAGED_MAX: Final = 64 * MIB  # of each copy between the host and the GPU
_LEAD: Final = 4
"""Copies of all chunks that a stream does before what is timed: meanwhile the host puts all of it
there, so that the GPU waits for nothing of it. Some 2 ms for a GiB on a large GPU."""
_ENCODE_GOAL, _DECODE_GOAL = 300, 500  # GB/s


class CameBackWrong(Exception):
    """What was decoded is not what was encoded: no figure of the run is of use."""


class Kind(NamedTuple):
    """One kind of data. ``bare`` is a plane by itself, for entropy coders alone."""

    name: str
    element: Element
    chunks: list[bytes]
    bare: bool

    def coded(self) -> list[list[int]]:
        """The planes of each chunk that torpor puts through rANS."""
        return [[0] if self.bare else coded_planes(chunk, self.element) for chunk in self.chunks]


@dataclass(frozen=True)
class Row:
    """One codec on one kind of data, on the GPU. The shares are of the copy's bytes a second."""

    data: str
    codec: str
    plain_bytes: int
    stored_bytes: int
    ratio: float
    encode_gb_s: Rate
    decode_gb_s: Rate
    encode_share_of_copy: float
    decode_share_of_copy: float


class Report:
    """What has been measured on one GPU so far. CameBackWrong where a codec errs, and what CuPy
    raises where the GPU does. ``library`` is nvCOMP, or why it is not here."""

    def __init__(self, gpu: Gpu, library: Any, count: int, chunk_bytes: int, rounds: int) -> None:
        self._gpu = gpu
        self._library = None if isinstance(library, str) else library
        self._count = count
        self._rounds = rounds
        self._chunk_bytes = chunk_bytes
        self._plain, self._spare, self._target = (gpu.room(count * chunk_bytes) for _ in range(3))
        gpu.send(random.Random(1).randbytes(chunk_bytes) * count, self._spare)
        self.rows: list[Row] = []
        self.end_to_end: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        if isinstance(library, str):
            self._leave_out("all", "nvCOMP", library)
        copy_s = [
            self._seconds(partial(gpu.copy, self._spare, self._target)) for _ in range(rounds)
        ]
        staged = bytearray(min(_STAGED_MAX, count * chunk_bytes))
        there = self._target[: len(staged)]
        sent = [gpu.seconds(partial(gpu.send, staged, there)) for _ in range(rounds)]
        brought = [gpu.seconds(partial(gpu.fetch, there, staged)) for _ in range(rounds)]
        self.copies = {
            "on_device_read_and_written_gb_s": rate_of(2 * self._plain.nbytes, copy_s),
            "pageable_host_to_device_gb_s": rate_of(len(staged), sent),
            "device_to_pageable_host_gb_s": rate_of(len(staged), brought),
        }

    def measure_kind(self, kind: Kind) -> None:
        """All codecs on one kind of data, over and over until all chunks are there."""
        sources = [kind.chunks[number % len(kind.chunks)] for number in range(self._count)]
        plains, targets = self._parts(self._plain), self._parts(self._target)
        for source, plain in zip(sources, plains, strict=True):
            self._gpu.send(source, plain)
        coded = kind.coded()
        if any(coded):
            over = [coded[number % len(coded)] for number in range(self._count)]
            self._measure(
                kind, sources, partial(Torpor, self._gpu, kind.element, plains, targets, over)
            )
        else:
            why = "no plane of it is one for rANS: zstd on the CPU takes it, or it stays raw"
            self._leave_out(kind.name, Torpor.name, why)
        if self._library is None:
            return
        for algorithm in ("ans",) if kind.bare else ALGORITHMS:
            parts = {min(PART_BYTES, self._chunk_bytes)} if algorithm in STOCK else set()
            for part_bytes in sorted(parts | {self._chunk_bytes}):
                make = partial(
                    Nvcomp, self._gpu, self._library, algorithm, kind.element, plains, targets,
                    part_bytes,
                )  # fmt: skip
                try:
                    self._measure(kind, sources, make)
                except (RuntimeError, ValueError, MemoryError) as error:
                    self._leave_out(kind.name, f"nvCOMP {algorithm}", error)

    def measure_end_to_end(self, kind: Kind, worker: GpuWorker) -> None:
        """The agent's worker, from host memory to host memory."""
        chunks = [kind.chunks[n % len(kind.chunks)] for n in range(END_TO_END_CHUNKS)]
        runs = [Run(self._chunk_bytes, kind.element)]
        streams = [RANS.encode(memoryview(chunk), runs) or b"" for chunk in chunks]
        size = sum(map(len, chunks))
        for threads in THREADS:
            seconds: dict[str, list[float]] = {"encode": [], "decode": []}
            with ThreadPoolExecutor(threads) as pool:
                for _ in range(self._rounds + 1):
                    started = time.perf_counter()
                    made = list(pool.map(lambda chunk: encode_chunk(worker, chunk, runs), chunks))
                    between = time.perf_counter()
                    plains = list(
                        pool.map(
                            lambda stream: decode_chunk(worker, stream, self._chunk_bytes), streams
                        )
                    )
                    seconds["decode"].append(time.perf_counter() - between)
                    seconds["encode"].append(between - started)
                    if made != streams or plains != chunks:
                        raise CameBackWrong("the worker's chunks are not the CPU's")
            self.end_to_end.append({
                "data": kind.name,
                "codec": f"torpor, {threads} thread{'s' * (threads > 1)}",
                "plain_bytes": size,
                "encode_gb_s": asdict(rate_of(size, seconds["encode"][1:])),
                "decode_gb_s": asdict(rate_of(size, seconds["decode"][1:])),
            })  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Everything, as one JSON document."""
        about = {
            "commit": host_facts()["commit"],
            "gpu": self._gpu.name,
            "cuda_driver": self._gpu.driver,
            "nvcomp": None if self._library is None else self._library.__version__,
        }
        return {
            "benchmark": "codecs_gpu",
            "host": host() | about,
            "rounds": self._rounds,
            "chunk_bytes": self._chunk_bytes,
            "plain_bytes": self._plain.nbytes,
            "clock": "events on the GPU's stream; end_to_end: wall time on the host",
            "copies": {name: asdict(rate) for name, rate in self.copies.items()},
            "rows": [asdict(row) for row in self.rows],
            "end_to_end": self.end_to_end,
            "left_out": self.left_out,
            "goals": goals(self.rows),
            "table": table(self.rows),
        }

    def _measure(self, kind: Kind, sources: Sequence[bytes], make: Callable[[], Coder]) -> None:
        coder = make()
        encode_s, decode_s = [], []
        for _ in range(self._rounds + 1):
            coder.ready_to_encode()
            encode_s.append(self._seconds(coder.encode))
        stored_bytes = coder.settle()
        for _ in range(self._rounds + 1):
            coder.ready_to_decode(self._spare)
            decode_s.append(self._seconds(coder.decode))
        coder.check()
        for number, (source, target) in enumerate(
            zip(sources, self._parts(self._target), strict=True)
        ):
            if self._gpu.get(target) != source:
                raise CameBackWrong(f"{coder.name} does not give chunk {number} back")
        size = self._plain.nbytes
        encode, decode = rate_of(size, encode_s[1:]), rate_of(size, decode_s[1:])
        share = (1 + stored_bytes / size) / self.copies["on_device_read_and_written_gb_s"].median
        row = Row(
            kind.name, coder.name, size, stored_bytes, round(size / stored_bytes, 4),
            encode, decode, round(share * encode.median, 4), round(share * decode.median, 4),
        )  # fmt: skip
        self.rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr)

    def _seconds(self, work: Callable[[], None]) -> float:
        for _ in range(_LEAD):
            self._gpu.copy(self._spare, self._target)  # so no chunk is there before it is due
        return self._gpu.seconds(work)

    def _parts(self, array: Any) -> list[Any]:
        size = self._chunk_bytes
        return [array[at : at + size] for at in range(0, array.nbytes, size)]

    def _leave_out(self, data: str, codec: str, why: object) -> None:
        self.left_out.append({"data": data, "codec": codec, "why": str(why)})


def goals(rows: Sequence[Row]) -> dict[str, bool | None]:
    """Whether the figures of BF16 weights are what was aimed at; None where one is not there."""
    of = {row.codec: row for row in rows if row.data == WEIGHTS}
    ours, ans = of.get(Torpor.name), of.get("nvCOMP ans")
    if ours is None:
        return {}
    return {
        f"encodes at {_ENCODE_GOAL} GB/s": ours.encode_gb_s.median >= _ENCODE_GOAL,
        f"decodes at {_DECODE_GOAL} GB/s": ours.decode_gb_s.median >= _DECODE_GOAL,
        "faster than nvCOMP's ANS both ways, at a better ratio": None
        if ans is None
        else ours.encode_gb_s.median > ans.encode_gb_s.median
        and ours.decode_gb_s.median > ans.decode_gb_s.median
        and ours.ratio > ans.ratio,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| data | codec | ratio | encode GB/s (best) | of copy | decode GB/s (best) | of copy |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        e, d = r.encode_gb_s, r.decode_gb_s
        lines.append(
            f"| {r.data} | {r.codec} | {r.ratio:.3f} "
            f"| {e.median:.1f} ({e.best:.1f}) | {r.encode_share_of_copy:.0%} "
            f"| {d.median:.1f} ({d.best:.1f}) | {r.decode_share_of_copy:.0%} |"
        )
    return "\n".join(lines)
