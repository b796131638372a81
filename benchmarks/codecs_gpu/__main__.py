"""Ratio and speed of every codec on a GPU, beside nvCOMP's.

    python -m benchmarks.codecs_gpu [--mib 1024] [--rounds 7] [--out FILE.json]

The data of benchmarks/codecs.py in chunks of 4 MiB, as the agent cuts files, over and over until
``--mib`` of plain bytes lie on the GPU, and the exponent plane of BF16 alone. ``torpor`` cuts
chunks into planes and puts those through rANS that it gives to rANS where a GPU encodes; the others
count as raw, also where its CPU side would still gain by zstd. nvCOMP has the same bytes on the
same stream: ANS, GDeflate and Bitcomp in parts of 64 KiB, LZ4 and zstd in chunks of 64 KiB, as it
is fastest, and of 4 MiB, as a snapshot needs them.

Rates are plain bytes per second of the GPU's time by its own events, data in and out in its memory,
all chunks given to it at once, behind other work, so that the host's share is done before. What
nvCOMP makes the GPU wait for on the host all the same is counted. Beside them the bytes moved
(plain and stored) as a share of what a copy on the device moved (read and written) in the same run.
Everything decoded is compared with the plain bytes. ``end_to_end`` is the agent's worker by wall
time, from host memory to host memory, copies and all. Nothing is projected. Without CuPy or a GPU
it says so and ends with status 3.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from benchmarks.codecs import EXPONENTS, add_common, data_sets, exponents, publish
from torpor.machine.agent.gpu_worker import GpuWorker
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.codecs.layout import Element
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.values import MIB

if TYPE_CHECKING:
    from benchmarks.codecs_gpu.report import Kind
    from gpu_kernels.cuda import Gpu

NO_GPU = 3
"""The exit status without a GPU that the kernels run on."""
_UNLIKE_MAX: Final = 24 * MIB  # plain bytes of a kind before they come again
_FOLD: Final = 16
"""GPU memory over the chunks' bytes: they, rubbish, and where they are decoded; a codec's planes,
streams, and words on their way, which take twice that; and as much again for nvCOMP's own."""


def run(gpu: Gpu, plain_bytes: int, rounds: int, chunk_bytes: int = CHUNK_BYTES) -> dict[str, Any]:
    """Everything, as one JSON document."""
    from benchmarks.codecs_gpu.report import WEIGHTS, Report

    count = max(1, min(plain_bytes, gpu.free_bytes() // _FOLD) // chunk_bytes)
    report = Report(gpu, _nvcomp(), count, chunk_bytes, rounds)
    for kind in kinds(min(_UNLIKE_MAX, count * chunk_bytes), chunk_bytes):
        report.measure_kind(kind)
        if kind.name == WEIGHTS:
            with closing(GpuWorker(sys.executable)) as worker:
                report.measure_end_to_end(kind, worker)
    return report.as_json()


def kinds(plain_bytes: int, chunk_bytes: int) -> Iterator[Kind]:
    """The data of benchmarks/codecs.py, and behind BF16 its exponents; whole chunks only."""
    from benchmarks.codecs_gpu.report import Kind

    for name, plain, element in data_sets(plain_bytes):
        yield Kind(name, element, _chunks(plain, chunk_bytes), bare=False)
        if element is Element.BF16:
            once = exponents(plain)
            whole = once * -(-chunk_bytes // len(once))
            yield Kind(EXPONENTS, Element.BYTES, _chunks(whole, chunk_bytes), bare=True)


def _chunks(plain: bytes, chunk_bytes: int) -> list[bytes]:
    whole = len(plain) // chunk_bytes * chunk_bytes
    return [plain[at : at + chunk_bytes] for at in range(0, whole, chunk_bytes)]


def _nvcomp() -> Any:
    try:
        return importlib.import_module("nvidia.nvcomp")
    except (ImportError, OSError) as error:
        return f"nvCOMP is not here ({error}): install torpor[gpu]"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs_gpu", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="plain MiB on the GPU at once")
    add_common(parser)
    options = parser.parse_args()
    try:
        from benchmarks.codecs_gpu.report import CameBackWrong
        from gpu_kernels.cuda import FAULTS, Gpu, GpuUnusable
    except ImportError as error:
        print(f"no benchmark was run: install torpor[gpu] ({error})", file=sys.stderr)
        return NO_GPU
    try:
        gpu = Gpu()
    except GpuUnusable as error:
        print(f"no benchmark was run: {error}", file=sys.stderr)
        return NO_GPU
    try:
        report = run(gpu, options.mib * MIB, options.rounds)
    except (CameBackWrong, GpuError, *FAULTS) as error:
        print(f"the benchmark was ended, and nothing is kept: {error}", file=sys.stderr)
        return 1
    publish(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
