"""Content to measure with: like a workspace's, made on the machine, never stored before."""

from __future__ import annotations

import json
import os
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import erf, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

from torpor.shared.errors import InvalidInput, MachineError
from torpor.shared.values import MIB, workspace_name

PLACE: Final = "~/torpor-benchmark"
"""All content is made below this folder, and nothing else is ever removed."""
_MARK: Final = ".made-by-torpor"
_WEIGHTS_SHARE: Final = 0.6
_SOURCES_SHARE: Final = 0.3
_SIGMA: Final = 0.02  # of a trained layer's weights
_FILE_BYTES: Final = 512 * MIB  # a file of weights
_BLOCK_BYTES: Final = 8 * MIB  # made at once, in memory
_ROW_BYTES: Final = 130  # a JSON line, about
_ROW_WORDS: Final = 16


class MadeContent(NamedTuple):
    """What was made."""

    files: int
    bytes: int


def path_of(name: str) -> str:
    """The folder of the content called ``name``, as a workspace's path."""
    return f"{PLACE}/{workspace_name(name)}"


def make(name: str, total_bytes: int, seed: int, check: Callable[[], None]) -> MadeContent:
    """Make ``path_of(name)`` from new content: 60 % BF16 weights, 30 % sources, 10 % JSON lines.

    ``check`` is called between files and may raise. InvalidInput where the folder of all content
    is there and not ours.
    """
    place = Path(PLACE).expanduser()
    if place.is_dir() and not (place / _MARK).is_file():
        raise InvalidInput(
            f"{place} is there and was not made by torpor: the benchmark works in a folder of that "
            "name; rename yours, or measure on another machine"
        )
    place.mkdir(mode=0o700, exist_ok=True)
    (place / _MARK).touch()
    remove(name, place_too=False)
    return make_below(Path(path_of(name)).expanduser(), total_bytes, seed, check)


def make_below(
    folder: Path, total_bytes: int, seed: int, check: Callable[[], None] = lambda: None
) -> MadeContent:
    """Make the content of ``make`` in ``folder``, which is new or empty."""
    folder.mkdir(parents=True, exist_ok=True)
    files = size = 0
    for path, blocks in _files(total_bytes, seed):
        check()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("wb") as file:
            size += sum(map(file.write, blocks))
        files += 1
    return MadeContent(files, size)


def remove(name: str, *, place_too: bool) -> None:
    """Remove ``path_of(name)``; with ``place_too`` also the folder of all content, where that was
    the last. The mark stays until then: a wake makes the folders again, but no mark."""
    place = Path(PLACE).expanduser()
    if not (place / _MARK).is_file():
        return
    try:
        shutil.rmtree(Path(path_of(name)).expanduser())
    except FileNotFoundError:  # gone already
        pass
    except OSError as cause:
        raise MachineError(
            f"{path_of(name)} cannot be removed from the machine: {cause.filename}: "
            f"{cause.strerror}; remove it by hand"
        ) from None
    if place_too and os.listdir(place) == [_MARK]:
        shutil.rmtree(place)


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


def _files(total_bytes: int, seed: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    left = int(total_bytes * _WEIGHTS_SHARE)
    number = 0
    while left > 0:
        size = min(left, _FILE_BYTES) // 2 * 2
        yield f"models/model-{number:05}.safetensors", _safetensors(size, seed * 1000 + number)
        left -= max(2, size)
        number += 1
    left = int(total_bytes * _SOURCES_SHARE)
    for name, content in sources(seed):
        if left <= 0:
            break
        yield f"env/{name}", iter((content,))
        left -= len(content)
    dice = random.Random(seed)  # noqa: S311 - content, not a secret
    left = total_bytes - int(total_bytes * (_WEIGHTS_SHARE + _SOURCES_SHARE))
    rows = max(1, min(left, 16 * MIB) // _ROW_BYTES)
    for number in range(max(1, left // (16 * MIB))):
        yield f"data/part-{number:04}.jsonl", iter((json_lines(rows, dice),))


def _safetensors(size: int, seed: int) -> Iterator[bytes]:
    header: dict[str, Any] = {
        "w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    dice = random.Random(seed)  # noqa: S311 - content, not a secret
    for at in range(0, size, _BLOCK_BYTES):
        yield weights(min(_BLOCK_BYTES, size - at) // 2, dice)


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
