"""nvCOMP on a GPU, one command: ``python -m gpu_kernels.nvcomp_suite``.

Its raw LZ4 and zstd must be what the CPU libraries read, and it must read theirs; its own
bitstreams must come back; damage must be refused. Without a GPU or without nvCOMP it says so and
ends with status 3: that is no pass.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import lz4.block
import zstandard

from gpu_kernels import cases, nvcomp
from gpu_kernels.device import Device
from gpu_kernels.driver import GpuError
from gpu_kernels.nvcomp import Batches, EncodedRefused, Nvcomp, Stock
from gpu_kernels.suite import NO_GPU

SIZES = (nvcomp.PART_BYTES, nvcomp.CHUNK_BYTES)
"""Bytes of the largest chunk: as nvCOMP likes them, and as a snapshot cuts them."""


class Cpu(NamedTuple):
    """A stock library: encode, and decode to so many bytes."""

    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes, int], bytes]


def chunks(largest: int) -> list[bytes]:
    """Planes, weights, text and noise, of several sizes up to ``largest``."""
    dice = random.Random(7)  # noqa: S311  (test data)
    words = b" ".join(b"step %d loss %d" % (n, dice.randrange(9999)) for n in range(largest // 16))
    some = [plain[:largest] for _, plain in cases.planes_to_encode(large=largest > cases.BLOCK)]
    return [*some, words[:largest], dice.randbytes(largest), bytes(largest)]


def check_stock(device: Device, library: Nvcomp, largest: int) -> Iterator[str]:
    """LZ4 blocks and zstd frames, made here and read there; yields what differs."""
    plains = chunks(largest)
    for algorithm, cpu in _CPU.items():
        batches = Batches(device, library, algorithm, chunk_bytes=largest)
        for number, (one, plain) in enumerate(zip(batches.encode(plains), plains, strict=True)):
            try:
                same = cpu.decode(one.stored, one.plain_bytes) == plain
            except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError) as error:
                yield f"{algorithm} of nvCOMP, chunk {number} of {len(plain)}: {error}"
            else:
                if not same:
                    yield f"{algorithm} of nvCOMP, chunk {number} of {len(plain)}: differs"
        stored = [cpu.encode(plain) for plain in plains]
        theirs = [
            Stock(algorithm, len(plain), one, nvcomp.digest_of(one))
            for one, plain in zip(stored, plains, strict=True)
            if len(one) <= batches.bound
        ]
        wanted = [p for p, one in zip(plains, stored, strict=True) if len(one) <= batches.bound]
        yield from _differences(f"{algorithm} of the CPU", batches.decode(theirs), wanted)
        batches.close()


def check_own(device: Device, library: Nvcomp, largest: int) -> Iterator[str]:
    """nvCOMP's own bitstreams, for elements of each kind; yields what does not come back."""
    some = chunks(largest)
    for algorithm in sorted(nvcomp.TRANSIENT):
        for element, width in (("BYTES", 1), ("F8", 1), ("BF16", 2), ("F32", 4)):
            batches = Batches(device, library, algorithm, element, largest)
            plains = [whole for p in some if (whole := p[: len(p) // width * width])]
            what = f"{algorithm} of {element}"
            yield from _differences(what, batches.decode(list(batches.encode(plains))), plains)
            batches.close()


def check_refusals(device: Device, library: Nvcomp) -> Iterator[str]:
    """A damaged chunk of each algorithm; yields those that were taken."""
    for algorithm in sorted(nvcomp.STOCK | nvcomp.TRANSIENT):
        batches = Batches(device, library, algorithm, chunk_bytes=nvcomp.PART_BYTES)
        (one,) = batches.encode([b"plain" * 999])
        damaged = replace(one, stored=one.stored[:-1] + bytes([one.stored[-1] ^ 1]))
        with suppress(EncodedRefused):
            list(batches.decode([damaged]))
            yield f"{algorithm}: a damaged chunk was given to the GPU"
        batches.close()


def run(device: Device, library: Nvcomp, sizes: Sequence[int] = SIZES) -> dict[str, object]:
    """All checks; the report names every difference. An nvCOMP that fails raises GpuError."""
    failures: list[str] = []
    for largest in sizes:
        failures += check_stock(device, library, largest)
        failures += check_own(device, library, largest)
    failures += check_refusals(device, library)
    return {"device": device.name, "nvcomp": library.__version__, "failures": failures}


def main() -> int:
    try:
        device = Device()
        library = nvcomp.load()
    except GpuError as error:
        print(f"no nvCOMP suite was run: {error}", file=sys.stderr)
        return NO_GPU
    report = run(device, library)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


def _differences(what: str, got: Iterator[bytes], wanted: Sequence[bytes]) -> Iterator[str]:
    for number, (one, plain) in enumerate(zip(got, wanted, strict=True)):
        if one != plain:
            yield f"{what}, chunk {number} of {len(plain)}: differs"


def _unframe(frame: bytes, plain_bytes: int) -> bytes:
    """As a snapshot's reader does: it refuses a frame without its size."""
    if zstandard.frame_content_size(frame) != plain_bytes:
        raise ValueError("the frame does not state the size of its content")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=plain_bytes)


_CPU = {
    "lz4": Cpu(
        lambda plain: bytes(lz4.block.compress(plain, store_size=False)),
        lambda stored, size: bytes(lz4.block.decompress(stored, uncompressed_size=size)),
    ),
    "zstd": Cpu(zstandard.ZstdCompressor(level=3).compress, _unframe),
}

if __name__ == "__main__":
    sys.exit(main())
