"""Mutated chunks through the decoders of ``planes`` and ``rans``: a command, for long runs.

    python tests/shared/codecs/fuzz_planes.py --streams 10000000 [--seed 1]

Each is refused with SnapshotDamaged or makes exactly the bytes asked for; anything else ends the
run. The rANS decoders by themselves have ``python -m tests.gpu_kernels.fuzz``.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence

from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES, RANS, PlanesCodec
from torpor.shared.errors import SnapshotDamaged


def mutate(dice: random.Random, stream: bytearray) -> None:
    """One change; most of them in the header, where the sizes are."""
    kind, size = dice.randrange(8), len(stream)
    if size < 12:
        return
    if kind < 4:
        stream[dice.randrange(min(size, dice.choice((24, 64, size))))] = dice.randrange(256)
    elif kind == 4:
        stream[dice.randrange(size)] ^= 1 << dice.randrange(8)
    elif kind == 5:
        del stream[dice.randrange(size) :]
    elif kind == 6:
        value = dice.choice((0, 1, 255, 65_535, 1 << 30, (1 << 32) - 1, dice.getrandbits(32)))
        struct.pack_into("<I", stream, dice.randrange(min(size - 4, 64)), value)
    else:
        at = dice.randrange(size)
        stream[at:at] = dice.randbytes(dice.randrange(1, 9))


def make(dice: random.Random) -> tuple[PlanesCodec, bytes, bytes]:
    """A codec, some plain bytes of several elements, and their stream."""
    while True:
        codec = dice.choice((PLANES, RANS))
        elements: Sequence[Element] = dice.choices(list(Element), k=dice.randrange(1, 4))
        runs = [Run(dice.randrange(8, 1500), element) for element in elements]
        floats = [dice.gauss(0, 0.02) for _ in range(sum(run.bytes for run in runs) // 4 + 1)]
        plain = struct.pack(f"<{len(floats)}f", *floats)
        if dice.randrange(2):  # mantissas that are zero, so that small planes shrink too
            plain = b"".join(plain[at + 2 : at + 4] * 2 for at in range(0, len(plain), 4))
        plain = plain[: sum(run.bytes for run in runs)]
        stream = codec.encode(memoryview(plain), runs)
        if stream is not None:
            return codec, plain, stream


def fuzz(streams: int, seed: int) -> dict[str, object]:
    """Decode ``streams`` mutated streams; raises whatever a decoder should not have raised."""
    dice = random.Random(seed)
    verdicts: Counter[str] = Counter()
    started = time.monotonic()
    codec, plain, good = make(dice)
    for number in range(streams):
        if number % 500 == 0:
            codec, plain, good = make(dice)
        stream = bytearray(good)
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            mutate(dice, stream)
        try:
            made = codec.decode(memoryview(stream), len(plain))
        except SnapshotDamaged:
            verdicts["refused"] += 1
            continue
        if len(made) != len(plain):
            raise AssertionError(f"stream {number} made {len(made)} bytes, not {len(plain)}")
        verdicts["original" if made == plain else "left to the hash"] += 1
    wall_s = round(time.monotonic() - started, 1)
    return {"streams": streams, "seed": seed, **verdicts, "wall_s": wall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(fuzz(options.streams, options.seed)))


if __name__ == "__main__":
    main()
