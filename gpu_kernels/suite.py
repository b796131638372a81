"""The GPU suite, one command for a machine with a GPU: ``python -m gpu_kernels.suite``.

Every kernel runs on the GPU over ``gpu_kernels.cases`` and its bytes are compared with those of
the C twin; damaged streams must be refused as the twin refuses them. Without a GPU it says so and
ends with status 3: that is no pass.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import suppress

from gpu_kernels import batch, cases, native, twin
from gpu_kernels.device import Device, Queue
from gpu_kernels.driver import GpuError
from gpu_kernels.rans.portable import RansStreamError

NO_GPU = 3
_SEGMENTS_LOG2 = (12, 15)
_DEVICE_BYTES = 128 << 20  # all cases at once, large ones too
_PINNED_BYTES = 64 << 20


def check_planes(where: Queue) -> Iterator[str]:
    """Split and join all cases in batches of their width; yields what differs."""
    for width in (2, 4, 8):
        named = [(name, plain) for name, of, plain in cases.elements_to_split() if of == width]
        for rotate in (False, True):
            with where.scope():
                held = [where.put(plain) for _, plain in named]
                cut = batch.split(where, held, width, rotate)
                back = batch.join(where, cut, width, rotate)
                for (name, plain), planes, joined in zip(named, cut, back, strict=True):
                    expected = [bytearray(planes.elements) for _ in range(width)]
                    twin.split(memoryview(plain), width, rotate, [memoryview(e) for e in expected])
                    for number, plane in enumerate(expected):
                        if where.get(planes.plane(number)) != plane:
                            yield f"split of {name}, rotate {rotate}: plane {number} differs"
                    if where.get(joined) != plain:
                        yield f"join of {name}, rotate {rotate}: differs"


def check_rans(where: Queue, *, large: bool) -> Iterator[str]:
    """Encode and decode all cases in one batch; yields what differs from the C twin."""
    lib = _twins()
    named = list(cases.planes_to_encode(large=large))
    for segment_log2 in _SEGMENTS_LOG2:
        expected: list[bytes] = []
        with where.scope():
            held = [where.put(plain) for _, plain in named]
            made = batch.rans_encode(where, held, segment_log2)
            streams = [None if one is None else where.get(one) for one in made]
        for (name, plain), stream in zip(named, streams, strict=True):
            room = native.rans_bound(lib, len(plain), segment_log2)
            one = bytes(native.rans_encode(lib, plain, room, segment_log2) or b"")
            expected.append(one)
            if stream != (one if len(one) < len(plain) else None):
                yield f"encoding of {name}, segments of 2^{segment_log2}: differs"
        with where.scope():
            back = batch.rans_decode(where, expected, [len(plain) for _, plain in named])
            for (name, plain), memory in zip(named, back, strict=True):
                if where.get(memory) != plain:
                    yield f"decoding of {name}, segments of 2^{segment_log2}: differs"


def check_refusals(where: Queue, streams: int) -> Iterator[str]:
    """Damaged streams: the kernels must agree with the C twin, in verdict and bytes."""
    lib = _twins()
    dice = random.Random(3)  # noqa: S311  (test data)
    for number in range(streams):
        plain = cases.exponents(dice, dice.randrange(1, 3000))
        room = native.rans_bound(lib, len(plain))
        stream = bytearray(native.rans_encode(lib, plain, room) or b"")
        for _ in range(dice.randrange(1, 4)):
            stream[dice.randrange(len(stream))] ^= 1 << dice.randrange(8)
        verdicts: list[bytes | None] = [None, None]
        with suppress(RansStreamError):
            verdicts[0] = bytes(native.rans_decode(lib, stream, len(plain)))
        with suppress(RansStreamError), where.scope():
            memory = batch.rans_decode(where, [bytes(stream)], [len(plain)])[0]
            verdicts[1] = where.get(memory)
        if verdicts[0] != verdicts[1]:
            yield f"damaged stream {number}: the kernel and the C twin disagree"


def run(device: Device, *, large: bool, refusals: int) -> dict[str, object]:
    """All checks on one GPU, each with fresh memory; the report names every difference."""
    failures = [
        *check_planes(_queue(device)),
        *check_rans(_queue(device), large=large),
        *check_refusals(_queue(device), refusals),
    ]
    return {"device": device.name, "failures": failures}


def main() -> int:
    try:
        device = Device()
    except GpuError as error:
        print(f"no GPU suite was run: {error}", file=sys.stderr)
        return NO_GPU
    report = run(device, large=True, refusals=1000)
    device.close()
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


def _queue(device: Device) -> Queue:
    return device.queue(device_bytes=_DEVICE_BYTES, pinned_bytes=_PINNED_BYTES)


def _twins() -> native.Library:
    lib = native.library()
    if lib is None:
        raise RuntimeError("the C twins are not built: run python -m gpu_kernels.build")
    return lib


if __name__ == "__main__":
    sys.exit(main())
