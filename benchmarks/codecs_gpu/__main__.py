"""Ratio and speed of every codec on a GPU, beside nvCOMP's.

    python -m benchmarks.codecs_gpu [--mib 1024] [--rounds 7] [--out FILE.json]

The data of benchmarks/codecs.py in chunks of 4 MiB, as the agent cuts files, over and over until
``--mib`` of plain bytes lie on the GPU, and the exponent plane of BF16 alone. ``torpor`` cuts
chunks into planes and puts those through rANS that it gives to rANS where a GPU encodes; the others
count as raw, also where its CPU side would still gain by zstd. nvCOMP has the same bytes on the
same queue: ANS, GDeflate and Bitcomp in parts of 64 KiB, LZ4 and zstd in chunks of 64 KiB, as it is
fastest, and of 4 MiB, as a snapshot needs them.

Rates are plain bytes per second of the GPU's time by its own events, data in and out in its memory,
all chunks given to it at once, behind other work, so that the host's share is done before. What
nvCOMP makes the GPU wait for on the host all the same is counted. Beside them the bytes moved
(plain and stored) as a share of what a copy on the device moved (read and written) in the same run.
Everything decoded is compared with the plain bytes. ``end_to_end`` is wall time from host memory to
host memory, copies and all. Nothing is projected. Without a GPU it says so and ends with status 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

from benchmarks.codecs import EXPONENTS, add_common, data_sets, exponents, publish
from benchmarks.codecs_gpu.chunks import CameBackWrong, chunks_that_fit, queue_for
from benchmarks.codecs_gpu.report import WEIGHTS, Kind, Report
from gpu_kernels import nvcomp
from gpu_kernels.clock import Clock
from gpu_kernels.device import Device, GpuHangs
from gpu_kernels.driver import GpuError
from gpu_kernels.suite import NO_GPU
from torpor.shared.codecs.layout import Element
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.values import MIB

_UNLIKE_MAX: Final = 24 * MIB  # plain bytes of a kind before they come again


def kinds(plain_bytes: int, chunk_bytes: int) -> Iterator[Kind]:
    """The data of benchmarks/codecs.py, and behind BF16 its exponents; whole chunks only."""
    for name, plain, element in data_sets(plain_bytes):
        yield Kind(name, element, _chunks(plain, chunk_bytes), bare=False)
        if element is Element.BF16:
            yield Kind(EXPONENTS, Element.BYTES, _chunks(exponents(plain), chunk_bytes), bare=True)


def run(
    device: Device,
    open_device: Callable[[], Device],
    library: nvcomp.Nvcomp | str,
    plain_bytes: int,
    rounds: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, Any]:
    """Everything, as one JSON document. ``open_device`` opens the same GPU once more."""
    report = Report(device, library, rounds)
    count = chunks_that_fit(device, plain_bytes, chunk_bytes)
    queue = queue_for(device, count, chunk_bytes)
    weights = None
    with closing(Clock(queue)) as clock:
        report.measure_copies(queue, clock, count, chunk_bytes)
        for kind in kinds(min(_UNLIKE_MAX, count * chunk_bytes), chunk_bytes):
            report.measure_kind(queue, clock, kind, count)
            weights = kind if kind.name == WEIGHTS else weights
    device.drop(queue)
    if weights is not None:
        report.measure_end_to_end(open_device, weights)
    return report.as_json() | {"chunk_bytes": chunk_bytes, "plain_bytes": count * chunk_bytes}


def _chunks(plain: bytes, chunk_bytes: int) -> list[bytes]:
    """Whole chunks; what is shorter than one is one."""
    whole = len(plain) // chunk_bytes * chunk_bytes
    return [plain[at : at + chunk_bytes] for at in range(0, whole, chunk_bytes)] or [plain]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs_gpu", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="plain MiB on the GPU at once")
    add_common(parser)
    options = parser.parse_args()
    try:
        device = Device()
    except GpuError as error:
        print(f"no benchmark was run: {error}", file=sys.stderr)
        return NO_GPU
    report: dict[str, Any] = {}
    failure, hangs = "", False
    try:
        report = run(device, Device, _library(), options.mib * MIB, options.rounds)
    except (GpuError, CameBackWrong) as error:
        failure, hangs = str(error), isinstance(error, GpuHangs)
    if not hangs:  # else the driver may still write into the memory that it has
        device.close()
    if failure:
        print(f"the benchmark was ended, and nothing is kept: {failure}", file=sys.stderr)
        return 1
    publish(report, options.out)
    return 0


def _library() -> nvcomp.Nvcomp | str:
    try:
        return nvcomp.load()
    except nvcomp.NvcompError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
