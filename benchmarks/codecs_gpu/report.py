"""What the benchmark measures on one GPU, as rows and as one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.codecs import Rate, host, rate_of
from benchmarks.codecs_gpu.chunks import STAGED_MAX, DeviceChunks
from benchmarks.codecs_gpu.coders import DeviceCoder, Nvcomp, Torpor, coded_planes
from benchmarks.codecs_gpu.end_to_end import batches_seconds, encoder_seconds
from gpu_kernels import nvcomp
from gpu_kernels.clock import Clock
from gpu_kernels.device import Device, Queue
from torpor.control.measure.host import host_facts
from torpor.shared.codecs.layout import Element

WEIGHTS: Final = "weights BF16"
"""The kind of data that the goals are about."""

_ENCODE_GOAL, _DECODE_GOAL = 300, 500  # GB/s
_ALGORITHMS: Final = ("ans", "zstd", "lz4", "gdeflate", "bitcomp")
THREADS: Final = (1, 8)
END_TO_END_CHUNKS: Final = 32


class Kind(NamedTuple):
    """One kind of data. ``bare`` is a plane by itself, for entropy coders alone."""

    name: str
    element: Element
    chunks: list[bytes]
    bare: bool

    def coded(self) -> list[list[int]]:
        """Of each chunk, the planes that torpor puts through rANS."""
        return [[0] if self.bare else coded_planes(one, self.element) for one in self.chunks]


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
    """What has been measured on one GPU so far. GpuError where the GPU fails, CameBackWrong where
    a codec does. ``library`` is nvCOMP, or why it is not here."""

    def __init__(self, device: Device, library: nvcomp.Nvcomp | str, rounds: int) -> None:
        self._device = device
        self._rounds = rounds
        self._library = None if isinstance(library, str) else library
        self.rows: list[Row] = []
        self.copies: dict[str, Rate] = {}
        self.end_to_end: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        if isinstance(library, str):
            self._leave_out("all", "nvCOMP", library)

    def measure_copies(self, queue: Queue, clock: Clock, count: int, chunk_bytes: int) -> None:
        """What the GPU copies in its own memory, and from and to pinned memory of the host."""
        with queue.scope():
            on_gpu = DeviceChunks(queue, clock, [bytes(chunk_bytes)], count)
            copied = rate_of(on_gpu.moved_by_copy, on_gpu.copy_seconds(self._rounds))
            size = min(STAGED_MAX, on_gpu.plain_bytes)
            staged, there = queue.staging(size), queue.room(size)
            sent = on_gpu.seconds(partial(queue.send, staged, there), self._rounds)
            brought = on_gpu.seconds(partial(queue.bring, there, staged), self._rounds)
        self.copies = {
            "on_device_read_and_written_gb_s": copied,
            "host_to_device_gb_s": rate_of(size, sent),
            "device_to_host_gb_s": rate_of(size, brought),
        }

    def measure_kind(self, queue: Queue, clock: Clock, kind: Kind, count: int) -> None:
        """All codecs on one kind of data, one after the other, behind ``measure_copies``."""
        with queue.scope():
            on_gpu = DeviceChunks(queue, clock, kind.chunks, count)
            coded = kind.coded()
            if any(coded):
                over = [coded[number % len(coded)] for number in range(count)]
                ours = partial(Torpor, queue, kind.element, on_gpu.plains, on_gpu.targets, over)
                self._measure_coder(on_gpu, kind, ours)
            else:
                why = "no plane of it is one for rANS: zstd on the CPU takes it, or it stays raw"
                self._leave_out(kind.name, Torpor.name, why)
            if self._library is None:
                return
            for algorithm in ("ans",) if kind.bare else _ALGORITHMS:
                for part_bytes in _part_bytes(algorithm, len(kind.chunks[0])):
                    theirs = partial(
                        Nvcomp, queue, self._library, algorithm, kind.element, on_gpu.plains,
                        on_gpu.targets, part_bytes,
                    )  # fmt: skip
                    try:
                        self._measure_coder(on_gpu, kind, theirs)
                    except (nvcomp.NvcompError, MemoryError) as error:
                        self._leave_out(kind.name, f"nvCOMP {algorithm}", error)

    def measure_end_to_end(self, open_device: Callable[[], Device], kind: Kind) -> None:
        """The agent's encoder and nvCOMP's batches, from host memory to host memory."""
        chunks = [kind.chunks[n % len(kind.chunks)] for n in range(END_TO_END_CHUNKS)]
        for threads in THREADS:
            seconds = encoder_seconds(open_device(), chunks, kind.element, threads, self._rounds)
            name = f"torpor, {threads} thread{'s' * (threads > 1)}"
            self._add_end_to_end(kind.name, name, chunks, seconds, [])
        if self._library is None:
            return
        for algorithm in _ALGORITHMS:
            try:
                both = batches_seconds(
                    self._device, self._library, algorithm, chunks, kind.element, self._rounds
                )
            except nvcomp.NvcompError as error:
                self._leave_out(f"{kind.name}, end to end", f"nvCOMP {algorithm}", error)
            else:
                self._add_end_to_end(kind.name, f"nvCOMP {algorithm}", chunks, *both)

    def as_json(self) -> dict[str, Any]:
        """Everything, as one JSON document, besides when and how it was asked for."""
        return {
            "benchmark": "codecs_gpu",
            "host": host()
            | {
                "commit": host_facts()["commit"],
                "gpu": self._device.name,
                "nvidia_driver": _driver_version(),
                "nvcomp": None if self._library is None else self._library.__version__,
            },
            "rounds": self._rounds,
            "clock": "events on the GPU's stream; end_to_end: wall time on the host",
            "copies": {name: asdict(rate) for name, rate in self.copies.items()},
            "rows": [asdict(row) for row in self.rows],
            "end_to_end": self.end_to_end,
            "left_out": self.left_out,
            "goals": goals(self.rows),
            "table": table(self.rows),
        }

    def _measure_coder(
        self, on_gpu: DeviceChunks, kind: Kind, make: Callable[[], DeviceCoder]
    ) -> None:
        with on_gpu.queue.scope():
            coder = make()
            try:
                encode_s, stored_bytes, decode_s = on_gpu.run_coder(coder, self._rounds)
            finally:
                coder.close()
        encode, decode = (rate_of(on_gpu.plain_bytes, s) for s in (encode_s, decode_s))
        moved = 1 + stored_bytes / on_gpu.plain_bytes
        copied = self.copies["on_device_read_and_written_gb_s"].median
        row = Row(
            kind.name, coder.name, on_gpu.plain_bytes, stored_bytes,
            round(on_gpu.plain_bytes / stored_bytes, 4), encode, decode,
            round(moved * encode.median / copied, 4), round(moved * decode.median / copied, 4),
        )  # fmt: skip
        self.rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr)

    def _add_end_to_end(
        self,
        data: str,
        codec: str,
        chunks: Sequence[bytes],
        encode_s: Sequence[float],
        decode_s: Sequence[float],
    ) -> None:
        size = sum(map(len, chunks))
        self.end_to_end.append({
            "data": data,
            "codec": codec,
            "plain_bytes": size,
            "encode_gb_s": asdict(rate_of(size, encode_s)),
            "decode_gb_s": asdict(rate_of(size, decode_s)) if decode_s else None,
        })  # fmt: skip

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


def _part_bytes(algorithm: str, chunk_bytes: int) -> list[int]:
    """What nvCOMP gets as one buffer: it cuts a chunk itself for its own bitstreams."""
    if algorithm not in nvcomp.STOCK:
        return [chunk_bytes]
    return sorted({min(nvcomp.PART_BYTES, chunk_bytes), chunk_bytes})


def _driver_version() -> str | None:
    """As the kernel's module tells; None where it does not, as in some containers."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
