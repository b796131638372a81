"""A folder of content to measure with: like a workspace's, never stored before."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from torpor.machine.agent.content import json_lines, sources, weights
from torpor.shared.values import MIB

_WEIGHTS_SHARE: Final = 0.6
_SOURCES_SHARE: Final = 0.3
_FILE_BYTES: Final = 512 * MIB  # a file of weights
_BLOCK_BYTES: Final = 8 * MIB  # made at once, in memory
_ROW_BYTES: Final = 130  # a JSON line, about


class MadeContent(NamedTuple):
    """What was made."""

    files: int
    bytes: int


def make_below(folder: Path, total_bytes: int, seed: int) -> MadeContent:
    """Make new content in ``folder``, which is new or empty: 60 % BF16 weights, 30 % sources,
    10 % JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    files = size = 0
    for path, blocks in _files(total_bytes, seed):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("wb") as file:
            size += sum(map(file.write, blocks))
        files += 1
    return MadeContent(files, size)


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
    dice = random.Random(seed)
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
    dice = random.Random(seed)
    for at in range(0, size, _BLOCK_BYTES):
        yield weights(min(_BLOCK_BYTES, size - at) // 2, dice)
