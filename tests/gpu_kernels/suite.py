"""The kernels on a GPU, one command: ``python -m tests.gpu_kernels.suite``.

Every kernel runs on the GPU over all cases, and its bytes are compared with those of
the C twin; damaged streams must be refused as the twin refuses them. Prints what it ran on. Without
CuPy or a GPU it says so and ends with status 3: that is no pass.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from gpu_kernels import batch, native, twin
from gpu_kernels.rans.portable import RansStreamError
from tests.gpu_kernels import cases

if TYPE_CHECKING:
    from gpu_kernels.cuda import Gpu

NO_GPU = 3
_SEGMENTS_LOG2 = (12, 15)


def check_planes(gpu: Gpu) -> Iterator[str]:
    """Split and join all cases in batches of their width; yields what differs."""
    for width in (2, 4, 8):
        named = [(name, plain) for name, of, plain in cases.elements_to_split() if of == width]
        for rotate in (False, True):
            held = [gpu.put(plain) for _, plain in named]
            work, cut = batch.split(gpu, held, width, rotate)
            work.launch()
            back = [gpu.room(len(plain)) for _, plain in named]
            batch.join(gpu, cut, back, width, rotate).launch()
            for (name, plain), planes, joined in zip(named, cut, back, strict=True):
                expected = [bytearray(planes.elements) for _ in range(width)]
                twin.split(memoryview(plain), width, rotate, [memoryview(e) for e in expected])
                for number, plane in enumerate(expected):
                    if gpu.get(planes.plane(number)) != plane:
                        yield f"split of {name}, rotate {rotate}: plane {number} differs"
                if gpu.get(joined) != plain:
                    yield f"join of {name}, rotate {rotate}: differs"


def check_rans(gpu: Gpu, *, large: bool) -> Iterator[str]:
    """Encode and decode all cases in one batch; yields what differs from the C twin."""
    lib = _twins()
    named = list(cases.planes_to_encode(large=large))
    for segment_log2 in _SEGMENTS_LOG2:
        expected: list[bytes] = []
        encoding = batch.rans_encode(gpu, [gpu.put(plain) for _, plain in named], segment_log2)
        encoding.work.launch()
        for (name, plain), stream in zip(named, encoding.streams(), strict=True):
            room = native.rans_bound(lib, len(plain), segment_log2)
            one = bytes(native.rans_encode(lib, plain, room, segment_log2) or b"")
            expected.append(one)
            made = None if stream is None else gpu.get(stream)
            if made != (one if len(one) < len(plain) else None):
                yield f"encoding of {name}, segments of 2^{segment_log2}: differs"
        back = [gpu.room(len(plain)) for _, plain in named]
        decoding = batch.rans_decode(gpu, [gpu.put(one) for one in expected], back, segment_log2)
        decoding.work.launch()
        decoding.check()
        for (name, plain), array in zip(named, back, strict=True):
            if gpu.get(array) != plain:
                yield f"decoding of {name}, segments of 2^{segment_log2}: differs"


def check_refusals(gpu: Gpu, streams: int) -> Iterator[str]:
    """Damaged streams: the kernels must agree with the C twin, in verdict and bytes."""
    lib = _twins()
    dice = random.Random(3)
    for number in range(streams):
        plain = cases.exponents(dice, dice.randrange(1, 3000))
        room = native.rans_bound(lib, len(plain))
        stream = bytearray(native.rans_encode(lib, plain, room) or b"")
        for _ in range(dice.randrange(1, 4)):
            stream[dice.randrange(len(stream))] ^= 1 << dice.randrange(8)
        verdicts: list[bytes | None] = [None, None]
        with suppress(RansStreamError):
            verdicts[0] = bytes(native.rans_decode(lib, stream, len(plain)))
        with suppress(RansStreamError):
            back = gpu.room(len(plain))
            decoding = batch.rans_decode(
                gpu, [gpu.put(stream)], [back], batch.segment_log2_of(stream)
            )
            decoding.work.launch()
            decoding.check()
            verdicts[1] = gpu.get(back)
        if verdicts[0] != verdicts[1]:
            yield f"damaged stream {number}: the kernel and the C twin disagree"


def run(gpu: Gpu, *, large: bool, refusals: int) -> dict[str, object]:
    """All checks on one GPU; the report names every difference."""
    failures = [
        *check_planes(gpu),
        *check_rans(gpu, large=large),
        *check_refusals(gpu, refusals),
    ]
    return {"gpu": gpu.name, "cuda_driver": gpu.driver, "failures": failures}


def main() -> int:
    try:
        from gpu_kernels.cuda import Gpu, GpuUnusable
    except ImportError as error:
        print(f"no GPU suite was run: install torpor[gpu] ({error})", file=sys.stderr)
        return NO_GPU
    try:
        gpu = Gpu()
    except GpuUnusable as error:
        print(f"no GPU suite was run: {error}", file=sys.stderr)
        return NO_GPU
    report = run(gpu, large=True, refusals=1000)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


def _twins() -> native.Library:
    lib = native.library()
    if lib is None:
        raise RuntimeError("the C twins are not built: run python -m gpu_kernels.build")
    return lib


if __name__ == "__main__":
    sys.exit(main())
