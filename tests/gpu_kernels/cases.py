"""Inputs that every twin must treat alike: random, adversarial, and like real weights.

The tests use them under the CPU shim, ``tests.gpu_kernels.suite`` on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

BLOCK = 1 << 17


def planes_to_encode(seed: int = 1, *, large: bool = False) -> Iterator[tuple[str, bytes]]:
    """Named planes for rANS. ``large`` adds some of several tables, slow under the shim."""
    dice = random.Random(seed)
    for size in (1, 2, 31, 32, 33, 1000, 4096, 4097, 32_768, 32_769):
        yield f"exponents of {size}", exponents(dice, size)
    yield "one symbol", bytes(5000)
    yield "one symbol, a whole block", b"\x7f" * BLOCK
    yield "one odd one out", bytes(BLOCK - 1) + b"\x01"
    yield "one odd one first", b"\xff" + bytes(BLOCK)
    yield "two symbols in turn", b"\x00\xff" * 3000
    yield "all symbols once", bytes(range(256))
    yield "all symbols, one common", bytes(range(256)) + b"\x40" * 60_000
    yield "noise", dice.randbytes(40_000)
    yield "rare symbols that round to nothing", b"\x10" * 100_000 + bytes(range(1, 256))
    yield "a table a block", exponents(dice, BLOCK) + bytes(range(256)) * 10
    if large:
        yield "exponents of a chunk", exponents(dice, 4 << 20)
        yield "noise of a chunk", dice.randbytes(4 << 20)


def elements_to_split(seed: int = 2) -> Iterator[tuple[str, int, bytes]]:
    """Named plain bytes with their width."""
    dice = random.Random(seed)
    for width in (2, 4, 8):
        for elements in (1, 7, 8, 9, 2047, 2048, 2049, 40_001):
            yield f"{elements} of {width}", width, dice.randbytes(elements * width)
        yield f"ones of {width}", width, b"\xff" * 800
        yield (
            f"single bits of {width}",
            width,
            b"".join((1 << bit).to_bytes(width, "little") for bit in range(8 * width)),
        )


def exponents(dice: random.Random, size: int) -> bytes:
    """Symbols spread like the exponents of trained weights: about 2.6 bits each."""
    return bytes(max(0, 123 - int(dice.expovariate(0.7))) for _ in range(size))
