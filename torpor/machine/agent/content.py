"""Content to measure encodings with: like a workspace's, never the same twice."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from math import erf, sqrt
from pathlib import Path
from typing import Final

_SIGMA: Final = 0.02  # standard deviation of a trained layer's weights
_ROW_WORDS: Final = 16


def weights(count: int, dice: random.Random) -> bytes:
    """``count`` BF16 numbers, two bytes each: sign and exponent as a normal distribution has
    them, the last bit of the exponent and the mantissa by chance."""
    numbers = bytearray(2 * count)
    numbers[0::2] = dice.randbytes(count)
    numbers[1::2] = dice.randbytes(count).translate(_UPPER_BYTES)
    return bytes(numbers)


def sources(seed: int) -> Iterator[tuple[str, bytes]]:
    """This Python's own library, file by file and without end; each copy differs from all others
    by its first line."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.glob("*/*.py")) + sorted(library.glob("*.py"))
    turn = 0
    while paths:
        for path in paths:
            name = f"copy-{turn}/{path.relative_to(library)}"
            yield name, f"# copy {turn} of {seed}\n".encode() + path.read_bytes()
        turn += 1


def json_lines(rows: int, dice: random.Random) -> bytes:
    """Text as it is logged and trained on: common words, rare numbers."""
    words = dice.choices(_WORDS, cum_weights=_COMMON, k=_ROW_WORDS * rows)
    lines = []
    for number in range(rows):
        text = " ".join(words[_ROW_WORDS * number : _ROW_WORDS * (number + 1)])
        lines.append(f'{{"id": {number}, "score": {dice.random()}, "text": "{text}"}}')
    return "\n".join(lines).encode()


def _upper_bytes() -> bytes:
    """For each of 256 equal chances the upper byte of a BF16 number: sign and exponent >> 1."""

    def below(exponent: int) -> float:
        """The chance that a number's magnitude is under 2 ** (exponent - 127)."""
        return erf(2.0 ** (exponent - 127) / _SIGMA / sqrt(2))

    pairs = range(90, 128, 2)
    table = bytearray()
    for sign in (0, 0x80):
        for chance in range(128):
            pair = next(e for e in pairs if below(e + 2) > (chance + 0.5) / 128)
            table.append(sign | pair >> 1)
    return bytes(table)


_UPPER_BYTES: Final = _upper_bytes()
_WORDS: Final = [f"{number * 2_654_435_761 % 2**32:x}"[: 2 + number % 7] for number in range(8192)]
_COMMON: Final = list(accumulate(1 / (rank + 1) for rank in range(len(_WORDS))))
